"""Updates whose global gradient norm is checked a step later (post-validation, Qi et al. 2023, section 4).

Clipping by the global norm makes every rank of a pipeline wait for the last one at the end of each step, which costs
the time by which their schedules are shifted against each other. Here each rank updates its parameters at once, as if
nothing were to be clipped, and goes on; the norm arrives while the next step runs. If the norm then shows that the
update must be clipped or skipped, all ranks restore the state from a copy, make the right update and repeat the step
that used the wrong one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.profiler import record_function

from weft.train.step import (
    PendingSum,
    PhaseFiller,
    StepContext,
    clear_gradients,
    clip_scale,
    count_loads,
    nonzero_weight,
    reduced,
    share_of_weight,
    shares_of_sums,
    square_norm,
    step_result,
    update,
)
from weft.train.step_values import Agreed, StepInput, StepResult

if TYPE_CHECKING:
    from weft.train.phases import AgreePhase

T = torch.Tensor


class PendingUpdate(NamedTuple):
    """A step whose parameters have been updated although its gradient norm is not known yet.

    ``lr``: the learning rate of the step. ``clip``: the gradient norm above which the step must be clipped. ``agreed``:
    the gradients, and a function that waits for the norm.
    """

    lr: float
    clip: float
    agreed: Agreed


class PostValidation(PhaseFiller):
    """Updates a pipelined model before the gradient norm is known, and undoes an update that should have been clipped.

    All numbers equal those of the plain step, but the result of a step is returned one step later. The object holds a
    copy of parameters and optimizer state. ``repeated``: number of steps whose passes had to be run again.
    """

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self.changing: list[T] = []
        for h in context.state.learning:
            self.changing += [
                h.local,
                *(slot.values for slot in h.slots.values()),
                h.updates,
            ]
        self.copy = [torch.empty_like(x) for x in self.changing]
        self.pending: PendingUpdate | None = None
        #: The weight of the present step's labels, and the results that have become final in it.
        self.weight: PendingSum
        self.final: list[StepResult] = []
        self.steps = self.repeated = 0

    def gradients(self, given: StepInput, agree: AgreePhase) -> T:
        self.steps += 1
        mesh = self.context.mesh
        self.weight = PendingSum(share_of_weight(given.batches, mesh), mesh)
        return self._run(given)

    def agree(self, given: StepInput, shares: T) -> Agreed:
        """Complete the previous step, then reduce the gradients of this step.

        The previous update was made before its gradient norm was known. It was wrong if its gradients should have been
        clipped, or the step skipped. In that case it is corrected, and the passes of this step are run again.

        Returns this step's gradients, and a function that waits for this step's result. ``shares``: this rank's share
        of the mean loss.
        """
        context, loss = self.context, shares
        context.before_update()
        self.final, right = self._finish_pending()
        if not right:
            self.repeated += 1
            clear_gradients(context.model, context.state)
            loss = self._run(given)
        with record_function("weft:optimizer"):
            grads = reduced(context.state, context.mesh)
            if context.inspect is not None:
                context.inspect(grads)
            square = square_norm(grads, context.state, context.mesh)
            sums = PendingSum(
                shares_of_sums(context, given, loss, square), context.mesh
            )
        return Agreed(grads, lambda: step_result(sums()))

    def update(self, given: StepInput, agreed: Agreed) -> list[StepResult]:
        """Update without clipping. Returns the previous step's result; in the first step nothing."""
        context = self.context
        with record_function("weft:optimizer"):
            if self.changing:  # there may be nothing on this rank that learns
                torch._foreach_copy_(self.copy, self.changing)
            update(context.state, agreed.grads, given.lr)
            clear_gradients(context.model, context.state)
        self.pending = PendingUpdate(given.lr, given.clip, agreed)
        return self.final

    def finish(self) -> list[StepResult]:
        """Complete the last step. Returns its result, or nothing if that has been returned before."""
        return self._finish_pending()[0]

    def summary(self) -> str:
        hint = (
            "; they are clipped too often, raise optimizer.clip"
            if self.repeated > self.steps / 4
            else ""
        )
        return f"post-validation: {self.repeated} of {self.steps} steps were run again{hint}"

    def _run(self, given: StepInput) -> T:
        context, weight = self.context, self.weight
        count_loads(context.model, given.batches, context.mesh)
        assert context.model.pipeline is not None
        return context.model.pipeline.accumulate(
            given.batches, lambda: nonzero_weight(weight())
        )

    def _finish_pending(self) -> tuple[list[StepResult], bool]:
        """Return the result of the pending step, if there is one, and whether its update was right.

        If it was not, as it must be clipped or skipped, it is taken back and done right.
        """
        if self.pending is None:
            return [], True
        lr, clip, agreed = self.pending
        self.pending = None
        result = agreed.result()
        if not result.skipped and not (clip and result.grad_norm > clip):
            return [result], True
        if self.changing:
            torch._foreach_copy_(self.changing, self.copy)
        if not result.skipped:
            scale = clip_scale(result.grad_norm, clip)
            update(self.context.state, agreed.grads, lr, scale)
        return [result], False
