"""Updates within backward: a unit's gradients are used as soon as they are final, and freed (LOMO, Lv et al. 2023).

So the gradients of one unit, a block mostly, exist at a time instead of the whole model's. What must know all of them
before the first update cannot be had: clipping by the global norm, and skipping a step whose gradients are not finite.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.data.batch import Batch
from weft.errors import WeftError
from weft.layout.axes import MODEL_AXES
from weft.layout.boundary import I, share_of_sum, step_sum
from weft.parallel.state import State, Unit
from weft.train.arrivals import Arrivals
from weft.train.step import (
    Stepper,
    StepResult,
    accumulate,
    reduced,
    result_of,
    square_norm,
)

T = torch.Tensor


@dataclass
class InBackward(Stepper):
    """A stepper that updates every unit when its last gradient of the step is there.

    ``inspect`` sees the reduced gradients, a unit's at a time. A step whose loss is not finite is skipped. One whose
    loss is, but not its gradients, ends the run with a :class:`WeftError`, as units have been updated by then.
    """

    def __post_init__(self) -> None:
        # Each unit that learns as a state of its own, for sums and norm.
        self.parts = {
            unit: State([unit])
            for unit in self.state.units
            if any(h.learns for h in unit.held)
        }
        self.arrivals, self.skipped = Arrivals(self.parts, self._update), False
        self.lr, self.square = (
            0.0,
            torch.zeros((), dtype=torch.float64, device=self.mesh.device),
        )

    def step(
        self, batches: Sequence[Batch], lr: float, stop: bool = False
    ) -> list[StepResult]:
        self.lr = lr
        self.square.zero_()
        self.before_update()
        loss = accumulate(
            self.model, self.state, batches, self.mesh, before_last=self._agree
        )
        for unit in self.arrivals.end():
            self._update(unit)
        self.state.settle()
        result = result_of(
            step_sum(self.shares_of_sums(loss, self.square, batches, stop), self.mesh)
        )
        if math.isfinite(result.loss) and result.skipped:
            raise WeftError(
                "a gradient was not finite, and optimizer.in_backward had updated other parameters by then: go on from "
                "the last checkpoint (weft train RECIPE --resume auto) with a lower optimizer.lr or without in_backward"
            )
        if not result.skipped:
            self.model.learn_loads(result.loads)
        return [result]

    def _agree(self, share: T) -> None:
        """Called before the last backward: all ranks agree whether the step's loss is finite."""
        loss = step_sum(
            share_of_sum(share, self.mesh, **dict.fromkeys(MODEL_AXES, I)), self.mesh
        )
        self.skipped = not math.isfinite(loss.item())
        self.arrivals.expect()

    def _update(self, unit: Unit) -> None:
        """Update a unit by the gradients that it has, and free them."""
        part = self.parts[unit]
        if not self.skipped:
            grads = reduced(part, self.mesh)
            self.square += square_norm(grads, part, self.mesh)
            if self.inspect is not None:
                self.inspect(grads)
            self.state.update(unit, grads, self.lr)
        part.clear_gradients()
