"""The recipe that a run keeps in its checkpoints, by which it is resumed when no recipe is named."""

import json
from collections.abc import Sequence
from typing import Any

from weft.checkpoint.store import candidates, open_checkpoint
from weft.errors import UsageError, WeftError
from weft.recipe import Recipe
from weft.recipe.read import recipe_of_tree


def kept_recipe(
    resume: str, overrides: Sequence[str] = (), layout: str | None = None, origin: str | None = None,
    data: str | None = None, plans: bool = False,
) -> Recipe:  # fmt: skip
    """Return the recipe of the run that is to be resumed, from its newest readable checkpoint.

    ``resume``: the run or checkpoint. ``plans``: whether to leave out what the planner has chosen, so that it chooses
    again. The other arguments are those of :func:`weft.recipe.read.load_recipe`. Raises :class:`UsageError` if the
    checkpoint keeps no recipe, and :class:`WeftError` if there is no checkpoint.
    """
    if resume == "auto":
        raise UsageError(
            "--resume auto is the newest run of a recipe, and none is named; write weft train RECIPE --resume auto, "
            "or name the run: --resume runs/NAME"
        )
    given = _given(resume)
    if not given:
        why = (
            "was not saved by weft train, or by an older one"
            if given is None
            else "does not keep its recipe, as addresses in it have parts that may be secret"
        )
        raise UsageError(
            f"{resume} {why}; name the recipe: weft train RECIPE --resume {resume}"
        )
    own = {word.partition("=")[0].strip() for word in overrides}
    own |= {"layout"} if layout is not None else set()
    _sort_out_planned(given, own, plans)
    return recipe_of_tree(given, resume, overrides, layout, origin, data)


def _sort_out_planned(tree: dict[str, Any], own: set[str], plans: bool) -> None:
    """Leave out of the settings ``tree``, which this changes, what the planner has chosen if it ``plans`` again.

    ``own``: settings that the user names now, which are no longer the planner's.
    """
    planned = tree.get("train", {}).pop("planned", ())
    left = [
        setting
        for setting in planned
        if not any(f"{key}.".startswith(f"{setting}.") for key in own)
    ]
    # the planner chooses nothing beside a layout that is given; on ranks, its choice has come along
    plans = plans and ("layout" in left or "train.planned" in own)
    if not plans and left:
        tree["train"]["planned"] = left
    for setting in left if plans else ():
        _leave_out(tree, setting)


def _leave_out(tree: dict[str, Any], setting: str) -> None:
    """Remove ``setting``, such as ``layout`` or ``train.recompute``, from the settings ``tree``, which this changes."""
    *sections, key = setting.split(".")
    for section in sections:
        tree = tree.get(section, {})
    tree.pop(key, None)


def _given(resume: str) -> dict[str, Any] | None:
    """Return the settings that the newest readable checkpoint of ``resume`` keeps: none if there may be secrets among
    them, and None if it says nothing about them.
    """
    problem: WeftError | None = None
    for place in candidates(resume):
        try:
            given = open_checkpoint(place).meta.get("given")
            return None if given is None else written_settings(given)
        except WeftError as error:  # resuming takes the one before, too
            problem = problem or error
    assert problem is not None
    raise problem


def written_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the recorded settings ``given`` in which an only data source stands in ``[data]`` itself, where
    overrides of it look.
    """
    tree: dict[str, Any] = json.loads(json.dumps(given))
    sources = tree.get("data", {}).get("sources", [])
    if len(sources) == 1:
        del tree["data"]["sources"]
        tree["data"] |= sources[0]
    return tree
