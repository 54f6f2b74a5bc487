"""What ``--expert`` asks for: an expert's name, and what its recipe differs in."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weft.errors import UsageError
from weft.recipe.masked import masked_text

if TYPE_CHECKING:
    from weft.recipe import Recipe


class ExpertWish(NamedTuple):
    """An expert, here a model that is trained apart from the others, as the user asked for it.

    ``name``: its name. ``overrides``: its changes to the common recipe, each of the form ``section.key=value``.
    ``recipe``: the common recipe with these changes.
    """

    name: str
    overrides: tuple[str, ...]
    recipe: "Recipe"


class NamedOverrides(NamedTuple):
    """Name of an expert, and how its recipe differs.

    ``name``: name of the expert. ``overrides``: changes to the common recipe, as texts ``section.key=value``.
    """

    name: str
    overrides: tuple[str, ...]


def read_expert(text: str) -> NamedOverrides:
    """Split one value of the option ``--expert`` into name and overrides.

    Raises :class:`UsageError` if it is malformed.
    """
    try:
        name, *own = shlex.split(text)
    except ValueError:
        name, own = "", []
    if not name or "=" in name or "/" in name or name.startswith("."):
        raise UsageError(
            f"--expert {masked_text(text)!r} does not begin with a name; write it as 'code data.path=code/*.py "
            "model.layers=4'"
        )
    if wrong := next((each for each in own if "=" not in each), None):
        raise UsageError(
            f"--expert {name}: {masked_text(wrong)!r} is no section.key=value"
        )
    return NamedOverrides(name, tuple(own))


def read_wish(recipe: Path, text: str, overrides: list[str]) -> ExpertWish:
    """Read ``text``, one value of the option ``--expert``, and load the expert's recipe from the common recipe
    ``recipe``.

    ``overrides``: overrides that all experts share. Raises :class:`UsageError` for a value or a recipe that is wrong.
    """
    from weft.recipe import load_recipe

    name, own = read_expert(text)
    loaded = load_recipe(recipe, [*overrides, *own])
    loaded.need_model()
    if loaded.model.kind == "diffusion":
        raise UsageError(
            f"{recipe} makes images, whose experts are of clusters of them; give --clusters K"
        )
    return ExpertWish(name, own, loaded)


def check_texts(
    wishes: list[ExpertWish], only: list[str], prior: list[float] | None
) -> None:
    """Check, before any of the language models in ``wishes`` is trained, that they can be combined.

    ``only``: names of the experts to train now. ``prior``: weight of each expert; None: equal weights. Raises
    :class:`UsageError` if they cannot be combined.
    """
    from weft.data.source_check import check_sources

    names = [wish.name for wish in wishes]
    if prior is not None and (
        len(prior) != len(names) or min(prior) < 0 or not any(prior)
    ):
        raise UsageError(
            f"--prior has {len(prior)} weights for {len(names)} experts; give one for each, none below 0 and one above"
        )
    tokenizers = {wish.recipe.data.tokenizer for wish in wishes}
    if len(tokenizers) > 1:
        raise UsageError(
            f"the experts have different tokenizers ({', '.join(map(str, tokenizers))}), so that their probabilities "
            "cannot be joined; give all the same data.tokenizer"
        )
    for wish in wishes:
        if wish.name in only:
            check_sources(wish.recipe.data)


def check_expert_names(
    names: Sequence[str], only: Sequence[str], lost: Sequence[str], top: int
) -> None:
    """Check the names of experts and the number ``top`` of experts to compute.

    ``names``: all experts. ``only``, ``lost``: names that the options ``--only`` and ``--lost`` give. Raises
    :class:`UsageError` for a name that occurs twice, that no expert has, or that both options give. It is also raised
    if all experts are lost, or if ``top`` is too large.
    """
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(
            f"two experts are named {twice!r}; give each a name of its own"
        )
    for option, given in (("--only", only), ("--lost", lost)):
        if other := next((name for name in given if name not in names), None):
            raise UsageError(
                f"{option} {other} is none of the experts {', '.join(names)}"
            )
    if both := next((name for name in only if name in lost), None):
        raise UsageError(f"{both} is in --only and in --lost; leave out one of them")
    if top > len(names):
        raise UsageError(f"--top {top} of {len(names)} experts; 0 stands for all")
    if lost and {*lost} == {*names}:
        raise UsageError("--lost names all experts; one must be left")
