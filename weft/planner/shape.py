"""The model to plan for: a name, a recipe or a Hugging Face ``config.json``, trainable by Weft or not."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from weft.errors import UsageError, WeftError, nearest
from weft.recipe import ModelShape, Recipe, build_recipe
from weft.recipe.toml import read_toml
from weft.recipe.validation import validated
from weft.shapes.config import read_json
from weft.shapes.config import shape_from_config as section_from_config
from weft.shapes.shape import Shape, shape_from_config, shape_of


@dataclass(frozen=True)
class Model:
    """A model to plan for.

    ``shape``: what time and memory depend on. ``recipe``: what a recipe that trains it says beside layout and batch,
    by section. ``untrainable``: why ``weft train`` cannot train it yet; empty if it can. ``section``: what a recipe's
    ``[model]`` can say of it, with ``vocab`` entries of the tokenizer if it leaves that open.
    """

    shape: Shape
    recipe: dict[str, Any]
    untrainable: str = ""
    section: ModelShape | None = None
    vocab: int = 0


def _members(families: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The members of all ``families`` by name, each with what its family says of ``all``."""
    found = {
        name: family["all"] | fields
        for family in families.values()
        for name, fields in family.items()
    }
    return {name: fields for name, fields in found.items() if name != "all"}


_KNOWN = {
    kind: _members(families)
    for kind, families in read_toml(Path(__file__).with_name("models.toml")).items()
}
#: Models that Weft trains.
SECTIONS = {name: ModelShape(**fields) for name, fields in _KNOWN["trained"].items()}
#: Shapes by name: those, and models that it can plan for only.
SHAPES = {name: shape_of(section) for name, section in SECTIONS.items()} | {
    name: Shape(**fields) for name, fields in _KNOWN["planned"].items()
}
#: What a recipe reads if nothing says better: text that every machine has.
DATA: dict[str, Any] = {"sources": [{"kind": "stdlib"}], "tokenizer": "bytes"}


def check_named(name: str) -> None:
    """Refuse a name that no model can have: no built-in, no path that exists, and not of the form of a hub's id."""
    if name not in SHAPES and not (
        Path(name).exists() or re.fullmatch(r"[\w.-]+/[\w.@-]+", name) or ":" in name
    ):
        raise WeftError(
            f"model {name!r} is neither a file nor built in; {nearest(name, SHAPES)}"
        )


def load_model(
    name: str,
    named: Callable[[str], ModelShape] = lambda name: section_from_config(Path(name)),
) -> Model:
    """From the name of a built-in, a Weft recipe (``.toml``) or a Hugging Face ``config.json`` (or its folder).

    ``named`` knows the shape of all else that ``model.from`` can name, such as GGUF files and models of the hub.
    """
    path = Path(name)
    if name in SECTIONS:
        fields = SECTIONS[name].model_dump(
            exclude_none=True, exclude={"mixer", "softmax_every"}
        )
        return Model(
            SHAPES[name], {"model": fields, "data": DATA}, section=SECTIONS[name]
        )
    if name in SHAPES:
        return Model(SHAPES[name], {}, _missing(SHAPES[name]))
    if path.suffix == ".toml":
        return _of_recipe(path, named)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".gguf" or (
        not path.is_file() and re.fullmatch(r"[\w.-]+/[\w.@-]+", name)
    ):
        return Model(
            shape_of(named(name)),
            {"model": {"from": name}, "data": {"sources": DATA["sources"]}},
        )
    if not path.is_file():
        raise WeftError(
            f"model {name!r} is neither a file nor built in; {nearest(name, SHAPES)}"
        )
    data = DATA | (
        {"tokenizer": str(path.parent.resolve())}
        if (path.parent / "tokenizer.json").is_file()
        else {}
    )
    try:
        section = section_from_config(path)
        return Model(
            shape_of(section),
            {"model": {"from": str(path.resolve())}, "data": data},
            section=section,
        )
    except WeftError as error:  # planned for, as far as it is understood
        shape = shape_from_config(
            read_json(path, "give a Hugging Face config.json"), str(path)
        )
        return Model(shape, {}, _missing(shape) or str(error))


def _missing(shape: Shape) -> str:
    """What Weft cannot train about a model of this shape."""
    if shape.experts:
        return "its sizes do not say how it routes tokens; give the model's config.json to train it"
    return (
        ""
        if shape.gated
        else "weft train computes SwiGLU only, and this model has no gate"
    )


def _of_recipe(path: Path, named: Callable[[str], ModelShape]) -> Model:
    """The model of a recipe; its sections but ``[layout]``, which is what is planned, stay as they are."""
    if not path.is_file():
        raise WeftError(f"recipe {path} does not exist")
    tree = read_toml(path)
    recipe = build_recipe(tree, str(path))
    tree.pop("layout", None)
    section = (
        recipe.model if recipe.model.origin is None else named(recipe.model.origin)
    )
    section = (
        section.model_copy(update={"adapter": recipe.adapter})
        if recipe.adapter
        else section
    )
    return Model(
        shape_of(section, vocab_of(recipe)),
        tree,
        section=section,
        vocab=vocab_of(recipe),
    )


def vocab_of(recipe: Recipe) -> int:
    """Entries of the recipe's tokenizer, as far as its name tells."""
    kind, _, size = recipe.data.tokenizer.partition(":")
    return (
        int(size)
        if kind == "train" and size.isdigit()
        else 257
        if kind in ("", "bytes")
        else 50_000
    )


def swept(
    model: ModelShape, asked: Sequence[str], vocab: int
) -> Iterator[tuple[dict[str, str], Shape]]:
    """``model`` with every combination of the values in ``asked``, such as ``experts=64,128``, and what those are."""
    ways: dict[str, list[str]] = {}
    for one in asked:
        name, _, values = one.partition("=")
        if name not in ModelShape.model_fields or not values:
            known = nearest(name, ModelShape.model_fields)
            raise UsageError(
                f"--sweep {one!r} is not of the form field=value,value; {known}"
            )
        ways[name] = values.split(",")
    for chosen in product(*ways.values()):
        fields = dict(zip(ways, chosen, strict=True))
        tree = model.model_dump(exclude_unset=True, exclude={"origin"}) | fields
        words = " ".join(f"{name}={value}" for name, value in fields.items())
        yield fields, shape_of(validated(ModelShape, tree, f"--sweep {words}"), vocab)
