"""Asks the table of conflicts which plans ``weft train`` takes together with the other sections of a recipe."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from weft.planner.candidates import CHOSEN
from weft.planner.cost import Plan
from weft.planner.finalists import Final
from weft.planner.layout_search import SearchResult
from weft.recipe import ModelShape, Recipe
from weft.recipe.conflicts import AskedRecipe, refuse_conflicts


def under_rules(
    searched: SearchResult, recipe_of: Callable[[Final], Recipe], shape: ModelShape
) -> SearchResult:
    """Return ``searched`` with a function that says why ``weft train`` would refuse one of its plans.

    ``recipe_of``: returns the recipe under the layout of a plan; it may raise :class:`ValueError` for a layout that the
    recipe refuses. ``shape``: the recipe's model, complete as far as it is known. Plans that differ only in the number
    of sequences of a pass share one result of this function.
    """
    known: dict[tuple[float, ...], str] = {}
    names = [name for name in CHOSEN if name != "micro_batch"]

    def refusal(plan: Plan, barriers: int = 0) -> str:
        key = (*(float(getattr(plan, name)) for name in names), float(plan.outer), barriers)  # fmt: skip
        if key not in known:
            final = Final(
                searched.shape, searched.machine, plan, searched.cost, (), 0.0, barriers=barriers
            )  # fmt: skip
            known[key] = _refusal(final, recipe_of, shape)
        return known[key]

    columns = [getattr(searched.plans, name) for name in (*names, "outer")]
    keys = np.stack(np.broadcast_arrays(*columns))  # [settings, candidates]
    alike = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    return replace(searched, refusal=refusal, alike=alike, answers={})


def _refusal(
    final: Final, recipe_of: Callable[[Final], Recipe], shape: ModelShape
) -> str:
    """Return why ``weft train`` would refuse ``final``; empty if it takes it."""
    try:
        recipe = recipe_of(final)
        refuse_conflicts(AskedRecipe(**dict(recipe), shape=shape))
    except ValueError as error:
        return str(error)
    return ""
