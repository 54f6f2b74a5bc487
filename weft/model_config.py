"""The ``config.json`` of Hugging Face models in and out, without a weight: Llama 3, Qwen 2.5 and Qwen 3 (dense)."""

import json
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from weft.errors import WeftError
from weft.recipe import ModelShape
from weft.validation import explain

#: Fields of :class:`ModelShape` and what ``config.json`` calls them.
FIELDS = {
    "vocab": "vocab_size", "layers": "num_hidden_layers", "embed": "hidden_size", "heads": "num_attention_heads",
    "ffn": "intermediate_size", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "tied": "tie_word_embeddings", "norm_eps": "rms_norm_eps", "init_std": "initializer_range",
}  # fmt: skip

#: Architecture: its ``model_type``, and the settings of :class:`ModelShape` that it stands for.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {}),
    "Qwen2ForCausalLM": ("qwen2", {"qkv_bias": True}),
    "Qwen3ForCausalLM": ("qwen3", {"qk_norm": True, "head_dim": 128}),
}

#: Fields that change the arithmetic, and the one value that Weft computes with.
ONLY = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1,
    "quantization_config": None, "use_sliding_window": False,
}  # fmt: skip


def shape_from_config(path: Path) -> ModelShape:
    """The model that a ``config.json`` (or its folder) describes; refuses what Weft would compute differently."""
    path = path / "config.json" if path.is_dir() else path
    config = read_json(path, "give a Hugging Face config.json or a folder with one")
    kinds = {kind: architecture for architecture, (kind, _) in ARCHITECTURES.items()}
    name = next(iter(config.get("architectures") or ()), kinds.get(config.get("model_type", "")))
    if name not in ARCHITECTURES:
        _refuse(path, "architectures", name, ", ".join(ARCHITECTURES))
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        _refuse(path, "rope_parameters", rope, "one set of values for all layers")
    for field, supported in ONLY.items():
        value = {**config, **rope}.get(field)
        if value not in (None, supported):
            _refuse(path, field, value, repr(supported))
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        _refuse(path, "layer_types", config["layer_types"], "'full_attention'")
    found = {ours: config[theirs] for ours, theirs in FIELDS.items() if config.get(theirs) is not None}
    missing = [FIELDS[ours] for ours in ("vocab", "layers", "embed", "heads", "ffn") if ours not in found]
    theta = rope.get("rope_theta", config.get("rope_theta", 1e4))
    tree = {"norm_eps": 1e-6, "rope_theta": theta, **ARCHITECTURES[name][1], **found}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        original = "original_max_position_embeddings"
        length = config.get(original) or rope.get(original) or config.get("max_position_embeddings")
        keys = ("factor", "low_freq_factor", "high_freq_factor")
        missing += [f"rope_scaling.{key}" for key in keys if key not in rope]
        tree["rope_scaling"] = {key: rope.get(key) for key in keys} | {"original_max_position": length}
    elif kind != "default":
        _refuse(path, "rope_type", kind, "'default' and 'llama3'")
    if missing:
        raise WeftError(f"{path} has no {', '.join(missing)}; it is not a complete config.json")
    try:
        return ModelShape.model_validate(tree)
    except ValidationError as error:
        key = str(next(iter(error.errors()[0]["loc"]), ""))
        raise WeftError(f"{path}: {explain(error, ModelShape).replace(key, FIELDS.get(key, key), 1)}") from None


def config_from_shape(
    shape: ModelShape, dtype: object = "float32", eos: int | None = None, max_positions: int = 8192
) -> dict[str, Any]:
    """The ``config.json`` with which transformers (4 and 5) computes the same model; ``max_positions`` is a hint."""
    if shape.mixer != "softmax":
        raise WeftError(f"Hugging Face has no architecture for mixer = {shape.mixer!r}; keep Weft's own checkpoint")
    if shape.qkv_bias and shape.qk_norm:
        raise WeftError("no Hugging Face architecture has both qkv_bias and qk_norm; keep this model as a checkpoint")
    name = "Qwen2ForCausalLM" if shape.qkv_bias else "Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"
    rope: dict[str, Any] = {"rope_type": "default"}
    if given := shape.rope_scaling:
        rope = given.model_dump(exclude={"original_max_position"}) | {"rope_type": "llama3"}
        rope["original_max_position_embeddings"] = given.original_max_position
        max_positions = round(given.factor * given.original_max_position)
    return {
        "architectures": [name],
        "model_type": ARCHITECTURES[name][0],
        **{theirs: getattr(shape, ours) for ours, theirs in FIELDS.items()},
        "hidden_act": ONLY["hidden_act"],
        "max_position_embeddings": max_positions,
        "rope_theta": shape.rope_theta,
        "rope_scaling": rope if given else None,
        "rope_parameters": {**rope, "rope_theta": shape.rope_theta},
        "bos_token_id": None,  # named although unknown: Llama's default would be token 1, and 2 for the end
        "eos_token_id": eos,
        **dict.fromkeys(("dtype", "torch_dtype"), str(dtype).removeprefix("torch.")),
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
        raise WeftError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; {hint}") from None


def _refuse(path: Path, field: str, value: Any, supported: str) -> NoReturn:
    raise WeftError(f"{path}: {field} = {str(value)[:60]!r} is not supported; Weft supports {supported}")
