"""The ``config.json`` of Hugging Face models in and out, without a weight; :mod:`.mixture` has their experts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weft.errors import WeftError
from weft.recipe import ModelShape
from weft.section import explain
from weft.shapes.mixture import (
    LIMITS,
    latent_sizes,
    mixture_architecture,
    mixture_fields,
    mixture_settings,
    mixture_sizes,
    refuse,
)
from weft.shapes.untrainable import UntrainableShape, untrainable

#: Fields of :class:`ModelShape` and what ``config.json`` calls them; GPT-2's names come last.
FIELDS = {
    "vocab": ("vocab_size",), "layers": ("num_hidden_layers", "n_layer"), "embed": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"), "ffn": ("intermediate_size", "n_inner"),
    "kv_heads": ("num_key_value_heads",), "head_dim": ("head_dim",), "tied": ("tie_word_embeddings",),
    "norm_eps": ("rms_norm_eps",), "init_std": ("initializer_range",),
}  # fmt: skip

#: Architecture: its ``model_type``, and the settings of :class:`ModelShape` that it stands for or starts from.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {}),
    "MistralForCausalLM": ("mistral", {}),
    "Qwen2ForCausalLM": ("qwen2", {"qkv_bias": True}),
    "Qwen3ForCausalLM": ("qwen3", {"qk_norm": True, "head_dim": 128}),
    "Gemma3ForCausalLM": ("gemma3_text", {
        "qk_norm": True, "norm_after": True, "scaled_embedding": True, "tied": True, "head_dim": 256,
    }),
    "MixtralForCausalLM": ("mixtral", {"norm_eps": 1e-5}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {"qk_norm": True}),
    "DeepseekV2ForCausalLM": ("deepseek_v2", {}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", {}),
}  # fmt: skip

#: The end of an architecture's name: a language model, and one with a single score.
WRITES, SCORES = "ForCausalLM", "ForSequenceClassification"

#: What ``hidden_act`` (of Gemma ``hidden_activation``) calls :attr:`ModelShape.activation`.
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}

#: Fields that change the arithmetic, and the one value that Weft computes with.
ONLY = {
    "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "use_bidirectional_attention": False,
    "truncate": True,
}  # fmt: skip

#: As many layers as a recipe can have.
MOST_LAYERS = 100_000

#: The context length of a model of which nobody has said one: transformers needs a number.
UNKNOWN_LENGTH = 8192

#: Settings of rotary scaling in Llama 3, and in yarn beside the factor: the names in :class:`weft.recipe.RopeScaling`.
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")

#: What fields of other architectures give away about what Weft lacks for them; GGUF files have some of them too.
LACKING = {
    "num_local_experts": "its mixture of experts", "num_experts": "its mixture of experts",
    "n_routed_experts": "its mixture of experts", "expert_count": "a mixture of experts in GGUF",
    "kv_lora_rank": "its latent attention", "attention.kv_lora_rank": "latent attention in GGUF",
    "attn_logit_softcapping": "soft caps on scores", "final_logit_softcapping": "soft caps on logits",
    "vision_config": "an image tower", "audio_config": "an audio tower",
    "no_rope_layers": "layers without rotary embedding", "partial_rotary_factor": "rotation of a part of each head",
    "parallel_residual": "parallel residuals", "use_parallel_residual": "parallel residuals",
    "state_size": "state space layers", "ssm.state_size": "state space layers",
    "linear_num_key_heads": "gated linear attention", "residual_multiplier": "scaled residuals",
    "is_encoder_decoder": "an encoder",
}  # fmt: skip


def lacking(fields: Mapping[str, Any]) -> str:
    """What Weft would have to have for a model with these fields of an architecture that it does not know."""
    found = dict.fromkeys(what for field, what in LACKING.items() if fields.get(field))
    return (
        f"missing is {' and '.join(found)}"
        if found
        else "its layers are not among those that Weft has"
    )


def shape_from_config(path: Path, planned: bool = False) -> ModelShape:
    """The model that a ``config.json`` (or its folder) describes; refuses what Weft would compute differently.

    ``planned``: of such a model its sizes, as an :class:`UntrainableShape`, instead of a refusal.
    """
    path = path / "config.json" if path.is_dir() else path
    hint = "give a Hugging Face config.json or a folder with one"
    return shape_from_fields(read_json(path, hint), path, planned)


def shape_from_fields(
    config: Mapping[str, Any], path: Path | str, planned: bool = False
) -> ModelShape:
    """:func:`shape_from_config` of the fields themselves; ``path`` says in errors where they stand."""
    try:
        return _computed(config, path)
    except WeftError as error:
        if planned:
            return _planned(config, path, str(error))
        raise


def _computed(config: Mapping[str, Any], path: Path | str) -> ModelShape:
    """The model of which Weft computes just what transformers would."""
    name, scores = _known(config, path)
    weight_blocks(path, config)
    rope, local = _rope(path, config)
    for field, supported in ONLY.items():
        value = {**config, **rope}.get(field)
        if value not in (None, supported):
            refuse(path, field, value, repr(supported))
    tree = {
        "norm_eps": 1e-6,
        **ARCHITECTURES[name][1],
        **_sizes(config, path, "vocab", "layers", "embed", "heads", "ffn"),
        "rope_theta": rope.get("rope_theta", 1e4),
        **_scaling(config, path, rope),
    }
    activation = config.get("hidden_activation") or config.get("hidden_act")
    if activation is not None and activation not in ACTIVATIONS:
        refuse(path, "hidden_act", activation, " and ".join(map(repr, ACTIVATIONS)))
    gemma = name == "Gemma3ForCausalLM"
    tree["activation"] = ACTIVATIONS[
        activation or ("gelu_pytorch_tanh" if gemma else "silu")
    ]
    tree |= _windows(path, name, config, tree["layers"])
    if name in LIMITS:
        tree |= mixture_settings(path, name, config, tree["layers"])
    if scores:
        tree |= {"output": "score", "tied": False}
    if gemma:
        tree["query_dim"] = config.get("query_pre_attn_scalar", 256)
        tree["window_theta"] = (
            local.get("rope_theta", 1e4) if tree.get("window") else None
        )
    try:
        return ModelShape.model_validate(tree)
    except ValidationError as error:
        key = str(next(iter(error.errors()[0]["loc"]), ""))
        theirs = FIELDS.get(key, (key,))[0]
        raise WeftError(
            f"{path}: {explain(error, ModelShape).replace(key, theirs, 1)}"
        ) from None


def _known(config: Mapping[str, Any], path: Path | str) -> tuple[str, bool]:
    """The architecture, a key of :data:`ARCHITECTURES`, and whether it scores."""
    kinds = {kind: architecture for architecture, (kind, _) in ARCHITECTURES.items()}
    by_kind = kinds.get(config.get("model_type", ""))
    name = next(iter(config.get("architectures") or ()), by_kind)
    scores = str(name).endswith(SCORES)
    if scores:
        labels = config.get("id2label")
        if len(labels or "two") != 1:
            refuse(
                path, "id2label", labels, "a single label, the score of a reward model"
            )
        name = by_kind or name
    if name not in ARCHITECTURES:
        known = ", ".join(one.removesuffix(WRITES) for one in ARCHITECTURES)
        raise WeftError(
            f"{path}: architectures = {str(name)[:60]!r} is not supported: {lacking(config)}; Weft has {known}"
        )
    return name, scores


def _sizes(config: Mapping[str, Any], path: Path | str, *needed: str) -> dict[str, Any]:
    """What the configuration says of :data:`FIELDS`, of which it must say those that are ``needed``."""
    given = {
        ours: next(
            (config[name] for name in names if config.get(name) is not None), None
        )
        for ours, names in FIELDS.items()
    }
    _complete(path, [FIELDS[ours][0] for ours in needed if given[ours] is None])
    return {ours: value for ours, value in given.items() if value is not None}


def _complete(path: Path | str, missing: list[str]) -> None:
    if missing:
        raise WeftError(
            f"{path} has no {', '.join(missing)}; it is not a complete config.json"
        )


def _planned(config: Mapping[str, Any], path: Path | str, why: str) -> UntrainableShape:
    """The sizes that any configuration gives, dense or with experts, as far as time and memory depend on them."""
    sizes = _sizes(config, path, "vocab", "layers", "embed", "heads")
    gpt = "n_embd" in config
    activation = config.get("hidden_act") or config.get("activation_function") or "silu"
    if sizes["layers"] > MOST_LAYERS:
        refuse(path, "num_hidden_layers", sizes["layers"], f"at most {MOST_LAYERS:,}")
    sizes = {"tied": gpt, "ffn": 4 * sizes["embed"]} | sizes
    sizes |= mixture_sizes(path, config, sizes["layers"], sizes["ffn"])
    if config.get("kv_lora_rank"):
        sizes |= latent_sizes(path, config)
    kinds = config.get("layer_types") or ()
    return untrainable(
        why,
        gated=not gpt and activation in (*ACTIVATIONS, "swiglu"),
        window=config.get("sliding_window") or 0,
        windowed=tuple(kind == "sliding_attention" for kind in kinds),
        clamped=bool(sizes["experts"]) and config.get("swiglu_limit") is not None,
        **sizes,
    )


def _scaling(
    config: Mapping[str, Any], path: Path | str, rope: Mapping[str, Any]
) -> dict[str, Any]:
    """The setting ``rope_scaling``, if there is any."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    original = "original_max_position_embeddings"
    length = (
        config.get(original)
        or rope.get(original)
        or config.get("max_position_embeddings")
    )
    needed = {"linear": (), "llama3": LLAMA3, "yarn": ("factor",)}.get(kind)
    if needed is None:
        refuse(path, "rope_type", kind, "'default', 'linear', 'llama3' and 'yarn'")
    _complete(path, [f"rope_scaling.{key}" for key in needed if rope.get(key) is None])
    if kind == "linear":
        return {"rope_scaling": {"kind": kind, "factor": rope.get("factor")}}
    keys = LLAMA3 if kind == "llama3" else ("factor", *YARN)
    given = {key: rope[key] for key in keys if rope.get(key) is not None}
    return {"rope_scaling": {"kind": kind, "original_max_position": length} | given}


def weight_blocks(path: Path | str, config: Mapping[str, Any]) -> list[int]:
    """Rows and columns of a block of weights that share a scale, where weights are stored in 8 bits; else none."""
    given = config.get("quantization_config")
    if not given:
        return []
    match given:
        case {
            "quant_method": "fp8",
            "weight_block_size": [int(rows), int(columns)],
        } if min(rows, columns) > 0:
            if given.get("fmt", "e4m3") == "e4m3":
                return [rows, columns]
    refuse(
        path,
        "quantization_config",
        given,
        "quant_method 'fp8' with a weight_block_size of two numbers",
    )


def _rope(
    path: Path | str, config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary embedding of layers that see all tokens, and of windowed ones, each as one flat set of fields.

    transformers 5 writes ``rope_parameters``, of Gemma 3 a set per kind of layer; 4 wrote ``rope_scaling`` beside
    ``rope_theta`` and ``rope_local_base_freq``.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        refuse(path, "rope_parameters", given, "a set of values")
    gemma = config.get("model_type") == "gemma3_text" or "Gemma3ForCausalLM" in (
        config.get("architectures") or ()
    )
    local = {"rope_theta": config.get("rope_local_base_freq", 1e4)}
    if any(isinstance(value, dict) for value in given.values()):
        if not gemma or given.keys() - {"full_attention", "sliding_attention"}:
            refuse(path, "rope_parameters", given, "one set of values for all layers")
        local |= given.get("sliding_attention") or {}
        given = given.get("full_attention") or {}
        if local.get("rope_type", "default") != "default":
            refuse(
                path,
                "rope_parameters.sliding_attention.rope_type",
                local["rope_type"],
                "'default'",
            )
    theta = config.get(
        "rope_theta", 1e6 if gemma or config.get("model_type") == "mixtral" else 1e4
    )
    return {"rope_theta": theta, **given}, local


def _windows(
    path: Path | str, name: str, config: Mapping[str, Any], layers: int
) -> dict[str, Any]:
    """``window`` and ``full_every`` of the layers; refuses an order of layers that these two cannot say."""
    window, kinds = (
        config.get("sliding_window", 4096),
        list(config.get("layer_types") or ()),
    )
    if name.startswith("Mixtral"):
        window = config.get("sliding_window")
    if name.startswith(("Llama", "Mi", "Deepseek")):
        if "sliding_attention" in kinds:
            refuse(path, "layer_types", kinds, "'full_attention'")
        kinds = [
            "sliding_attention" if name.startswith("Mi") else "full_attention"
        ] * layers
    elif name == "Gemma3ForCausalLM":
        every = config.get("sliding_window_pattern") or 6
        kinds = kinds or [
            ("full" if (i + 1) % every == 0 else "sliding") + "_attention"
            for i in range(layers)
        ]
    elif not config.get("use_sliding_window"):
        window = 0
    else:
        first = config.get("max_window_layers", 28)
        kinds = kinds or [
            ("full" if i < first else "sliding") + "_attention" for i in range(layers)
        ]
    if not window or "sliding_attention" not in kinds:
        if set(kinds) - {"full_attention", "sliding_attention"}:
            refuse(
                path, "layer_types", kinds, "'full_attention' and 'sliding_attention'"
            )
        return {}
    for every in range(layers + 1):
        if kinds == layer_types(layers, every):
            return {"window": window, "full_every": every}
    refuse(path, "layer_types", kinds, "full attention in every n-th layer")


def layer_types(layers: int, full_every: int) -> list[str]:
    """What Hugging Face calls the layers of a model with windows."""
    full = [bool(full_every) and (i + 1) % full_every == 0 for i in range(layers)]
    return ["full_attention" if one else "sliding_attention" for one in full]


def architecture(shape: ModelShape) -> str:
    """The architecture that computes this shape; :class:`WeftError` if Hugging Face has none."""
    remedy = "keep Weft's own checkpoint"
    if shape.mixer != "softmax":
        raise WeftError(
            f"Hugging Face has no architecture for mixer = {shape.mixer!r}; {remedy}"
        )
    if shape.qkv_bias and shape.qk_norm:
        raise WeftError(
            f"no Hugging Face architecture has both qkv_bias and qk_norm; {remedy}"
        )
    if shape.mixtures or shape.kv_rank:
        return mixture_architecture(shape)
    if shape.activation not in ACTIVATIONS.values() or shape.rope_interleaved:
        what = (
            "rope_interleaved"
            if shape.rope_interleaved
            else f"activation = {shape.activation!r}"
        )
        raise WeftError(
            f"no Hugging Face architecture that Weft knows has {what}; {remedy}"
        )
    gemma = ("norm_after", "scaled_embedding", "query_dim", "window_theta")
    if shape.norm_after and shape.scaled_embedding and shape.qk_norm:
        return "Gemma3ForCausalLM"
    if found := [name for name in gemma if getattr(shape, name)]:
        raise WeftError(
            f"{found[0]} is of Gemma 3, which has norm_after, scaled_embedding and qk_norm too; {remedy}"
        )
    if shape.qkv_bias or shape.qk_norm:
        return "Qwen2ForCausalLM" if shape.qkv_bias else "Qwen3ForCausalLM"
    if shape.window and shape.full_every:
        raise WeftError(
            f"no Hugging Face architecture has window and full_every without qk_norm or qkv_bias; {remedy}"
        )
    return "MistralForCausalLM" if shape.window else "LlamaForCausalLM"


def _scoring(name: str) -> str:
    """The architecture with a score in the place of a vocabulary."""
    return name.replace(WRITES, SCORES).replace("Gemma3For", "Gemma3TextFor")


def config_from_shape(
    shape: ModelShape, dtype: object = "float32", tokens: Mapping[str, Any] | None = None,
    max_positions: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The ``config.json`` with which transformers (4 and 5) computes the same model.

    ``tokens``: ids by name (``eos_token_id`` ...); ``max_positions``: the context length, if one is known.
    """
    name = architecture(shape)
    scores = shape.output == "score"
    rope: dict[str, Any] = {"rope_type": "default"}
    if given := shape.rope_scaling:
        rope = {"rope_type": given.kind, "factor": given.factor}
        if given.kind != "linear":
            names = LLAMA3 if given.kind == "llama3" else YARN
            rope |= {
                key: value
                for key, value in given.model_dump(include=set(names)).items()
                if value
            }
            rope["original_max_position_embeddings"] = given.original_max_position
    # transformers 4 takes the quotient of the two lengths for the factor
    if given and given.kind == "yarn":
        max_positions = round(given.factor * given.original_max_position)
    activation = next(
        theirs for theirs, ours in ACTIVATIONS.items() if ours == shape.activation
    )
    config = {
        "architectures": [_scoring(name) if scores else name],
        "model_type": ARCHITECTURES[name][0],
        **{theirs: getattr(shape, ours) for ours, (theirs, *_) in FIELDS.items()},
        "hidden_act": activation,
        "max_position_embeddings": max_positions or UNKNOWN_LENGTH,
        "rope_theta": shape.rope_theta,
        "rope_scaling": rope if given else None,
        "rope_parameters": {**rope, "rope_theta": shape.rope_theta},
        # Named although unknown: Llama's defaults would be token 1, and 2 for the end.
        "bos_token_id": None, "eos_token_id": None, **(tokens or {}),
        **dict.fromkeys(("dtype", "torch_dtype"), str(dtype).removeprefix("torch.")),
    }  # fmt: skip
    if scores:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if name in LIMITS:
        config |= mixture_fields(shape, name)
    if name == "MistralForCausalLM" or shape.window:
        config["sliding_window"] = shape.window or None
    if shape.window and not name.startswith("Mi"):
        config |= {"layer_types": layer_types(shape.layers, shape.full_every)}
        config |= (
            {"use_sliding_window": True, "max_window_layers": 0}
            if name.startswith("Qwen")
            else {}
        )
    if name == "Gemma3ForCausalLM":
        config |= _gemma(shape, config)
    return config


def _gemma(shape: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma's configuration calls by other names; both bases, as transformers 4 and 5 look for them."""
    scalar = shape.query_dim or shape.head_dim or 0
    local = shape.window_theta or shape.rope_theta
    types = config.get("layer_types") or ["full_attention"] * shape.layers
    both = {"full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local}}  # fmt: skip
    return {
        "hidden_activation": config["hidden_act"],
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "layer_types": types,
        "sliding_window": shape.window or 4096,
        "rope_local_base_freq": local,
        "rope_parameters": {kind: both[kind] for kind in both if kind in types},
    }


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """The object that a JSON file holds; :class:`WeftError` with ``hint`` if it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        return content
    except UnicodeDecodeError:
        raise WeftError(f"cannot read {path}: it is not JSON; {hint}") from None
    except (OSError, ValueError) as error:
        raise WeftError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}; {hint}"
        ) from None
