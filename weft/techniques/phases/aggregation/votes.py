"""Aggregation of the gradients of all replicas, some of which may be faulty (:mod:`weft.sync.robust_aggregation`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from weft.data.batch import Batch
from weft.layout.boundary import step_sum
from weft.recipe import Resilience
from weft.registry import find
from weft.sync.aggregator import Aggregator
from weft.sync.robust_aggregation import aggregated
from weft.train.step import (
    LOSS,
    SQUARE_NORM,
    PhaseFiller,
    StepContext,
    nonzero_weight,
    shares_of_sums,
    split_like,
    step_result,
)
from weft.train.step_values import Agreed, StepInput

T = torch.Tensor


class Voting(PhaseFiller):
    """Combines the replicas' gradients by a robust rule in which each replica counts once, however many tokens it has.

    A replica's gradient is the mean over its own tokens. A replica is left out of the step and of the step's loss if it
    has no tokens or its gradient is not finite. The losses of all other replicas are weighted by tokens. ``context``:
    model, state and mesh of the run. ``resilience``: the recipe's section that names the rule of aggregation, and the
    number of replicas that may be faulty.
    """

    def __init__(self, context: StepContext, resilience: Resilience) -> None:
        self.context, self.resilience = context, resilience
        self.rule: Aggregator = find("aggregator", resilience.aggregate).implementation(
            resilience
        )

    def own_weight(self, batches: Sequence[Batch]) -> T:
        """Return the sum of the weights of all labels in ``batches``, the batches of this rank's replica, as a float64
        scalar.
        """
        return torch.tensor(
            sum(b.label_weight for b in batches),
            dtype=torch.float64,
            device=self.context.mesh.device,
        )

    def label_weight(self, batches: Sequence[Batch]) -> T:
        return nonzero_weight(self.own_weight(batches))

    def agree(self, given: StepInput, shares: T) -> Agreed:
        context, loss = self.context, shares
        weight = self.own_weight(given.batches)
        grads = context.state.gradients()
        vote = torch.cat([grad.flatten() for grad in grads.values()])
        if not (weight > 0 and loss.isfinite()):
            vote.fill_(torch.nan)
        group = context.mesh.group("dp")
        vote, counted = aggregated(vote, self.rule, self.resilience.faulty, group)
        if not counted[context.mesh.rank("dp")]:
            loss, weight = torch.zeros_like(loss), torch.zeros_like(weight)
        context.before_update()
        sums = step_sum(
            shares_of_sums(context, given, loss * weight, weight), context.mesh
        )
        # where the weights were summed
        sums[LOSS] = sums[LOSS] / nonzero_weight(sums[SQUARE_NORM])
        sums[SQUARE_NORM] = vote.double().square().sum()
        return Agreed(split_like(vote, grads), partial(step_result, sums))
