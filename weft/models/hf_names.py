"""What Hugging Face calls the parameters of a model."""

import re

from weft.recipe import ModelShape
from weft.shapes.config import architecture

#: Weft's parameter names and Hugging Face's; ``{}`` is the number of the block.
NAMES = {
    "embedding.table": "model.embed_tokens.weight",
    "blocks.{}.attention_norm.scale": "model.layers.{}.input_layernorm.weight",
    **{f"blocks.{{}}.attention.w{x}": f"model.layers.{{}}.self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"blocks.{{}}.attention.b{x}": f"model.layers.{{}}.self_attn.{x}_proj.bias" for x in "qkv"},
    **{f"blocks.{{}}.attention.{x}_norm.scale": f"model.layers.{{}}.self_attn.{x}_norm.weight" for x in "qk"},
    "blocks.{}.ffn_norm.scale": "model.layers.{}.post_attention_layernorm.weight",
    **{f"blocks.{{}}.ffn.{x}": f"model.layers.{{}}.mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    "norm.scale": "model.norm.weight",
    "head": "lm_head.weight",
}  # fmt: skip

#: The names that are others where there are norms after attention and feed-forward (Gemma 3).
FOUR_NORMS = {
    "blocks.{}.attention_out_norm.scale": "model.layers.{}.post_attention_layernorm.weight",
    "blocks.{}.ffn_norm.scale": "model.layers.{}.pre_feedforward_layernorm.weight",
    "blocks.{}.ffn_out_norm.scale": "model.layers.{}.post_feedforward_layernorm.weight",
}

#: Those of latent attention.
LATENT = {
    **{f"blocks.{{}}.attention.w{x}": f"model.layers.{{}}.self_attn.{x}_proj.weight" for x in ("q_a", "q_b", "kv_b")},
    "blocks.{}.attention.wkv_a": "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight",
    **{f"blocks.{{}}.attention.{x}_norm.scale": f"model.layers.{{}}.self_attn.{x}_layernorm.weight"
       for x in ("q_a", "kv_a")},
}  # fmt: skip

#: Those of experts, which have a tensor each: the last ``{}`` is the number of the expert.
EXPERTS = {
    "blocks.{}.ffn.router.table": "model.layers.{}.mlp.gate.weight",
    "blocks.{}.ffn.router.bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
    "blocks.{}.ffn.shared_gate": "model.layers.{}.mlp.shared_expert_gate.weight",
    **{f"blocks.{{}}.ffn.shared.{x}": f"model.layers.{{}}.mlp.shared_expert.{x}_proj.weight"
       for x in ("gate", "up", "down")},
    **{f"blocks.{{}}.ffn.experts.{x}": f"model.layers.{{}}.mlp.experts.{{{{}}}}.{x}_proj.weight"
       for x in ("gate", "up", "down")},
}  # fmt: skip
#: The names that are others in Mixtral, and in DeepSeek.
MIXTRAL = {
    "blocks.{}.ffn.router.table": "model.layers.{}.block_sparse_moe.gate.weight",
    **{f"blocks.{{}}.ffn.experts.{ours}": f"model.layers.{{}}.block_sparse_moe.experts.{{{{}}}}.{theirs}.weight"
       for ours, theirs in {"gate": "w1", "up": "w3", "down": "w2"}.items()},
}  # fmt: skip
DEEPSEEK = {
    f"blocks.{{}}.ffn.shared.{x}": f"model.layers.{{}}.mlp.shared_experts.{x}_proj.weight"
    for x in ("gate", "up", "down")
}
#: How transformers 5 holds the experts of a layer in memory, in one tensor: its name, and which rows of each expert.
FUSED = {
    "gate": ("gate_up_proj", 0, 2),
    "up": ("gate_up_proj", 1, 2),
    "down": ("down_proj", 0, 1),
}


def hf_name(name: str, shape: ModelShape | None = None) -> str:
    """What Hugging Face calls the parameter that Weft calls ``name``, in a model of ``shape`` (None: like Llama).

    Of experts, which have a tensor each, ``{}`` stands where their number does.
    """
    if name == "head" and shape and shape.output == "score":
        return "score.weight"
    names = NAMES | LATENT | EXPERTS
    if shape is not None:
        names |= FOUR_NORMS if shape.norm_after else {}
        names |= DEEPSEEK if shape.kv_rank else {}
        names |= (
            MIXTRAL
            if shape.mixtures and architecture(shape) == "MixtralForCausalLM"
            else {}
        )
    return names[re.sub(r"\d+", "{}", name)].format(*re.findall(r"\d+", name))


def hf_names(name: str, shape: ModelShape | None = None) -> list[str]:
    """The tensors that hold the parameter ``name``: one, or one for each expert; none of what only training needs."""
    if name.endswith("router.load"):
        return []
    theirs = hf_name(name, shape)
    if "{}" not in theirs:
        return [theirs]
    assert shape is not None
    return [
        theirs.format(expert)
        for expert in range(shape.experts_of(int(name.split(".")[1])))
    ]


def fused_name(name: str) -> tuple[str, int, int] | None:
    """The tensor that holds all experts' ``name`` at once, and which of how many parts of its rows; None of others."""
    if ".experts." not in name:
        return None
    whole, part, parts = FUSED[name.rpartition(".")[2]]
    return f"model.layers.{name.split('.')[1]}.mlp.experts.{whole}", part, parts


def norm_offset(name: str, shape: ModelShape | None) -> float:
    """What Hugging Face leaves out of the parameter: Gemma 3 stores scales of norms as their difference to one."""
    return 1.0 if shape and shape.norm_after and name.endswith("norm.scale") else 0.0
