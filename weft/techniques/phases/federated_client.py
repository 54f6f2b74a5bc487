"""A client of federated training: its ordinary steps, whose losses are noted for the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register
from weft.train.phases import Phase
from weft.train.step_technique import StepTechnique

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.step import PhaseFiller, StepContext


@register("phases", "federated-client")
class FederatedClientTechnique(StepTechnique):
    """Records the losses of a client's local steps in federated training."""

    fills = Phase.AFTER
    does = "a client (federated.join) takes the server's model between steps"

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller | None:
        from weft.federated.client_steps import NotedSteps

        return NotedSteps(context)
