"""GaLore (Zhao et al. 2024), Adam on a projection of a matrix's gradient, and its natural-gradient variant.

A gradient ``[m, n]`` is projected onto ``rank`` directions of its shorter dimension. The directions are singular
vectors of the gradient, computed anew every ``refresh`` updates. Moments have the size of the projection.
"""

from collections.abc import Sequence

import torch

from weft.checkpoint.boxes import MOMENTS
from weft.layout.parts import Part
from weft.parallel.state import Held
from weft.techniques.optimizers.galore import GaLoreSettings
from weft.train.rules.rank_sums import Extent, RankSums, count_update

T = torch.Tensor

#: Strength of what is known of the past gradients' directions (Natural GaLore, Das 2024): lambda.
DAMPING = 1e-3


class ProjectedAdam:
    """Adam on gradients that are projected onto their first ``settings.rank`` singular vectors.

    With ``history`` above 0 the projected gradients are first multiplied by the inverse of an empirical Fisher matrix
    (Natural GaLore). This matrix is computed from the last ``history`` projected gradients, each of which takes as much
    memory as a moment. ``betas`` and ``eps``: the decay rates of Adam's moments and the number added to its
    denominator.
    """

    def __init__(
        self,
        settings: GaLoreSettings,
        betas: tuple[float, float],
        eps: float,
        ranks: RankSums,
        history: int = 0,
    ) -> None:
        self.settings, self.betas, self.eps, self.ranks = settings, betas, eps, ranks
        self.history = history

    def slots(self, held: Held) -> dict[str, Part]:
        rank, short = self._rank(held), self._short(held)
        both = (
            (Extent(0), Extent(None, rank))
            if short == 1
            else (Extent(None, rank), Extent(1))
        )
        slots = {moment: self.ranks.slot(held, *both) for moment in MOMENTS}
        slots["directions"] = self.ranks.slot(
            held, Extent(None, rank), Extent(None, held.logical.shape[short])
        )
        if self.history:
            slots["past"] = self.ranks.slot(held, Extent(None, self.history), *both)
        return slots

    def update(
        self, held: Sequence[Held], grads: Sequence[T], lr: float, decay: float
    ) -> None:
        count, (beta1, beta2) = count_update(held), self.betas
        for h, g in zip(held, grads, strict=True):
            short = self._short(h)
            if (count - 1) % self.settings.refresh == 0:
                directions = singular_directions(
                    self.ranks.whole(g, h), short, self._rank(h)
                )
                h.slots["directions"].values.copy_(self.ranks.agreed(directions))
            lo, hi = h.box[short]
            # [rank, what is here of the shorter side]
            directions = h.slots["directions"].values[:, lo:hi]
            low = self.ranks.sum(
                g @ directions.mT if short == 1 else directions @ g, h, short
            )
            if self.history:
                low = self._natural(h, low, count)
            first, second = (h.slots[moment].values for moment in MOMENTS)
            first.lerp_(low, 1 - beta1)
            second.lerp_(low.square(), 1 - beta2)
            size = lr * (1 - beta2**count) ** 0.5 / (1 - beta1**count)
            step = first / (second.sqrt() + self.eps)
            h.local.sub_(
                step @ directions if short == 1 else directions.mT @ step,
                alpha=size * self.settings.scale,
            )
            h.local.mul_(1 - lr * decay)

    def _natural(self, held: Held, low: T, count: int) -> T:
        """``(damping + past past^T)^-1 low``; the past, a column a gradient, includes this one.

        As ``low`` is a column of ``past``, that is the same column of ``past (damping + past^T past)^-1``. Nothing
        large is subtracted there, and the matrix is as small as the history is short.
        """
        past, now = held.slots["past"].values, (count - 1) % self.history
        past[now] = low
        flat = past.flatten(1)  # [history, elements here]
        identity = torch.eye(self.history, dtype=low.dtype, device=low.device)
        inner = (
            self.ranks.sum(flat @ flat.mT, held, 1 - self._short(held))
            + DAMPING * identity
        )
        # [history, 1]
        weights = torch.cholesky_solve(
            identity[:, now : now + 1], torch.linalg.cholesky(inner)
        )
        return (weights.mT @ flat).view_as(low)

    def _short(self, held: Held) -> int:
        height, width = held.logical.shape
        return 1 if height >= width else 0

    def _rank(self, held: Held) -> int:
        return min(self.settings.rank, *held.logical.shape)


def singular_directions(grad: T, side: int, rank: int) -> T:
    """Return the first ``rank`` singular vectors of ``grad`` ``[m, n]``: ``[rank, m]`` or ``[rank, n]``. ``side``: 0
    for left singular vectors, 1 for right ones. Libraries choose signs differently. Therefore the entry of largest
    magnitude of each vector is made positive, or the first such entry if several are equal up to rounding. If the
    gradient has a smaller rank than ``rank``, as after a step of a few tokens, the vectors beyond its rank are zero.
    Rounding errors alone would determine them.
    """
    left, sizes, right = torch.linalg.svd(grad, full_matrices=False)
    directions = right[:rank] if side == 1 else left[:, :rank].mT
    size = directions.abs()
    largest = directions.gather(
        1, (size > 0.999 * size.amax(1, keepdim=True)).int().argmax(1, keepdim=True)
    )
    # well above rounding
    known = sizes[:rank, None] > sizes[0] * torch.finfo(grad.dtype).eps ** 0.6
    return torch.where(
        known, directions * torch.where(largest < 0, -1.0, 1.0), 0.0
    ).contiguous()
