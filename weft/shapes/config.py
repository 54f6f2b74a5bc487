"""Read and write the ``config.json`` of Hugging Face models, without weights; :mod:`.mixture` has their experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weft.errors import UsageError, WeftError
from weft.recipe import ModelShape
from weft.section import explain
from weft.shapes.config_fields import ConfigFields, read_json
from weft.shapes.mixture import (
    LIMITS,
    latent_sizes,
    mixture_architecture,
    mixture_fields,
    mixture_settings,
    mixture_sizes,
)
from weft.shapes.untrainable import UntrainableShape, untrainable

#: Fields of :class:`ModelShape` and what ``config.json`` calls them; GPT-2's names come last.
FIELDS = {
    "vocab": ("vocab_size",), "layers": ("num_hidden_layers", "n_layer"), "embed": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"), "ffn": ("intermediate_size", "n_inner"),
    "kv_heads": ("num_key_value_heads",), "head_dim": ("head_dim",), "tied": ("tie_word_embeddings",),
    "norm_eps": ("rms_norm_eps",), "init_std": ("initializer_range",),
}  # fmt: skip

#: Architectures: the ``model_type`` of each, and the settings of :class:`ModelShape` that it implies or starts from.
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

#: Names in ``layer_types``: layers that see all tokens, and layers with a window.
FULL, SLIDING = "full_attention", "sliding_attention"

#: The end of an architecture's name: a language model, and one with a single score.
WRITES, SCORES = "ForCausalLM", "ForSequenceClassification"

#: :attr:`ModelShape.activation` by the name in ``hidden_act`` (of Gemma ``hidden_activation``).
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}

#: Fields on which the reading of others depends, by the kind of their values.
KINDS_OF_FIELDS: dict[type, tuple[str, ...]] = {
    int: ("num_hidden_layers", "n_layer", "sliding_window", "max_window_layers"),
    str: ("model_type", "hidden_act", "hidden_activation", "activation_function"),
    list: ("architectures", "layer_types"),
    dict: ("rope_scaling", "rope_parameters", "quantization_config", "id2label"),
}  # fmt: skip

#: Fields that change the arithmetic, and the one value that Weft computes with.
ONLY = {
    "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "use_bidirectional_attention": False,
    "truncate": True, "is_causal": True,
}  # fmt: skip

#: The most layers that a recipe can have.
MOST_LAYERS = 100_000

#: The context length that is written where none is known: transformers needs a number.
UNKNOWN_LENGTH = 8192

#: Settings of rotary scaling in Llama 3, and in yarn beside the factor: the names in :class:`weft.recipe.RopeScaling`.
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")

#: Features that Weft lacks, by the fields of other architectures (and of GGUF files) that imply them.
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
    """Return a sentence that says which features of an unknown architecture Weft lacks to train it.

    ``fields``: the fields of the model's ``config.json``.
    """
    lacks = dict.fromkeys(part for field, part in LACKING.items() if fields.get(field))
    if not lacks:
        return "its layers are not among those that Weft has"
    return f"missing is {' and '.join(lacks)}"


def shape_from_config(path: Path, planned: bool = False) -> ModelShape:
    """Read the model that a ``config.json`` describes; ``path``: this file or its folder.

    Raises :class:`WeftError` for a model that Weft would compute differently. With ``planned`` such a model gives an
    :class:`UntrainableShape` instead, which has only the sizes that plans need.
    """
    path = path / "config.json" if path.is_dir() else path
    hint = "give a Hugging Face config.json or a folder with one"
    return shape_from_fields(read_json(path, hint), path, planned)


def shape_from_fields(
    config: Mapping[str, Any], path: Path | str, planned: bool = False
) -> ModelShape:
    """Return the model that ``config``, the fields of a ``config.json``, describes.

    ``path`` names the file in errors. Raises :class:`WeftError` for a model that Weft would compute differently; with
    ``planned`` such a model gives an :class:`UntrainableShape` instead, which has only the sizes that plans need.
    """
    fields = ConfigFields(config, path)
    fields.check_kinds(KINDS_OF_FIELDS)
    try:
        return _computed(fields)
    except WeftError as error:
        if planned:
            return _planned(fields, str(error))
        raise


def _computed(config: ConfigFields) -> ModelShape:
    """Return the model, which Weft computes exactly as transformers would."""
    name, scores = _known(config)
    weight_blocks(config.path, config)
    gemma = name == "Gemma3ForCausalLM"
    rope, local = _rope(config)
    for field, supported in ONLY.items():
        value = {**config, **rope}.get(field)
        if value not in (None, supported):
            config.refuse(field, repr(supported), value)
    tree = {
        "norm_eps": 1e-6,
        **ARCHITECTURES[name][1],
        **_sizes(config, "vocab", "layers", "embed", "heads", "ffn"),
        "rope_theta": rope.get("rope_theta", 1e4),
        **_scaling(config, rope),
    }
    activation = config.get("hidden_activation") or config.get("hidden_act")
    activation = activation or ("gelu_pytorch_tanh" if gemma else "silu")
    if activation not in ACTIVATIONS:
        config.refuse("hidden_act", " and ".join(map(repr, ACTIVATIONS)), activation)
    tree["activation"] = ACTIVATIONS[activation]
    tree |= _windows(name, config, tree["layers"])
    if name in LIMITS:
        tree |= mixture_settings(name, config, tree["layers"])
    if scores:
        tree |= {"output": "score", "tied": False}
    if gemma:
        if tree.get("rope_scaling", {}).get("kind") == "yarn":
            config.refuse("rope_type", "'default', 'linear' and 'llama3'", "yarn")
        theta = local.get("rope_theta", 1e4) if tree.get("window") else None
        scalar = config.get("query_pre_attn_scalar", 256)
        tree |= {"query_dim": scalar, "window_theta": theta}
    try:
        return ModelShape.model_validate(tree)
    except ValidationError as error:
        key = str(next(iter(error.errors()[0]["loc"]), ""))
        said = explain(error, ModelShape, tree).replace(
            key, FIELDS.get(key, (key,))[0], 1
        )
        raise WeftError(f"{config.path}: {said}") from None


def _known(config: ConfigFields) -> tuple[str, bool]:
    """Return the architecture, a key of :data:`ARCHITECTURES`, and whether the model scores."""
    kinds = {kind: architecture for architecture, (kind, _) in ARCHITECTURES.items()}
    by_kind = kinds.get(config.get("model_type", ""))
    name = next(iter(config.get("architectures") or ()), by_kind)
    scores = str(name).endswith(SCORES)
    if scores:
        if len(config.get("id2label") or "two") != 1:
            config.refuse("id2label", "a single label, the score of a reward model")
        name = by_kind or name
    if name not in ARCHITECTURES:
        known = ", ".join(each.removesuffix(WRITES) for each in ARCHITECTURES)
        raise WeftError(
            f"{config.path}: architectures = {str(name)[:60]!r} is not supported: {lacking(config)}; Weft has {known}"
        )
    return name, scores


def _sizes(config: ConfigFields, *needed: str) -> dict[str, Any]:
    """Return the values of :data:`FIELDS` in the configuration, of which it must have the ``needed`` ones."""
    sizes = {ours: config.given(*names) for ours, names in FIELDS.items()}
    config.check_complete([FIELDS[ours][0] for ours in needed if sizes[ours] is None])
    return {ours: value for ours, value in sizes.items() if value is not None}


def _planned(config: ConfigFields, why: str) -> UntrainableShape:
    """Return the sizes that any configuration gives, dense or with experts, which time and memory depend on."""
    for ours in ("layers", "embed", "heads", "vocab"):
        if config.given(*FIELDS[ours]) is None:
            raise UsageError(
                f"{config.path}: {FIELDS[ours][0]} is missing; give a complete config.json or a built-in shape"
            )
    sizes = _sizes(config)
    gpt = "n_embd" in config
    activation = config.given("hidden_act", "activation_function") or "silu"
    if sizes["layers"] > MOST_LAYERS:
        config.refuse(FIELDS["layers"][0], f"at most {MOST_LAYERS:,}", sizes["layers"])
    sizes = {"tied": gpt, "ffn": 4 * sizes["embed"]} | sizes
    sizes |= mixture_sizes(config, sizes["layers"], sizes["ffn"])
    if config.get("kv_lora_rank"):
        sizes |= latent_sizes(config)
    kinds = config.get("layer_types") or ()
    return untrainable(
        why,
        gated=not gpt and activation in (*ACTIVATIONS, "swiglu"),
        window=config.get("sliding_window") or 0,
        windowed=tuple(kind == SLIDING for kind in kinds),
        clamped=bool(sizes["experts"]) and config.get("swiglu_limit") is not None,
        **sizes,
    )


def _scaling(config: ConfigFields, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting ``rope_scaling``, if there is any."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    needed = {"linear": (), "llama3": LLAMA3, "yarn": ("factor",)}.get(str(kind))
    if needed is None:
        config.refuse("rope_type", "'default', 'linear', 'llama3' and 'yarn'", kind)
    missing = [f"rope_scaling.{key}" for key in needed if rope.get(key) is None]
    config.check_complete(missing)
    scaling = {"kind": kind, "factor": rope.get("factor")}
    if kind != "linear":
        field = "original_max_position_embeddings"
        length = config.get(field) or rope.get(field)
        length = length or config.get("max_position_embeddings")
        scaling["original_max_position"] = length
        names = LLAMA3 if kind == "llama3" else YARN
        scaling |= {key: rope[key] for key in names if rope.get(key) is not None}
    return {"rope_scaling": scaling}


def weight_blocks(path: Path | str, config: Mapping[str, Any]) -> list[int]:
    """Return the shape ``[rows, columns]`` of the blocks of a weight that share a scale; empty without quantisation.

    Only 8-bit floating-point weights are known; other quantisation raises :class:`WeftError`. ``config``: fields of the
    ``config.json``; ``path`` names this file in errors.
    """
    match stored := config.get("quantization_config") or {}:
        case {
            "quant_method": "fp8",
            "weight_block_size": [int(rows), int(columns)],
        } if min(rows, columns) > 0 and stored.get("fmt", "e4m3") == "e4m3":
            return [rows, columns]
    if stored:
        supported = "quant_method 'fp8' with a weight_block_size of two numbers"
        ConfigFields(config, path).refuse("quantization_config", supported)
    return []


def _rope(config: ConfigFields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary embedding of layers that see all tokens, and of windowed ones, each as one flat set of fields.

    transformers 5 writes ``rope_parameters``, of Gemma 3 a set per kind of layer; 4 wrote ``rope_scaling`` beside
    ``rope_theta`` and ``rope_local_base_freq``.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = config.get("model_type")
    gemma = kind == "gemma3_text" or "Gemma3ForCausalLM" in (
        config.get("architectures") or ()
    )
    if (
        gemma
        and rope
        and rope == config.get("rope_parameters")
        and not rope.keys() & {FULL, SLIDING}
    ):
        config.refuse(
            "rope_parameters",
            f"a set of values for each of {FULL!r} and {SLIDING!r}",
            rope,
        )
    local = {"rope_theta": config.get("rope_local_base_freq", 1e4)}
    if any(isinstance(value, dict) for value in rope.values()):
        if not gemma or rope.keys() - {"full_attention", "sliding_attention"}:
            config.refuse("rope_parameters", "one set of values for all layers", rope)
        local |= rope.get("sliding_attention") or {}
        rope = rope.get("full_attention") or {}
        if local.get("rope_type", "default") != "default":
            field = "rope_parameters.sliding_attention.rope_type"
            config.refuse(field, "'default'", local["rope_type"])
    theta = config.get("rope_theta", 1e6 if gemma or kind == "mixtral" else 1e4)
    return {"rope_theta": theta, **rope}, local


def _windows(name: str, config: ConfigFields, layers: int) -> dict[str, Any]:
    """Return the settings ``window`` and ``full_every``; refuses an order of layers that these two cannot describe."""
    usual = None if name.startswith("Mixtral") else 4096
    window = config.get("sliding_window", usual)
    kinds = list(config.get("layer_types") or ())
    if name.startswith(("Llama", "Mi", "Deepseek")):
        usual_kind = SLIDING if name.startswith("Mi") and window else FULL
        if set(kinds) - {usual_kind}:
            config.refuse("layer_types", repr(usual_kind))
        kinds = [SLIDING if name.startswith("Mi") else FULL] * layers
    elif name == "Gemma3ForCausalLM":
        # of other models it may be a text such as "LLLG"
        config.check_kinds({int: ("sliding_window_pattern",)})
        every = config.get("sliding_window_pattern") or 6
        kinds = kinds or layer_types(layers, every)
    elif not config.get("use_sliding_window"):
        window = 0
    else:
        first = config.get("max_window_layers", 28)
        kinds = kinds or [FULL if i < first else SLIDING for i in range(layers)]
    if not window or SLIDING not in kinds:
        if set(kinds) - {FULL, SLIDING}:
            config.refuse("layer_types", f"{FULL!r} and {SLIDING!r}", kinds)
        return {}
    for every in range(layers + 1):
        if kinds == layer_types(layers, every):
            return {"window": window, "full_every": every}
    config.refuse("layer_types", "full attention in every n-th layer", kinds)


def layer_types(layers: int, full_every: int) -> list[str]:
    """Return Hugging Face's ``layer_types`` for a model with ``layers`` layers: for each layer, whether its attention
    is full or has a window.

    ``full_every``: distance between two layers with full attention: with 6 these are the 6th, the 12th, the 18th and so
    on. 0: no layer has full attention.
    """
    kinds = [SLIDING] * layers
    if full_every:
        kinds[full_every - 1 :: full_every] = [FULL] * (layers // full_every)
    return kinds


def architecture(shape: ModelShape) -> str:
    """Return the name of the Hugging Face architecture that computes ``shape``, such as ``LlamaForCausalLM``.

    Raises :class:`WeftError` if there is none.
    """
    remedy = "keep Weft's own checkpoint"
    if shape.residual != "standard":
        raise WeftError(
            f"no Hugging Face architecture has residual = {shape.residual!r}; {remedy}"
        )
    if shape.small_ffn:
        raise WeftError(
            f"no Hugging Face architecture has small_ffn beside ffn; {remedy}"
        )
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
        setting = f"activation = {shape.activation!r}"
        setting = "rope_interleaved" if shape.rope_interleaved else setting
        raise WeftError(
            f"no Hugging Face architecture that Weft knows has {setting}; {remedy}"
        )
    gemma = ("norm_after", "scaled_embedding", "query_dim", "window_theta")
    if shape.norm_after and shape.scaled_embedding and shape.qk_norm:
        return "Gemma3ForCausalLM"
    if named := [name for name in gemma if getattr(shape, name)]:
        raise WeftError(
            f"{named[0]} is of Gemma 3, which has norm_after, scaled_embedding and qk_norm too; {remedy}"
        )
    if shape.qkv_bias or shape.qk_norm:
        return "Qwen2ForCausalLM" if shape.qkv_bias else "Qwen3ForCausalLM"
    if shape.window and shape.full_every:
        raise WeftError(
            f"no Hugging Face architecture has window and full_every without qk_norm or qkv_bias; {remedy}"
        )
    return "MistralForCausalLM" if shape.window else "LlamaForCausalLM"


def _scoring(name: str) -> str:
    """Return the architecture with a score in place of a vocabulary."""
    return name.replace(WRITES, SCORES).replace("Gemma3For", "Gemma3TextFor")


def config_from_shape(
    shape: ModelShape, dtype: object = "float32", tokens: Mapping[str, Any] | None = None,
    max_positions: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of a ``config.json`` with which transformers (4 and 5) computes the same model.

    ``dtype``: type of the weights; ``tokens``: ids of special tokens by name (``eos_token_id`` ...); ``max_positions``:
    the context length, if known. Raises :class:`WeftError` if no architecture computes ``shape``.
    """
    name = architecture(shape)
    scores = shape.output == "score"
    rope: dict[str, Any] = {"rope_type": "default"}
    if given := shape.rope_scaling:
        rope = {"rope_type": given.kind, "factor": given.factor}
        if given.kind != "linear":
            names = LLAMA3 if given.kind == "llama3" else YARN
            values = {key: getattr(given, key) for key in names}
            rope |= {key: value for key, value in values.items() if value}
            rope["original_max_position_embeddings"] = given.original_max_position
    # transformers 4 takes the quotient of the two lengths for the factor
    if given and given.kind == "yarn":
        max_positions = round(given.factor * given.original_max_position)
    activations = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    config = {
        "architectures": [_scoring(name) if scores else name],
        "model_type": ARCHITECTURES[name][0],
        **{theirs: getattr(shape, ours) for ours, (theirs, *_) in FIELDS.items()},
        "hidden_act": activations[shape.activation],
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
        config["layer_types"] = layer_types(shape.layers, shape.full_every)
        if name.startswith("Qwen"):
            config |= {"use_sliding_window": True, "max_window_layers": 0}
    if name == "Gemma3ForCausalLM":
        config |= _gemma(shape, config)
    return config


def _gemma(shape: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that Gemma's configuration names differently; both bases, as transformers 4 and 5 look for
    them.
    """
    scalar = shape.query_dim or shape.head_dim or 0
    local = shape.window_theta or shape.rope_theta
    types = config.get("layer_types") or [FULL] * shape.layers
    both = {FULL: config["rope_parameters"],
            SLIDING: {"rope_type": "default", "rope_theta": local}}  # fmt: skip
    return {
        "hidden_activation": config["hidden_act"],
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "layer_types": types,
        "sliding_window": shape.window or 4096,
        "rope_local_base_freq": local,
        "rope_parameters": {kind: both[kind] for kind in both if kind in types},
    }
