"""A server of federated training: a step is a change of the model that clients have brought."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register
from weft.train.phases import STEP
from weft.train.step_technique import StepTechnique

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.step import PhaseFiller, StepContext


@register("phases", "federated-server")
class FederatedServerTechnique(StepTechnique):
    """Adds the combined updates of clients to the server's model in federated training."""

    fills = STEP
    does = (
        "federated.listen = {0.federated.listen!r} waits for what clients have learned"
    )

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller | None:
        from weft.federated.server_steps import ServedSteps

        return ServedSteps(context)
