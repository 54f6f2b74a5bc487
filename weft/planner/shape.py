"""What a plan is for: models by name, recipes and the ``config.json`` of Hugging Face, trainable by Weft or not."""

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import UsageError, WeftError, nearest
from weft.model_config import read_json
from weft.model_config import shape_from_config as section_from_config
from weft.model_shape import Shape, shape_of
from weft.planner.presets import members, read_presets
from weft.recipe import ModelShape, Recipe, build_recipe


@dataclass(frozen=True)
class Model:
    """A model to plan for.

    ``shape``: what time and memory depend on. ``recipe``: what a recipe that trains it says beside layout and batch,
    by section. ``untrainable``: why ``weft train`` cannot train it yet; empty if it can.
    """

    shape: Shape
    recipe: dict[str, Any]
    untrainable: str = ""


_KNOWN = read_presets("models")
#: Models that Weft trains.
SECTIONS = {name: ModelShape(**fields) for name, fields in members(_KNOWN["trained"]).items()}
#: Shapes by name: those, and models that it can plan for only.
SHAPES = {name: shape_of(section) for name, section in SECTIONS.items()} | {
    name: Shape(**fields) for name, fields in members(_KNOWN["planned"]).items()
}
#: What a recipe reads if nothing says better: text that every machine has.
DATA: dict[str, Any] = {"sources": [{"kind": "stdlib"}], "tokenizer": "bytes"}


def load_model(name: str, named: Callable[[str], ModelShape] = lambda name: section_from_config(Path(name))) -> Model:
    """From the name of a built-in, a Weft recipe (``.toml``) or a Hugging Face ``config.json`` (or its folder).

    ``named`` knows the shape of all else that ``model.from`` can name, such as GGUF files and models of the hub.
    """
    path = Path(name)
    if name in SECTIONS:
        fields = SECTIONS[name].model_dump(exclude_none=True, exclude={"mixer", "softmax_every"})
        return Model(SHAPES[name], {"model": fields, "data": DATA})
    if name in SHAPES:
        return Model(SHAPES[name], {}, _missing(SHAPES[name]))
    if path.suffix == ".toml":
        return _of_recipe(path, named)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".gguf" or (not path.is_file() and re.fullmatch(r"[\w.-]+/[\w.@-]+", name)):
        return Model(shape_of(named(name)), {"model": {"from": name}, "data": {"sources": DATA["sources"]}})
    if not path.is_file():
        raise WeftError(f"model {name!r} is neither a file nor built in; {nearest(name, SHAPES)}")
    data = DATA | ({"tokenizer": str(path.parent.resolve())} if (path.parent / "tokenizer.json").is_file() else {})
    try:
        return Model(shape_of(section_from_config(path)), {"model": {"from": str(path.resolve())}, "data": data})
    except WeftError as error:  # planned for, as far as it is understood
        shape = shape_from_config(read_json(path, "give a Hugging Face config.json"), str(path))
        return Model(shape, {}, _missing(shape) or str(error))


def _missing(shape: Shape) -> str:
    """What Weft cannot train about a model of this shape."""
    if shape.experts:
        return "its sizes do not say how it routes tokens; give the model's config.json to train it"
    return "" if shape.gated else "weft train computes SwiGLU only, and this model has no gate"


def _of_recipe(path: Path, named: Callable[[str], ModelShape]) -> Model:
    """The model of a recipe; its sections but ``[layout]``, which is what is planned, stay as they are."""
    if not path.is_file():
        raise WeftError(f"recipe {path} does not exist")
    try:
        tree = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    recipe = build_recipe(tree, str(path))
    tree.pop("layout", None)
    section = recipe.model if recipe.model.origin is None else named(recipe.model.origin)
    section = section.model_copy(update={"adapter": recipe.adapter}) if recipe.adapter else section
    return Model(shape_of(section, vocab_of(recipe)), tree)


def vocab_of(recipe: Recipe) -> int:
    """Entries of the recipe's tokenizer, as far as its name tells."""
    kind, _, size = recipe.data.tokenizer.partition(":")
    return int(size) if kind == "train" and size.isdigit() else 257 if kind in ("", "bytes") else 50_000


def shape_from_config(config: dict[str, Any], origin: str) -> Shape:
    """From the fields of any Hugging Face config, dense or with experts, as far as time and memory depend on them.

    Raises :class:`UsageError` with the name of the field that is missing.
    """

    def get(*names: str, default: Any = None) -> Any:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if value is None:
            raise UsageError(f"{origin}: {names[0]} is missing; give a complete config.json or a built-in shape")
        return value

    layers = get("num_hidden_layers", "n_layer")
    embed = get("hidden_size", "n_embd")
    heads = get("num_attention_heads", "n_head")
    experts = get("num_local_experts", "num_experts", "n_routed_experts", default=0)
    ffn = get("intermediate_size", "n_inner", default=4 * embed)
    expert_ffn = get("moe_intermediate_size", default=ffn) if experts else 0
    dense = get("first_k_dense_replace", default=0) if experts else layers
    head_dim = get("v_head_dim", "head_dim", default=embed // heads)
    kinds = config.get("layer_types") or []
    windowed = kinds.count("sliding_attention") / max(1, len(kinds))
    qkv = qk = 0
    if config.get("kv_lora_rank"):  # latent attention: low-rank queries, keys and values (DeepSeek-V2)
        kv, q = config["kv_lora_rank"], config.get("q_lora_rank")
        wide = heads * (get("qk_nope_head_dim") + get("qk_rope_head_dim"))
        qk = get("qk_nope_head_dim") + get("qk_rope_head_dim")
        into = kv + get("qk_rope_head_dim") + (q or wide)
        qkv = into + (kv * heads * (get("qk_nope_head_dim") + head_dim) + (q * wide if q else 0)) // embed
    return Shape(
        layers,
        embed,
        heads,
        get("num_key_value_heads", default=heads),
        head_dim,
        ffn,
        get("vocab_size"),
        gated=int(get("hidden_act", "activation_function", default="silu") in ("silu", "swiglu", "gelu_pytorch_tanh")
                  and "n_embd" not in config),
        tied=int(get("tie_word_embeddings", default="n_embd" in config)),
        experts=experts,
        top_k=get("num_experts_per_tok", default=0) if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=get("n_shared_experts", default=0) * expert_ffn,
        moe_layers=layers - dense,
        qkv=qkv,
        qk=qk,
        window=get("sliding_window", default=0) if windowed else 0,
        windowed=windowed,
        clamped=int(bool(experts) and config.get("swiglu_limit") is not None),
    )  # fmt: skip
