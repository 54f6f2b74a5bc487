"""What a client adds to the phases of its training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from weft.federated.client_work import present_work
from weft.train.step import PhaseFiller, PlainStep

if TYPE_CHECKING:
    import torch

    from weft.train.step import StepContext
    from weft.train.step_values import Agreed, StepInput, StepResult


class NotedSteps(PhaseFiller):
    """Fills the phase after a client's step: records the step's loss for the answer to the present work order."""

    def __init__(self, context: StepContext) -> None:
        self.present = present_work(context.state)
        self.present.context = context

    def after(
        self, results: list[StepResult], finish: Callable[[], list[StepResult]]
    ) -> list[StepResult]:
        self.present.losses += [result.loss for result in results]
        return results

    def end(self, results: list[StepResult]) -> list[StepResult]:
        return results


class CorrectedGradients(PlainStep):
    """Fills the phase that sums gradients: corrects a client's summed gradients by vectors that the server sends.

    The gradient ``grad`` becomes ``beta grad + correction``. The norm and clipping are those of the uncorrected
    gradients, so that clients without a correction take the very same steps.
    """

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self.present = present_work(context.state)

    def agree(self, given: StepInput, shares: torch.Tensor) -> Agreed:
        agreed = super().agree(given, shares)
        order = self.present.order
        if order is None or order.is_plain:
            return agreed
        for name, grad in agreed.grads.items():
            if order.control:
                self.present.mean_gradient[name] += grad
            grad.mul_(order.beta).add_(self.present.correction[name])
        return agreed
