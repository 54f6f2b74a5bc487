"""The step of a server of federated training: no passes, and one change of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.federated.whole_tensors import scatter_parts, zeros_like_held
from weft.train.step import PhaseFiller
from weft.train.step_values import Agreed, StepResult

if TYPE_CHECKING:
    from weft.federated.change_loader import ChangeOfStep
    from weft.train.phases import AgreePhase
    from weft.train.step import StepContext
    from weft.train.step_values import StepInput


class ServedSteps(PhaseFiller):
    """Fills all phases of a server's step: adds the change that the loader brings to the parameters."""

    def __init__(self, context: StepContext) -> None:
        self.context = context

    def gradients(self, given: StepInput, agree: AgreePhase) -> torch.Tensor:
        return torch.zeros(())

    def agree(self, given: StepInput, shares: torch.Tensor) -> Agreed:
        self.context.before_update()
        served: ChangeOfStep = given.batches[0]  # type: ignore[assignment]
        result = StepResult(served.loss, served.norm, 0, False, given.stop)
        return Agreed({}, lambda: result)

    @torch.no_grad()
    def update(self, given: StepInput, agreed: Agreed) -> list[StepResult]:
        served: ChangeOfStep = given.batches[0]  # type: ignore[assignment]
        state, mesh = self.context.state, self.context.mesh
        state.expose()
        targets = {h.name: zeros_like_held(h) for h in state.learning}
        scatter_parts(targets, mesh, served.difference)
        for h in state.learning:
            h.local.add_(targets[h.name].values)
        state.release()  # what was gathered is of other values
        return [agreed.result()]
