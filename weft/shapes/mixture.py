"""Read and write experts and latent attention in ``config.json``: Mixtral, Qwen's mixtures, DeepSeek-V2 and V3."""

from typing import Any

from weft.errors import WeftError
from weft.recipe import ModelShape
from weft.shapes.config_fields import ConfigFields

#: Settings of :class:`ModelShape` that each architecture can compute.
LIMITS: dict[str, dict[str, tuple[Any, ...]]] = {
    "MixtralForCausalLM": {"router": ("post-softmax",), "shared_experts": (0,), "router_groups": (1,)},
    "Qwen2MoeForCausalLM": {"router": ("pre-softmax",), "shared_mix": ("gate",), "router_groups": (1,), "window": (0,)},
    "Qwen3MoeForCausalLM": {"router": ("pre-softmax",), "shared_experts": (0,), "router_groups": (1,), "window": (0,)},
    "DeepseekV2ForCausalLM": {"router": ("pre-softmax",), "shared_mix": ("add",), "router_norm": (False,),
                              "rope_interleaved": (True,), "window": (0,)},
    "DeepseekV3ForCausalLM": {"router": ("sigmoid",), "shared_mix": ("add",), "window": (0,)},
}  # fmt: skip
#: Settings that every architecture can compute.
ALL = {"router_early": (False,), "full_every": (0,), "query_dim": (None,), "norm_after": (False,),
       "scaled_embedding": (False,), "activation": ("silu", "gelu")}  # fmt: skip
#: Routers of DeepSeek: ``scoring_func``, and the supported ``topk_method``.
ROUTERS = {
    "DeepseekV2ForCausalLM": ("softmax", ("greedy", "group_limited_greedy")),
    "DeepseekV3ForCausalLM": ("sigmoid", ("noaux_tc",)),
}
#: The router of other architectures, which models derived from them name.
PLAIN = "softmax", ("greedy",)
#: Names of the number of a layer's experts.
EXPERTS = "num_local_experts", "num_experts", "n_routed_experts"
#: DeepSeek's names of fields of :class:`ModelShape`.
LATENT = {
    "kv_rank": "kv_lora_rank", "q_rank": "q_lora_rank", "rope_dim": "qk_rope_head_dim", "head_dim": "qk_nope_head_dim",
    "value_dim": "v_head_dim",
}  # fmt: skip


def latent_sizes(config: ConfigFields) -> dict[str, int]:
    """Return the sizes of latent attention (DeepSeek-V2) that a ``config.json`` states.

    The result is a dict from fields of :class:`ModelShape` to their values.
    """
    return {
        ours: config.number(theirs, default=0 if ours == "q_rank" else None)
        for ours, theirs in LATENT.items()
    }


def mixture_sizes(config: ConfigFields, layers: int, ffn: int) -> dict[str, Any]:
    """Return the sizes of experts that a ``config.json`` of any architecture states.

    The result is a dict from fields of :class:`ModelShape` to their values. ``layers``: the model's number of layers;
    ``ffn``: hidden width of its dense feed-forwards.
    """
    experts = config.number(*EXPERTS, default=0)
    if not experts:
        return {"experts": 0}
    width = config.number("moe_intermediate_size", default=ffn)
    shared = config.number(
        "shared_expert_intermediate_size",
        default=config.number("n_shared_experts", default=0) * width,
    )
    return {
        "experts": tuple(experts * mixed for mixed in _mixed(config, layers)),
        "experts_per_token": config.number("num_experts_per_tok", default=0),
        "expert_ffn": width,
        "shared_experts": shared / max(width, 1),
    }


def _mixed(config: ConfigFields, layers: int) -> list[bool]:
    """Return whether each layer has experts."""
    first = config.number("first_k_dense_replace", default=0)
    every = config.number("decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        config.refuse("mlp_only_layers", "a list of layers")
    return [
        bool(every) and (i + 1) % every == 0 and i >= first and i not in dense
        for i in range(layers)
    ]


def mixture_settings(name: str, config: ConfigFields, layers: int) -> dict[str, Any]:
    """Return the settings of experts and latent attention that a ``config.json`` states.

    The result is a dict from fields of :class:`ModelShape` to their values. ``name``: the architecture in the file;
    ``layers``: the model's number of layers. Raises :class:`WeftError` for a setting that Weft does not support.
    """
    width = (
        "intermediate_size" if name.startswith("Mixtral") else "moe_intermediate_size"
    )
    tree: dict[str, Any] = {
        "experts": config.number(*EXPERTS),
        "experts_per_token": config.number("num_experts_per_tok"),
        "expert_ffn": config.number(width),
    }
    scores, ways = ROUTERS.get(name, PLAIN)
    if config.get("scoring_func", scores) != scores:
        config.refuse("scoring_func", repr(scores))
    if (config.get("topk_method") or ways[0]) not in ways:
        config.refuse("topk_method", " and ".join(map(repr, ways)))
    if config.get("router_jitter_noise"):
        config.refuse("router_jitter_noise", "0")
    weight = config.get("router_aux_loss_coef")
    if config.get("output_router_logits") and weight:
        tree |= {"balance": "huggingface", "balance_loss": weight}
    if name.startswith("Qwen"):
        tree |= _qwen(name, config, layers, tree)
    elif name.startswith("Deepseek"):
        tree |= _deepseek(name, config, layers)
    # nothing else is of experts that no layer has
    if tree.get("first_dense") == layers:
        kept = (*LATENT, "rope_interleaved", "qkv_bias")
        return {name: value for name, value in tree.items() if name in kept}
    return tree


def _qwen(
    name: str, config: ConfigFields, layers: int, tree: dict[str, Any]
) -> dict[str, Any]:
    if config.get("use_sliding_window"):
        config.refuse("use_sliding_window", "False")
    mixed = _mixed(config, layers)
    first = mixed.index(True) if True in mixed else layers
    settings: dict[str, Any] = {
        "router": "pre-softmax",
        "router_norm": bool(config.get("norm_topk_prob")),
    }
    if mixed == [i >= first for i in range(layers)]:
        settings["first_dense"] = first
    elif config.get("mlp_only_layers"):
        settings["experts"] = tuple(tree["experts"] * is_mixed for is_mixed in mixed)
    else:
        settings["moe_every"] = config["decoder_sparse_step"]
    if not name.startswith("Qwen2"):
        return settings
    field, width = "shared_expert_intermediate_size", tree["expert_ffn"]
    shared = config.number(field, default=5632)
    if not width or shared % width or not shared:
        supported = f"multiples of moe_intermediate_size = {width}"
        config.refuse(field, supported, shared)
    return settings | {
        "shared_experts": shared // width,
        "shared_mix": "gate",
        "qkv_bias": config.get("qkv_bias", True),
    }


def _deepseek(name: str, config: ConfigFields, layers: int) -> dict[str, Any]:
    third = name.startswith("DeepseekV3")
    way = config.get("topk_method") or ROUTERS[name][1][0]
    if config.get("moe_layer_freq", 1) != 1:
        config.refuse("moe_layer_freq", "1")
    norm = bool(config.get("norm_topk_prob", third))
    if norm and not third:
        config.refuse("norm_topk_prob", "False, as transformers computes it")
    grouped = third or way == "group_limited_greedy"
    dense = config.number("first_k_dense_replace", default=3 * third)
    return latent_sizes(config) | {
        "rope_interleaved": bool(config.get("rope_interleave", True)),
        "first_dense": min(layers, dense),
        "shared_experts": config.number("n_shared_experts"),
        "router": "sigmoid" if third else "pre-softmax",
        "router_norm": norm,
        "router_scale": config.get("routed_scaling_factor", 2.5 if third else 1.0),
        "router_groups": (config.get("n_group") or 1) if grouped else 1,
        "router_top_groups": (config.get("topk_group") or 1) if grouped else 1,
    }


def mixture_architecture(shape: ModelShape) -> str:
    """Return the name of the Hugging Face architecture that computes ``shape``, with experts or latent attention.

    Raises :class:`WeftError` if no architecture does.
    """
    if shape.kv_rank:
        second = shape.mixtures and shape.router != "sigmoid"
        name = f"DeepseekV{2 if second else 3}ForCausalLM"
    elif shape.qk_norm:
        name = "Qwen3MoeForCausalLM"
    else:
        name = "Qwen2MoeForCausalLM" if shape.shared_experts else "MixtralForCausalLM"
    limits = ALL | (LIMITS[name] if shape.mixtures else {"window": (0,)})
    if "Qwen2" not in name:
        limits |= {"qkv_bias": (False,)}
    if "Deepseek" not in name:
        limits |= {"rope_interleaved": (False,), "router_scale": (1.0,)}
    layers = list(shape.mixtures)
    first = min(layers, default=shape.layers) if shape.kv_rank else 0
    settings = {field: getattr(shape, field) for field in limits}
    excess = (f for f, value in settings.items() if value not in limits[f])
    wrong = next((f"{field} = {settings[field]!r}" for field in excess), "")
    if len(set(shape.mixtures.values())) > 1:
        wrong = "layers with unequally many experts"
    elif "Qwen" not in name and layers != list(range(first, shape.layers)):
        wrong = "dense layers" if not shape.kv_rank else "dense layers but the first"
    elif shape.kv_rank and shape.mixtures and not shape.shared_experts:
        wrong = "no shared experts"
    if wrong:
        raise WeftError(f"no Hugging Face architecture computes this: {name} cannot have {wrong}; keep Weft's own "
                        "checkpoint")  # fmt: skip
    return name


def mixture_fields(shape: ModelShape, name: str) -> dict[str, Any]:
    """Return the fields of ``config.json`` about experts and latent attention, for a model of ``shape``.

    ``name``: the Hugging Face architecture, on which the names of fields depend.
    """
    experts = max(shape.mixtures.values(), default=1)
    balances = shape.balance == "huggingface"
    first = min(shape.mixtures, default=shape.layers)
    fields: dict[str, Any] = {
        "num_experts_per_tok": shape.experts_per_token if shape.mixtures else 1,
        "router_aux_loss_coef": shape.balance_loss if balances else 0.0,
        "output_router_logits": balances and shape.balance_loss > 0,
    }
    if name.startswith("Mixtral"):
        return fields | {
            "num_local_experts": experts,
            "intermediate_size": shape.expert_ffn,
        }
    fields |= {
        "moe_intermediate_size": shape.expert_ffn or 1,
        "norm_topk_prob": shape.router_norm,
    }
    if name.startswith("Qwen"):
        listed = isinstance(shape.experts, tuple) or shape.first_dense
        dense = sorted({*range(shape.layers)} - {*shape.mixtures}) if listed else []
        fields |= {"num_experts": experts, "mlp_only_layers": dense, "decoder_sparse_step": 1 if dense else
                  shape.moe_every, "use_sliding_window": False}  # fmt: skip
        if shared := shape.shared_experts * (shape.expert_ffn or 0):
            fields["qkv_bias"] = shape.qkv_bias
            fields["shared_expert_intermediate_size"] = shared
        return fields
    scores, ways = ROUTERS[name]
    return fields | {
        **{theirs: getattr(shape, ours) for ours, theirs in LATENT.items()},
        "q_lora_rank": shape.q_rank or None, "head_dim": shape.rope_dim, "rope_interleave": shape.rope_interleaved,
        "n_routed_experts": experts, "first_k_dense_replace": first, "n_shared_experts": shape.shared_experts or 1,
        "routed_scaling_factor": shape.router_scale, "n_group": shape.router_groups,
        "topk_group": shape.router_top_groups, "scoring_func": scores,
        "topk_method": ways[-1] if shape.router_groups > 1 or len(ways) == 1 else ways[0],
        "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
    }  # fmt: skip
