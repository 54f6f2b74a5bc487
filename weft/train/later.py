"""Optimizer steps that are validated later (post-validation, Qi et al. 2023, section 4).

Clipping by the global norm makes every rank of a pipeline wait for the last one at the end of each step, which costs
the time by which their schedules are shifted against each other. Here each rank updates its parameters at once, as if
nothing were to be clipped, and goes on; the norm arrives while the next step runs. If it then turns out that the
update must be clipped or skipped, all ranks take it back from a copy, do it right and repeat the step that used it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.profiler import record_function

from weft.data.batch import Batch
from weft.train.step import (
    PendingSum,
    Stepper,
    StepResult,
    clear_gradients,
    clip_scale,
    count_loads,
    divisor,
    reduced,
    result_of,
    share_of_weight,
    square_norm,
    update,
)

T = torch.Tensor


@dataclass
class PostValidation(Stepper):
    """A stepper for a pipelined model: the same results as the plain one, a step later.

    Holds a copy of parameters and optimizer state. ``repeated`` counts the steps that had to be run again.
    """

    def __post_init__(self) -> None:
        self.changing: list[T] = []
        for h in self.state.learning:
            self.changing += [
                h.local,
                *(slot.values for slot in h.slots.values()),
                h.updates,
            ]
        self.copy = [torch.empty_like(x) for x in self.changing]
        self.pending: tuple[PendingSum, dict[str, T], float] | None = None
        self.steps = self.repeated = 0

    def step(
        self, batches: Sequence[Batch], lr: float, stop: bool = False
    ) -> list[StepResult]:
        """Run a step and return the result of the one before, which is valid now; nothing after the first."""
        self.steps += 1
        weight = PendingSum(share_of_weight(batches, self.mesh), self.mesh)
        loss = self._run(batches, weight)
        self.before_update()
        before, right = self._finish_pending()
        if not right:
            self.repeated += 1
            clear_gradients(self.model, self.state)
            loss = self._run(batches, weight)
        with record_function("weft:optimizer"):
            grads = reduced(self.state, self.mesh)
            if self.inspect is not None:
                self.inspect(grads)
            square = square_norm(grads, self.state, self.mesh)
            sums = PendingSum(
                self.shares_of_sums(loss, square, batches, stop), self.mesh
            )
            if self.changing:  # there may be nothing on this rank that learns
                torch._foreach_copy_(self.copy, self.changing)
            update(self.state, grads, lr)
            clear_gradients(self.model, self.state)
        self.pending = (sums, grads, lr)
        return before

    def finish(self) -> list[StepResult]:
        """The result of the last step, whose update is final afterwards; nothing if that has been returned."""
        return self._finish_pending()[0]

    def summary(self) -> str:
        hint = (
            "; they are clipped too often, raise optimizer.clip"
            if self.repeated > self.steps / 4
            else ""
        )
        return f"post-validation: {self.repeated} of {self.steps} steps were run again{hint}"

    def _run(self, batches: Sequence[Batch], weight: PendingSum) -> T:
        count_loads(self.model, batches, self.mesh)
        return self.model.pipeline.accumulate(batches, lambda: divisor(weight()))

    def _finish_pending(self) -> tuple[list[StepResult], bool]:
        """The result of the pending step, if there is one, and whether its update was right.

        If it was not, as it must be clipped or skipped, it is taken back and done right.
        """
        if self.pending is None:
            return [], True
        sums, grads, lr = self.pending
        self.pending = None
        result = result_of(sums())
        clip = self.settings.clip
        if not result.skipped and not (clip and result.grad_norm > clip):
            return [result], True
        if self.changing:
            torch._foreach_copy_(self.changing, self.copy)
        if not result.skipped:
            update(self.state, grads, lr, clip_scale(result.grad_norm, clip))
        return [result], False
