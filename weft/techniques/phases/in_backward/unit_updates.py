"""Updates within backward: a unit's gradients are used as soon as they are final, and freed (LOMO, Lv et al. 2023).

Only the gradients of one unit, mostly a block, are in memory at a time, instead of the whole model's. Whatever needs
all gradients before the first update is therefore impossible: clipping by the global norm, and skipping a step whose
gradients are not finite.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from weft.errors import WeftError
from weft.layout.axes import MODEL_AXES
from weft.layout.boundary import I, share_of_sum, step_sum
from weft.parallel.state import State, Unit
from weft.train.ready_units import ReadyUnits
from weft.train.step import (
    PhaseFiller,
    StepContext,
    accumulate,
    reduced,
    shares_of_sums,
    square_norm,
    step_result,
)
from weft.train.step_values import Agreed, StepInput, StepResult

if TYPE_CHECKING:
    from weft.train.phases import AgreePhase

T = torch.Tensor


class InBackward(PhaseFiller):
    """Updates every unit of the state as soon as its last gradient of the step is complete.

    A unit is a group of parameters that are updated together, mostly a block of the model.

    The context's ``inspect`` gets the reduced gradients of one unit at a time. A step whose loss is not finite is
    skipped. A gradient that is not finite ends the run with a :class:`WeftError`, because other units have been updated
    by then.
    """

    def __init__(self, context: StepContext) -> None:
        self.context, self.mesh = context, context.mesh
        # Each unit that learns as a state of its own, for sums and norm.
        self.parts = {
            unit: State([unit])
            for unit in context.state.units
            if any(h.learns for h in unit.held)
        }
        self.ready = ReadyUnits(self.parts, self._update)
        self.skipped, self.lr = False, 0.0
        self.square = torch.zeros((), dtype=torch.float64, device=self.mesh.device)

    def gradients(self, given: StepInput, agree: AgreePhase) -> T:
        """Run forward and backward passes, and update each unit as soon as its gradients are complete.

        Returns this rank's share of the mean loss. ``given``: batches and learning rate of the step. ``agree`` is not
        used.
        """
        self.lr = given.lr
        self.square.zero_()
        context = self.context
        context.before_update()
        loss = accumulate(
            context.model,
            context.state,
            given.batches,
            self.mesh,
            before_last=self._agree,
        )
        for unit in self.ready.end():
            self._update(unit)
        context.state.settle()
        return loss

    def agree(self, given: StepInput, shares: T) -> Agreed:
        shares = shares_of_sums(self.context, given, shares, self.square)
        return Agreed({}, partial(step_result, step_sum(shares, self.mesh)))

    def update(self, given: StepInput, agreed: Agreed) -> list[StepResult]:
        """Update the routers' biases; all parameters have been updated during backward. Returns the step's result.

        Raises :class:`WeftError` if a gradient was not finite.
        """
        result = agreed.result()
        if math.isfinite(result.loss) and result.skipped:
            raise WeftError(
                "a gradient was not finite, and optimizer.in_backward had updated other parameters by then: go on from "
                "the last checkpoint (weft train --resume RUN) with a lower optimizer.lr or without in_backward"
            )
        if not result.skipped:
            self.context.model.learn_loads(result.loads)
        return [result]

    def _agree(self, share: T) -> None:
        """Called before the last backward: all ranks agree whether the step's loss is finite."""
        loss = step_sum(
            share_of_sum(share, self.mesh, **dict.fromkeys(MODEL_AXES, I)), self.mesh
        )
        self.skipped = not math.isfinite(loss.item())
        self.ready.expect()

    def _update(self, unit: Unit) -> None:
        """Update a unit by the gradients that it has, and free them."""
        part = self.parts[unit]
        if not self.skipped:
            grads = reduced(part, self.mesh)
            self.square += square_norm(grads, part, self.mesh)
            if self.context.inspect is not None:
                self.context.inspect(grads)
            self.context.state.update(unit, grads, self.lr)
        else:
            # sums over replicas are under way, and have to be started by ranks without these gradients too
            part.gradients()
        part.clear_gradients()
