"""Gradients of a client that are corrected by what the server knows of all clients (FedAvg-M, SCAFFOLD)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register
from weft.train.phases import Phase
from weft.train.step_technique import StepTechnique

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.step import PhaseFiller, StepContext


@register("phases", "corrected-gradients")
class CorrectedGradientsTechnique(StepTechnique):
    """Adds the correction that the server sent with the present round's work to each summed gradient of a client."""

    fills = Phase.AGREE
    does = "federated.policy = {0.federated.policy!r} corrects a client's gradients"

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller | None:
        from weft.federated.client_steps import CorrectedGradients

        return CorrectedGradients(context)
