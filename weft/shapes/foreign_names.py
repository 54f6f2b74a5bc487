"""Names of a model's parameters in other programs: Hugging Face, llama.cpp (GGUF), Meta and Megatron-core."""

import re

from weft.recipe import ModelShape

#: Hugging Face's names by Weft's, outside of layers and in a layer; ``{}`` is the number of an expert.
HUGGING_FACE = {
    "embedding.table": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm.scale": "input_layernorm.weight",
    "attention.wq": "self_attn.q_proj.weight",
    "attention.wk": "self_attn.k_proj.weight",
    "attention.wv": "self_attn.v_proj.weight",
    "attention.wo": "self_attn.o_proj.weight",
    "attention.bq": "self_attn.q_proj.bias",
    "attention.bk": "self_attn.k_proj.bias",
    "attention.bv": "self_attn.v_proj.bias",
    "attention.q_norm.scale": "self_attn.q_norm.weight",
    "attention.k_norm.scale": "self_attn.k_norm.weight",
    "attention.wq_a": "self_attn.q_a_proj.weight",
    "attention.wq_b": "self_attn.q_b_proj.weight",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.wkv_b": "self_attn.kv_b_proj.weight",
    "attention.q_a_norm.scale": "self_attn.q_a_layernorm.weight",
    "attention.kv_a_norm.scale": "self_attn.kv_a_layernorm.weight",
    "ffn_norm.scale": "post_attention_layernorm.weight",
    "ffn.gate": "mlp.gate_proj.weight",
    "ffn.up": "mlp.up_proj.weight",
    "ffn.down": "mlp.down_proj.weight",
    "ffn.router.table": "mlp.gate.weight",
    "ffn.router.bias": "mlp.gate.e_score_correction_bias",
    "ffn.shared_gate": "mlp.shared_expert_gate.weight",
    "ffn.shared.gate": "mlp.shared_expert.gate_proj.weight",
    "ffn.shared.up": "mlp.shared_expert.up_proj.weight",
    "ffn.shared.down": "mlp.shared_expert.down_proj.weight",
    "ffn.experts.gate": "mlp.experts.{}.gate_proj.weight",
    "ffn.experts.up": "mlp.experts.{}.up_proj.weight",
    "ffn.experts.down": "mlp.experts.{}.down_proj.weight",
}
#: Names that differ in Mixtral, in DeepSeek, and with norms after attention and feed-forward too (Gemma 3).
MIXTRAL = {
    "ffn.router.table": "block_sparse_moe.gate.weight",
    "ffn.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
    "ffn.experts.up": "block_sparse_moe.experts.{}.w3.weight",
    "ffn.experts.down": "block_sparse_moe.experts.{}.w2.weight",
}
DEEPSEEK = {
    "ffn.shared.gate": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared.up": "mlp.shared_experts.up_proj.weight",
    "ffn.shared.down": "mlp.shared_experts.down_proj.weight",
}
FOUR_NORMS = {
    "attention_out_norm.scale": "post_attention_layernorm.weight",
    "ffn_norm.scale": "pre_feedforward_layernorm.weight",
    "ffn_out_norm.scale": "post_feedforward_layernorm.weight",
}
#: llama.cpp's names by Weft's.
GGUF = {
    "embedding.table": "token_embd.weight",
    "norm.scale": "output_norm.weight",
    "head": "output.weight",
    "attention_norm.scale": "attn_norm.weight",
    "attention.wq": "attn_q.weight",
    "attention.wk": "attn_k.weight",
    "attention.wv": "attn_v.weight",
    "attention.wo": "attn_output.weight",
    "attention.bq": "attn_q.bias",
    "attention.bk": "attn_k.bias",
    "attention.bv": "attn_v.bias",
    "attention.q_norm.scale": "attn_q_norm.weight",
    "attention.k_norm.scale": "attn_k_norm.weight",
    "attention_out_norm.scale": "post_attention_norm.weight",
    "ffn_norm.scale": "ffn_norm.weight",
    "ffn.gate": "ffn_gate.weight",
    "ffn.up": "ffn_up.weight",
    "ffn.down": "ffn_down.weight",
    "ffn_out_norm.scale": "post_ffw_norm.weight",
}
#: Weft's names by Meta's, which torchtitan has too, and by Megatron-core's.
META = {
    "tok_embeddings.weight": "embedding.table",
    "attention_norm.weight": "attention_norm.scale",
    "attention.wq.weight": "attention.wq",
    "attention.wk.weight": "attention.wk",
    "attention.wv.weight": "attention.wv",
    "attention.wo.weight": "attention.wo",
    "attention.wq.bias": "attention.bq",
    "attention.wk.bias": "attention.bk",
    "attention.wv.bias": "attention.bv",
    "attention.q_norm.weight": "attention.q_norm.scale",
    "attention.k_norm.weight": "attention.k_norm.scale",
    "feed_forward.w1.weight": "ffn.gate",
    "feed_forward.w3.weight": "ffn.up",
    "feed_forward.w2.weight": "ffn.down",
}
MEGATRON = {
    "embedding.word_embeddings.weight": "embedding.table",
    "final_layernorm.weight": "norm.scale",
    "output_layer.weight": "head",
    "self_attention.linear_qkv.layer_norm_weight": "attention_norm.scale",
    "self_attention.q_layernorm.weight": "attention.q_norm.scale",
    "self_attention.k_layernorm.weight": "attention.k_norm.scale",
    "self_attention.linear_proj.weight": "attention.wo",
    "pre_mlp_layernorm.weight": "ffn_norm.scale",
    "mlp.linear_fc1.layer_norm_weight": "ffn_norm.scale",
    "mlp.linear_fc2.weight": "ffn.down",
}
#: Tensors that hold several parameters, in their order: Megatron-core's, and a layer's experts in transformers 5.
FUSED = {
    "self_attention.linear_qkv.weight": (
        "attention.wq",
        "attention.wk",
        "attention.wv",
    ),
    "self_attention.linear_qkv.bias": ("attention.bq", "attention.bk", "attention.bv"),
    "mlp.linear_fc1.weight": ("ffn.gate", "ffn.up"),
    "mlp.experts.gate_up_proj": ("ffn.experts.gate", "ffn.experts.up"),
    "mlp.experts.down_proj": ("ffn.experts.down",),
}


def split_layer(name: str) -> tuple[str, str]:
    """Split Weft's name of a parameter into the number of its layer and its name within the layer.

    The number is an empty string if the parameter is in no layer.
    """
    if not name.startswith("blocks."):
        return "", name
    layer, _, inside = name.removeprefix("blocks.").partition(".")
    return layer, inside


def hf_name(name: str, shape: ModelShape | None = None) -> str:
    """Return Hugging Face's name of the parameter ``name`` in a model of ``shape`` (None: like Llama).

    Weft has one parameter for all experts of a layer, Hugging Face a tensor for each expert. In the names of these
    tensors ``{}`` stands for the number of the expert.
    """
    if shape is not None and shape.output == "score" and name == "head":
        return "score.weight"
    names = HUGGING_FACE
    if shape is not None:
        names = names | (FOUR_NORMS if shape.norm_after else {})
        names |= DEEPSEEK if shape.kv_rank else {}
        names |= MIXTRAL if _is_mixtral(shape) else {}
    layer, inside = split_layer(name)
    return f"model.layers.{layer}.{names[inside]}" if layer else names[inside]


def _is_mixtral(shape: ModelShape) -> bool:
    # which only what exports or reads foreign weights needs
    from weft.shapes.config import architecture

    return bool(shape.mixtures) and architecture(shape) == "MixtralForCausalLM"


def hf_names(name: str, shape: ModelShape | None = None) -> list[str]:
    """Return the names of Hugging Face's tensors that hold the parameter ``name`` in a model of ``shape``.

    The list has one name, or one for each expert. It is empty for a parameter that only training needs.
    """
    if name.endswith(("router.load", "value_head")):
        return []
    theirs = hf_name(name, shape)
    if "{}" not in theirs:
        return [theirs]
    assert shape is not None
    experts = shape.experts_of(int(split_layer(name)[0]))
    return [theirs.format(expert) for expert in range(experts)]


def fused_name(name: str) -> tuple[str, int, int] | None:
    """Return where some models store the parameter ``name`` of all experts in a fused tensor; None if none does.

    A fused tensor holds several parameters, such as gate and up projection. The result is the tensor's name, the index
    of this parameter in the tensor, and the number of parameters in it.
    """
    layer, inside = split_layer(name)
    for whole, parts in FUSED.items():
        if inside in parts and ".experts." in inside:
            return f"model.layers.{layer}.{whole}", parts.index(inside), len(parts)
    return None


def norm_offset(name: str, shape: ModelShape | None) -> float:
    """Return the number to subtract from the parameter ``name`` to get the values that Hugging Face stores.

    It is 1 for scales of Gemma 3's norms, which are stored as differences to one; else 0.
    """
    return 1.0 if shape and shape.norm_after and name.endswith("norm.scale") else 0.0


def gguf_name(name: str) -> str:
    """Return the name that GGUF files use for the parameter that Weft calls ``name``."""
    layer, inside = split_layer(name)
    return f"blk.{layer}.{GGUF[inside]}" if layer else GGUF[inside]


#: Weights that can have an adapter, by Hugging Face's names in a layer.
ADAPTED = {
    theirs.removesuffix(".weight"): ours
    for ours, theirs in HUGGING_FACE.items()
    if re.fullmatch(r"attention\.w.*|ffn\.(?:gate|up|down)", ours)
}


def projection_name(path: str) -> str:
    """Return the last part of Hugging Face's name of a weight: the name of its projection, such as ``q_proj``.

    ``path``: Weft's name of the weight, such as ``blocks.3.attention.wq``. Projections of cross-attention are called as
    those of attention. A weight that language models do not have keeps the last part of Weft's name.
    """
    inside = ".".join(path.split(".")[-2:])
    theirs = HUGGING_FACE.get(inside.removeprefix("cross_"))
    return theirs.split(".")[-2] if theirs else path.rpartition(".")[2]


#: Prefixes that wrappers add to a name, and the beginning of a name in a layer.
PREFIX = r"^(?:(?:module|model|_orig_mod|_fsdp_wrapped_module|model_state_dict|language_model|decoder)\.)*"
LAYER = r"(?:layers|blk|blocks)\.(\d+)\."


def inside_layer(name: str) -> tuple[str, str]:
    """Split Hugging Face's name of a tensor into the number of its layer and its name within the layer.

    Prefixes of wrapping modules, such as ``model.``, are removed. The number is an empty string if the tensor is in no
    layer; in the second part, ``{}`` stands for the number of an expert.
    """
    name = re.sub(PREFIX, "", name)
    layer = re.match(LAYER, name)
    if layer is None:
        return "", name
    return layer[1], re.sub(r"(?<=\.)\d+(?=\.)", "{}", name[layer.end() :])
