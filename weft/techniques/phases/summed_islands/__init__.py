"""Islands that sum gradients in every step: ``layout.island`` with ``sync.every = 1``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register
from weft.train.phases import Phase
from weft.train.step_technique import StepTechnique

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.step import PhaseFiller, StepContext


@register("phases", "summed-islands")
class SummedIslandsTechnique(StepTechnique):
    """Sums the gradients of all islands between backward and update."""

    fills = Phase.AGREE
    does = "islands with sync.every = 1 sum gradients between backward and update"
    instead = ", or set sync.every above 1"

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller | None:
        if context.presence is None:
            return None
        from weft.techniques.phases.summed_islands.island_sums import SummedIslands

        return SummedIslands(context, context.presence.streams)
