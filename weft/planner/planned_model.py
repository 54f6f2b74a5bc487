"""The model to plan for, from a name, a recipe or a Hugging Face ``config.json``, trainable by Weft or not."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from weft.errors import UsageError, WeftError, nearest
from weft.paths import real_path
from weft.recipe import ModelShape, Recipe, build_recipe
from weft.recipe.toml import read_toml
from weft.section import validated
from weft.shapes.config import shape_from_config
from weft.shapes.origin_shape import converted_shape
from weft.shapes.shape import Shape, shape_of
from weft.shapes.untrainable import UntrainableShape, untrainable


@dataclass(frozen=True)
class PlannedModel:
    """A model to plan for.

    ``section``: the recipe's section of the model. ``recipe``: the other sections of a recipe that trains the model,
    except layout and batch. ``vocab``: size of the tokenizer's vocabulary, used if the section leaves it out.
    ``layout``: the section ``[layout]`` of the user's recipe; None if the model is not from a recipe. ``critic``: size
    of a critic with layers of its own on the same ranks, as a multiple of the model's layers; 0: there is none.
    """

    section: ModelShape
    recipe: dict[str, Any]
    vocab: int = 0
    layout: dict[str, Any] | None = None
    critic: float = 0.0

    @cached_property
    def shape(self) -> Shape:
        """The shape of the model, from which time and memory follow."""
        shape = shape_of(self.section, self.vocab)
        return replace(shape, critic=self.critic) if self.critic else shape

    @property
    def untrainable(self) -> str:
        """Reason why ``weft train`` cannot train the model yet; empty if it can."""
        return self.section.why if isinstance(self.section, UntrainableShape) else ""


def _members(families: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the members of all ``families`` by name, each merged with its family's settings for ``all``."""
    members = {
        name: family["all"] | fields
        for family in families.values()
        for name, fields in family.items()
    }
    return {name: fields for name, fields in members.items() if name != "all"}


_KNOWN = {
    kind: _members(families)
    for kind, families in read_toml(Path(__file__).with_name("models.toml")).items()
}
#: Models that Weft trains.
SECTIONS = {name: ModelShape(**fields) for name, fields in _KNOWN["trained"].items()}
#: Models that it can plan for only.
PLANNED = {name: untrainable(**fields) for name, fields in _KNOWN["planned"].items()}
#: The numbers of both.
SHAPES = {name: shape_of(model) for name, model in (SECTIONS | PLANNED).items()}
#: What a recipe reads if nothing says better: text that every machine has.
DATA: dict[str, Any] = {"sources": [{"kind": "stdlib"}], "tokenizer": "bytes"}


def check_named(name: str) -> None:
    """Raise :class:`WeftError` for a ``name`` that names no model.

    Models are built in, at an existing path, or have an id of the form that model hubs use.
    """
    if name not in SHAPES and not (
        os.path.exists(name) or re.fullmatch(r"[\w.-]+/[\w.@-]+", name) or ":" in name
    ):
        raise WeftError(
            f"model {name!r} is neither a file nor built in; {nearest(name, SHAPES)}"
        )


def load_model(
    name: str,
    named: Callable[[str], ModelShape] = lambda name: shape_from_config(Path(name)),
) -> PlannedModel:
    """Load the model that ``name`` names: by a built-in name, a Weft recipe (``.toml``), or a Hugging Face
    ``config.json`` (or its folder).

    ``named``: returns the shape of any other model that ``model.from`` can name, such as a GGUF file or a model of the
    hub.
    """
    path = Path(name)
    if name in SECTIONS:
        fields = SECTIONS[name].model_dump(
            exclude_none=True, exclude={"mixer", "softmax_every"}
        )
        return PlannedModel(SECTIONS[name], {"model": fields, "data": DATA})
    if name in PLANNED:
        return PlannedModel(PLANNED[name], {})
    if path.suffix == ".toml":
        return _of_recipe(path, named)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".gguf" or (
        not path.is_file() and re.fullmatch(r"[\w.-]+/[\w.@-]+", name)
    ):
        recipe = {"model": {"from": name}, "data": {"sources": DATA["sources"]}}
        return PlannedModel(named(name), recipe)
    if not path.is_file():
        raise WeftError(
            f"model {name!r} is neither a file nor built in; {nearest(name, SHAPES)}"
        )
    beside = path.parent / "tokenizer.json"
    data = DATA | (
        {"tokenizer": str(real_path(path.parent))} if beside.is_file() else {}
    )
    recipe = {"model": {"from": str(real_path(path))}, "data": data}
    return PlannedModel(shape_from_config(path, planned=True), recipe)


def _of_recipe(path: Path, named: Callable[[str], ModelShape]) -> PlannedModel:
    """Load the model of a recipe. Its sections are kept, except ``[layout]``, which is planned."""
    if not path.is_file():
        raise WeftError(f"recipe {path} does not exist")
    tree = read_toml(path)
    recipe = build_recipe(tree, str(path))
    layout = tree.pop("layout", {})
    section = (
        recipe.model if recipe.model.origin is None else named(recipe.model.origin)
    )
    if section.residual == "standard" != recipe.model.residual:
        section = converted_shape(section, recipe.model)
    section = (
        section.model_copy(update={"adapter": recipe.adapter})
        if recipe.adapter
        else section
    )
    critic = critic_size(recipe, section, named)
    return PlannedModel(section, tree, vocab_of(recipe), layout, critic)


def critic_size(
    recipe: Recipe, policy: ModelShape, named: Callable[[str], ModelShape]
) -> float:
    """Return the size of a critic with layers of its own on the policy's ranks, as a multiple of the policy's layers.

    Returns 0 if the recipe has none there. ``policy``: shape of the policy. ``named``: returns the shape of a model
    that ``roles.critic.model`` names.
    """
    role = recipe.roles and recipe.roles.critic
    asked = recipe.rl is not None and recipe.rl.policy_loss.needs_values
    if not (asked and role and role.is_apart) or role.elsewhere:
        return 0.0
    if not role.model:
        return 1.0
    vocab = vocab_of(recipe)
    sizes = []
    for section in (named(role.model), policy):
        shape = shape_of(section, vocab)
        sizes.append(shape.parameters - (2 - shape.tied) * shape.table)
    return float(sizes[0] / sizes[1])


def vocab_of(recipe: Recipe) -> int:
    """Return the vocabulary size of the recipe's tokenizer, estimated if its name does not determine it."""
    kind, _, size = recipe.data.tokenizer.partition(":")
    return (
        int(size)
        if kind == "train" and size.isdigit()
        else 257
        if kind in ("", "bytes")
        else 50_000
    )


def swept_values(
    model: ModelShape, asked: Sequence[str], vocab: int
) -> Iterator[tuple[dict[str, str], Shape]]:
    """Yield ``(values, shape)`` for every combination of the field values in ``asked``, such as ``experts=64,128``.

    ``values``: the values by field. ``shape``: that of ``model`` with these values. ``vocab``: size of the tokenizer's
    vocabulary.
    """
    ways: dict[str, list[str]] = {}
    for text in asked:
        name, _, values = text.partition("=")
        if name not in ModelShape.model_fields or not values:
            known = nearest(name, ModelShape.model_fields)
            raise UsageError(
                f"--sweep {text!r} is not of the form field=value,value; {known}"
            )
        ways[name] = values.split(",")
    for chosen in product(*ways.values()):
        fields = dict(zip(ways, chosen, strict=True))
        tree = model.model_dump(exclude_unset=True, exclude={"origin"}) | fields
        words = " ".join(f"{name}={value}" for name, value in fields.items())
        yield fields, shape_of(validated(ModelShape, tree, f"--sweep {words}"), vocab)
