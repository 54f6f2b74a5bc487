"""What ``config.json`` says of experts and of latent attention: Mixtral, Qwen's mixtures, DeepSeek-V2 and V3."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from weft.errors import WeftError
from weft.recipe import ModelShape

#: What each of these architectures can be of a :class:`ModelShape`; anything else it computes differently.
LIMITS: dict[str, dict[str, tuple[Any, ...]]] = {
    "MixtralForCausalLM": {"router": ("post-softmax",), "shared_experts": (0,), "router_groups": (1,)},
    "Qwen2MoeForCausalLM": {"router": ("pre-softmax",), "shared_mix": ("gate",), "router_groups": (1,), "window": (0,)},
    "Qwen3MoeForCausalLM": {"router": ("pre-softmax",), "shared_experts": (0,), "router_groups": (1,), "window": (0,)},
    "DeepseekV2ForCausalLM": {"router": ("pre-softmax",), "shared_mix": ("add",), "router_norm": (False,),
                              "rope_interleaved": (True,), "window": (0,)},
    "DeepseekV3ForCausalLM": {"router": ("sigmoid",), "shared_mix": ("add",), "window": (0,)},
}  # fmt: skip
#: And what any of them can be.
ALL = {"router_early": (False,), "full_every": (0,), "query_dim": (None,), "norm_after": (False,),
       "scaled_embedding": (False,), "activation": ("silu", "gelu")}  # fmt: skip
#: How DeepSeek calls routers: scores, and ways to choose by them.
ROUTERS = {
    "DeepseekV2ForCausalLM": ("softmax", ("greedy", "group_limited_greedy")),
    "DeepseekV3ForCausalLM": ("sigmoid", ("noaux_tc",)),
}
#: What the others' configs have no word for, and those of models derived from them do.
PLAIN = "softmax", ("greedy",)
#: What configurations call the number of a layer's experts.
EXPERTS = "num_local_experts", "num_experts", "n_routed_experts"
#: Parts of :class:`ModelShape` that DeepSeek calls otherwise.
LATENT = {
    "kv_rank": "kv_lora_rank", "q_rank": "q_lora_rank", "rope_dim": "qk_rope_head_dim", "head_dim": "qk_nope_head_dim",
    "value_dim": "v_head_dim",
}  # fmt: skip


def refuse(path: Path | str, field: str, value: Any, supported: str) -> NoReturn:
    raise WeftError(
        f"{path}: {field} = {str(value)[:60]!r} is not supported; Weft supports {supported}"
    )


def _number(
    path: Path | str, config: Mapping[str, Any], *names: str, default: int | None = None
) -> int:
    """The whole number that stands under one of ``names``."""
    given = [name for name in names if config.get(name) is not None]
    name = given[0] if given else names[0]
    value = config[name] if given else default
    if other := [one for one in given if config[one] != value]:
        refuse(path, other[0], config[other[0]], f"that of {name}, {value}")
    if value is None:
        raise WeftError(f"{path} has no {name}; it is not a complete config.json")
    if not isinstance(value, int) or value < 0:
        refuse(path, name, value, "whole numbers")
    return value


def latent_sizes(path: Path | str, config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of latent attention (DeepSeek-V2)."""
    return {
        ours: _number(path, config, theirs, default=0 if ours == "q_rank" else None)
        for ours, theirs in LATENT.items()
    }


def mixture_sizes(
    path: Path | str, config: Mapping[str, Any], layers: int, ffn: int
) -> dict[str, Any]:
    """The sizes of experts, by fields of :class:`ModelShape`, of a model of any architecture."""
    number = partial(_number, path, config)
    experts = number(*EXPERTS, default=0)
    if not experts:
        return {"experts": 0}
    width = number("moe_intermediate_size", default=ffn)
    shared = number(
        "shared_expert_intermediate_size",
        default=number("n_shared_experts", default=0) * width,
    )
    return {
        "experts": tuple(experts * mixed for mixed in _mixed(path, config, layers)),
        "experts_per_token": number("num_experts_per_tok", default=0),
        "expert_ffn": width,
        "shared_experts": shared / max(width, 1),
    }


def _mixed(path: Path | str, config: Mapping[str, Any], layers: int) -> list[bool]:
    """Whether each layer has experts."""
    first = _number(path, config, "first_k_dense_replace", default=0)
    every = _number(path, config, "decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        refuse(path, "mlp_only_layers", dense, "a list of layers")
    return [
        bool(every) and (i + 1) % every == 0 and i >= first and i not in dense
        for i in range(layers)
    ]


def mixture_settings(
    path: Path | str, name: str, config: Mapping[str, Any], layers: int
) -> dict[str, Any]:
    """The settings of :class:`ModelShape` about experts and latent attention that a configuration stands for."""
    width = (
        "intermediate_size" if name.startswith("Mixtral") else "moe_intermediate_size"
    )
    tree: dict[str, Any] = {
        "experts": _number(path, config, *EXPERTS),
        "experts_per_token": _number(path, config, "num_experts_per_tok"),
        "expert_ffn": _number(path, config, width),
    }
    scores, ways = ROUTERS.get(name, PLAIN)
    if (given := config.get("scoring_func", scores)) != scores:
        refuse(path, "scoring_func", given, repr(scores))
    if (way := config.get("topk_method") or ways[0]) not in ways:
        refuse(path, "topk_method", way, " and ".join(map(repr, ways)))
    if config.get("router_jitter_noise"):
        refuse(path, "router_jitter_noise", config["router_jitter_noise"], "0")
    if config.get("output_router_logits") and config.get("router_aux_loss_coef"):
        tree |= {
            "balance": "huggingface",
            "balance_loss": config["router_aux_loss_coef"],
        }
    if name.startswith("Qwen"):
        tree |= _qwen(path, name, config, layers, tree)
    elif name.startswith("Deepseek"):
        tree |= _deepseek(path, name, config, layers)
    # nothing else is of experts that no layer has
    if tree.get("first_dense") == layers:
        return {
            name: value
            for name, value in tree.items()
            if name in (*LATENT, "rope_interleaved", "qkv_bias")
        }
    return tree


def _qwen(
    path: Path | str,
    name: str,
    config: Mapping[str, Any],
    layers: int,
    tree: dict[str, Any],
) -> dict[str, Any]:
    if config.get("use_sliding_window"):
        refuse(path, "use_sliding_window", True, "False")
    mixed = _mixed(path, config, layers)
    first = mixed.index(True) if True in mixed else layers
    found: dict[str, Any] = {
        "router": "pre-softmax",
        "router_norm": bool(config.get("norm_topk_prob")),
    }
    if mixed == [i >= first for i in range(layers)]:
        found["first_dense"] = first
    elif config.get("mlp_only_layers"):
        found["experts"] = tuple(tree["experts"] * one for one in mixed)
    else:
        found["moe_every"] = config["decoder_sparse_step"]
    if name.startswith("Qwen2"):
        shared, width = (
            _number(path, config, "shared_expert_intermediate_size", default=5632),
            tree["expert_ffn"],
        )
        if not width or shared % width or not shared:
            refuse(
                path,
                "shared_expert_intermediate_size",
                shared,
                f"multiples of moe_intermediate_size = {width}",
            )
        found |= {
            "shared_experts": shared // width,
            "shared_mix": "gate",
            "qkv_bias": config.get("qkv_bias", True),
        }
    return found


def _deepseek(
    path: Path | str, name: str, config: Mapping[str, Any], layers: int
) -> dict[str, Any]:
    third = name.startswith("DeepseekV3")
    way = config.get("topk_method") or ROUTERS[name][1][0]
    if config.get("moe_layer_freq", 1) != 1:
        refuse(path, "moe_layer_freq", config["moe_layer_freq"], "1")
    norm = bool(config.get("norm_topk_prob", third))
    if norm and not third:
        refuse(path, "norm_topk_prob", True, "False, as transformers computes it")
    grouped = third or way == "group_limited_greedy"
    return {
        **latent_sizes(path, config),
        "rope_interleaved": bool(config.get("rope_interleave", True)),
        "first_dense": min(
            layers, _number(path, config, "first_k_dense_replace", default=3 * third)
        ),
        "shared_experts": _number(path, config, "n_shared_experts"),
        "router": "sigmoid" if third else "pre-softmax",
        "router_norm": norm,
        "router_scale": config.get("routed_scaling_factor", 2.5 if third else 1.0),
        "router_groups": (config.get("n_group") or 1) if grouped else 1,
        "router_top_groups": (config.get("topk_group") or 1) if grouped else 1,
    }


def mixture_architecture(shape: ModelShape) -> str:
    """The architecture that computes this shape, which has experts or latent attention."""
    if shape.kv_rank:
        name = (
            "DeepseekV2ForCausalLM"
            if shape.mixtures and shape.router != "sigmoid"
            else "DeepseekV3ForCausalLM"
        )
    elif shape.qk_norm:
        name = "Qwen3MoeForCausalLM"
    else:
        name = "Qwen2MoeForCausalLM" if shape.shared_experts else "MixtralForCausalLM"
    limits = ALL | (LIMITS[name] if shape.mixtures else {"window": (0,)})
    limits |= {"qkv_bias": (False,)} if "Qwen2" not in name else {}
    limits |= (
        {}
        if "Deepseek" in name
        else {"rope_interleaved": (False,), "router_scale": (1.0,)}
    )
    layers, first = list(shape.mixtures), min(shape.mixtures, default=shape.layers)
    wrong = next((f"{field} = {getattr(shape, field)!r}" for field, can_be in limits.items()
                  if getattr(shape, field) not in can_be), "")  # fmt: skip
    if len(set(shape.mixtures.values())) > 1:
        wrong = "layers with unequally many experts"
    elif "Qwen" not in name and layers != list(
        range(first if shape.kv_rank else 0, shape.layers)
    ):
        wrong = "dense layers" if not shape.kv_rank else "dense layers but the first"
    elif shape.kv_rank and shape.mixtures and not shape.shared_experts:
        wrong = "no shared experts"
    if wrong:
        raise WeftError(f"no Hugging Face architecture computes this: {name} cannot have {wrong}; keep Weft's own "
                        "checkpoint")  # fmt: skip
    return name


def mixture_fields(shape: ModelShape, name: str) -> dict[str, Any]:
    """What ``config.json`` of architecture ``name`` says beside what is said of dense models."""
    experts, balances = (
        max(shape.mixtures.values(), default=1),
        shape.balance == "huggingface",
    )
    first = min(shape.mixtures, default=shape.layers)
    found: dict[str, Any] = {
        "num_experts_per_tok": shape.experts_per_token if shape.mixtures else 1,
        "router_aux_loss_coef": shape.balance_loss if balances else 0.0,
        "output_router_logits": balances and shape.balance_loss > 0,
    }
    if name.startswith("Mixtral"):
        return found | {
            "num_local_experts": experts,
            "intermediate_size": shape.expert_ffn,
        }
    found |= {
        "moe_intermediate_size": shape.expert_ffn or 1,
        "norm_topk_prob": shape.router_norm,
    }
    if name.startswith("Qwen"):
        listed = isinstance(shape.experts, tuple) or shape.first_dense
        dense = (
            [layer for layer in range(shape.layers) if layer not in shape.mixtures]
            if listed
            else []
        )
        found |= {"num_experts": experts, "mlp_only_layers": dense, "decoder_sparse_step": 1 if dense else
                  shape.moe_every, "use_sliding_window": False}  # fmt: skip
        shared = shape.shared_experts * (shape.expert_ffn or 0)
        return found | (
            {"qkv_bias": shape.qkv_bias, "shared_expert_intermediate_size": shared}
            if shared
            else {}
        )
    scores, ways = ROUTERS[name]
    return found | {
        **{theirs: getattr(shape, ours) for ours, theirs in LATENT.items()},
        "q_lora_rank": shape.q_rank or None, "head_dim": shape.rope_dim, "rope_interleave": shape.rope_interleaved,
        "n_routed_experts": experts, "first_k_dense_replace": first, "n_shared_experts": shape.shared_experts or 1,
        "routed_scaling_factor": shape.router_scale, "n_group": shape.router_groups,
        "topk_group": shape.router_top_groups, "scoring_func": scores,
        "topk_method": ways[-1] if shape.router_groups > 1 or len(ways) == 1 else ways[0],
        "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
    }  # fmt: skip
