"""Islands that sum their gradients before the update of every step.

This is data parallelism between islands: every label has the same weight, whichever island it is on, and clipping uses
the norm of the summed gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch.profiler import record_function

from weft.layout.boundary import step_sum
from weft.sync.collectives import from_islands, ring_sum
from weft.sync.replicas import replicas_of
from weft.sync.streams import Streams
from weft.train.step import (
    MARKS,
    SAMPLES,
    SQUARE_NORM,
    PhaseFiller,
    StepContext,
    as_flat,
    reduced,
    shares_of_sums,
    square_norm,
    step_result,
)
from weft.train.step_values import Agreed, StepInput

T = torch.Tensor

#: Of a step's sums those that each island knows by itself: the norm, which is of gradients that all islands have by
#: then, and which samples were seen.
OWN = [SQUARE_NORM, SAMPLES, MARKS]


class SummedIslands(PhaseFiller):
    """Sums gradients, loss and counts of a step over all islands. ``streams``: the connections to the other islands."""

    def __init__(self, context: StepContext, streams: Streams) -> None:
        self.context, self.streams = context, streams
        self.replicas = replicas_of(context.state.learning, context.mesh)
        self.steps = 1

    def agree(self, given: StepInput, shares: T) -> Agreed:
        state, mesh = self.context.state, self.context.mesh
        with record_function("weft:optimizer"):
            grads = self.summed(reduced(state, mesh))
            square = square_norm(grads, state, mesh)
            self.context.before_update()
            own = step_sum(shares_of_sums(self.context, given, shares, square), mesh)
            sums = self.beyond(own)
            sums[OWN] = own[OWN]
        self.steps += 1
        return Agreed(grads, partial(step_result, sums))

    def beyond(self, number: T) -> T:
        """Return the elementwise sum over all islands of ``number``, a tensor of the step's loss and counts."""
        own = number.detach().reshape(-1).cpu()
        islands = range(self.context.mesh.islands)
        tag = f"numbers of step {self.steps}"
        every = from_islands(self.streams, own, islands, tag)
        return torch.stack(every).sum(0).view_as(number).to(number.device)

    def summed(self, grads: Mapping[str, T]) -> dict[str, T]:
        """Return the sums over all islands of this island's gradients ``grads``, by parameter name."""
        if not grads:
            return {}
        tag = f"gradients of step {self.steps}"

        def over_ring(flat: T) -> T:
            own = flat[self.replicas.part(flat.numel())]
            ring_sum(self.streams, own, self.streams.order, tag)
            return self.replicas.whole(own, flat.numel())

        return as_flat(list(grads), grads, torch.device("cpu"), over_ring)
