"""Islands that exchange parameters between some steps: ``layout.island`` with ``sync.every`` above 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register
from weft.train.phases import Phase
from weft.train.step_technique import StepTechnique

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.step import PhaseFiller, StepContext


@register("phases", "separate-islands")
class SeparateIslandsTechnique(StepTechnique):
    """Lets islands train independently of each other, and exchanges parameters after some steps with the method that
    ``sync.update`` names.
    """

    fills = Phase.AFTER
    does = "islands exchange parameters between steps (sync.every = {0.sync.every})"

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller | None:
        if context.presence is None:
            return None
        method = recipe.sync.method
        if not method.in_rounds:
            filler: PhaseFiller = method.filler(context)
            return filler
        from weft.train.islands import Apart

        return Apart(context, context.presence, recipe.sync)
