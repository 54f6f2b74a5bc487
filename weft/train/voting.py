"""Steps with a gradient aggregated from all replicas, some of which may be garbage (:mod:`weft.sync.robust`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from weft.data.batch import Batch
from weft.layout.boundary import step_sum
from weft.recipe import Resilience
from weft.sync.robust import RULES, aggregated
from weft.train.step import LOSS, SQUARE_NORM, Stepper, accumulate, divisor, split_like

T = torch.Tensor


@dataclass
class Voting(Stepper):
    """A stepper that takes from every replica the mean gradient of its own tokens, one vote each.

    A replica whose gradient is not finite, or that has no tokens, has no part in the step, nor in its loss. The other
    losses are weighted by tokens, as ever.
    """

    resilience: Resilience = field(default_factory=Resilience)

    def gradients(self, batches: Sequence[Batch], stop: bool) -> tuple[dict[str, T], T]:
        weight = torch.tensor(
            sum(b.label_weight for b in batches),
            dtype=torch.float64,
            device=self.mesh.device,
        )
        loss = accumulate(
            self.model,
            self.state,
            batches,
            self.mesh,
            self.routes,
            weight=divisor(weight),
        )
        grads = self.state.gradients()
        vote = torch.cat([grad.flatten() for grad in grads.values()])
        if not (weight > 0 and loss.isfinite()):
            vote.fill_(torch.nan)
        rule, group = RULES[self.resilience.aggregate], self.mesh.group("dp")
        vote, counted = aggregated(vote, rule, self.resilience.faulty, group)
        if not counted[self.mesh.rank("dp")]:
            loss, weight = torch.zeros_like(loss), torch.zeros_like(weight)
        self.before_update()
        sums = step_sum(
            self.shares_of_sums(loss * weight, weight, batches, stop), self.mesh
        )
        # where the weights were summed
        sums[LOSS] = sums[LOSS] / divisor(sums[SQUARE_NORM])
        sums[SQUARE_NORM] = vote.double().square().sum()
        return split_like(vote, grads), sums
