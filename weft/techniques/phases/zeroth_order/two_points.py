"""Training without backward: MeZO (Malladi et al. 2023), under every layout.

The gradient is estimated from the losses at two points, on either side of the parameters along a random direction. The
direction is a function of step and position in the whole tensor, so that every rank perturbs its own shard. All that
ranks exchange is one message of six values: loss and label weight at both points, tokens, and requests to stop.
Data-parallel ranks evaluate both points on their own data; in pairs (DistZO2, Wang et al. 2025) each rank evaluates one
point on the data of both.

Weights that rest in files are loaded once per step, unit by unit (ZO2, Wang et al. 2025): a unit is loaded, the update
of the step before is made, both points of the unit are evaluated, and it is stored again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from zlib import crc32

import torch

from weft.data.batch import Batch
from weft.layout.boundary import OWN, own_share, step_sum
from weft.memory.noise import normal
from weft.parallel.state import Held, Unit
from weft.recipe import Optimizer
from weft.train.rules.rank_sums import logical_positions
from weft.train.step import (
    PhaseFiller,
    StepContext,
    loss_shares,
    own_weight,
    share_of_passes,
    share_of_tokens,
)
from weft.train.step_values import Agreed, StepInput, StepResult

if TYPE_CHECKING:
    from weft.train.phases import AgreePhase

T = torch.Tensor

#: Elements of a direction that are made at a time: what it is made of takes some ten times the room.
ROWS_OF = 1 << 16


class ZerothOrder(PhaseFiller):
    """Estimates the gradient, without backward, from two losses: of parameters moved along a direction and against it.

    The step's result reports as gradient norm the magnitude of the slope between the two losses. Nothing is clipped.
    The move is made on copies of the parameters, because adding and subtracting it in place would let parameters drift.
    The context's ``inspect`` gets the estimated gradients.
    """

    def __init__(self, context: StepContext, settings: Optimizer) -> None:
        self.context, self.settings = context, settings
        self.state, self.mesh = context.state, context.mesh
        self.slope = 0.0

    @torch.no_grad()
    def gradients(self, given: StepInput, agree: AgreePhase) -> T:
        """Return this rank's shares of the step's sums, float64 ``[3, 2]``. No gradients are computed.

        The loss is computed at two points. At the upper one the parameters are moved along a random direction, at the
        lower one against it. Row 0 has the loss and the labels' weight at the upper point, row 1 those at the lower
        point. Row 2 has the number of tokens and the number of requests to end the run. The shares of all ranks add up
        to the sums.
        """
        self.context.before_update()
        stops = own_share(given.stop, self.mesh, **OWN)
        tokens = share_of_tokens(given.batches, self.mesh)
        points = self._shares(given.batches, self.state.updates)
        return torch.stack((*points, torch.stack((tokens, stops))))

    @torch.no_grad()
    def agree(self, given: StepInput, shares: T) -> Agreed:
        (above, weight), (below, same), (tokens, stopped) = step_sum(
            shares, self.mesh
        ).tolist()
        above, below = above / (weight or 1.0), below / (same or 1.0)
        self.slope = (above - below) / (2 * self.settings.epsilon)
        result = StepResult(
            (above + below) / 2,
            abs(self.slope),
            round(tokens) // (1 + self.paired),
            not math.isfinite(self.slope),
            stopped > 0,
        )
        return Agreed({}, lambda: result)

    @torch.no_grad()
    def update(self, given: StepInput, agreed: Agreed) -> list[StepResult]:
        result = agreed.result()
        if not result.skipped:
            self._update(self.slope, self.state.updates, given.lr)
        return [result]

    @property
    def paired(self) -> bool:
        return self.settings.pairs and self.mesh.size("dp") > 1

    def _shares(self, batches: Sequence[Batch], number: int) -> list[T]:
        """Shares of loss and weight at both points, nothing at one that the other of the pair evaluates.

        The parameters are as before afterwards.
        """
        shares = [
            torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
            for _ in range(2)
        ]
        sides = [self.mesh.rank("dp") % 2] if self.paired else [0, 1]
        distances = [
            (self.settings.epsilon, -self.settings.epsilon)[side] for side in sides
        ]
        evaluate = self._evaluate_streamed if self.context.streamed else self._evaluate
        for side, share in zip(
            sides, evaluate(batches, number, distances), strict=True
        ):
            shares[side] = share
        return shares

    def _evaluate(
        self, batches: Sequence[Batch], number: int, distances: Sequence[float]
    ) -> list[T]:
        before, shares = [h.local.clone() for h in self.state.learning], []
        for distance in distances:
            for h, x in zip(self.state.learning, before, strict=True):
                torch.add(x, direction(h, number), alpha=distance, out=h.local)
            self.state.release()
            shares.append(
                loss_shares(self.context.model, self.state, [batches], self.mesh)
            )
        for h, x in zip(self.state.learning, before, strict=True):
            h.local.copy_(x)
        self.state.release()
        return shares

    def _evaluate_streamed(
        self, batches: Sequence[Batch], number: int, distances: Sequence[float]
    ) -> list[T]:
        def at(distance: float) -> Callable[[Held], T]:
            return lambda h: torch.add(h.local, direction(h, number), alpha=distance)

        pipeline = self.context.model.pipeline
        assert pipeline is not None
        losses = pipeline.evaluate_at(list(map(at, distances)), batches)
        weight = own_weight(batches, self.mesh)
        return [
            share_of_passes(torch.stack((loss, weight)), self.state, self.mesh)
            for loss in losses
        ]

    def _update(self, slope: float, number: int, lr: float) -> None:
        """Unit by unit, so that the whole direction never exists at once, unless it is to be looked at."""
        seen: dict[str, T] = {}
        if self.context.inspect is not None:
            seen = {h.name: slope * direction(h, number) for h in self.state.learning}
            self.context.inspect(seen)

        def gradients(unit: Unit) -> dict[str, T]:
            return seen or {
                h.name: slope * direction(h, number) for h in unit.held if h.learns
            }

        self.state.update_later(gradients, lr)
        if not self.context.streamed:
            self.state.settle()


def direction(held: Held, number: int) -> T:
    """Return this rank's shard of the random direction of the parameter ``held`` in step ``number``: standard normal
    values.

    They are drawn some rows at a time, to save memory.
    """
    drawn, seed = torch.empty_like(held.local), crc32(held.name.encode()) << 32 | number
    rows = max(1, ROWS_OF // max(1, drawn[:1].numel()))
    for first in range(0, len(drawn), rows):
        some = drawn[first : first + rows]
        some.copy_(
            normal(
                logical_positions(held, first, first + len(some)),
                seed,
                held.local.dtype,
            )
        )
    return drawn
