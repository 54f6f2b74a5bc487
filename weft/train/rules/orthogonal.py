"""Muon (Jordan et al. 2024): the momentum of a matrix, made orthogonal by a Newton-Schulz iteration."""

from collections.abc import Sequence

import torch

from weft.layout.parts import Part
from weft.parallel.state import Held
from weft.train.rules.rule import RankSums, count_update, like

T = torch.Tensor

#: Of the quintic iteration, and how often it runs.
A, B, C, STEPS = 3.4445, -4.7750, 2.0315, 5
#: So that an update is about as large as AdamW's (Liu et al. 2025, "Muon is scalable for LLM training").
SCALE = 0.2


class Muon:
    """For matrices, and stacks of them (experts).

    Every rank makes the whole matrix's update and takes its part: exact, at the price of gathering.
    """

    def __init__(self, momentum: float, ranks: RankSums) -> None:
        self.momentum, self.ranks = momentum, ranks

    def slots(self, held: Held) -> dict[str, Part]:
        return {"momentum": like(held)}

    def update(
        self, held: Sequence[Held], grads: Sequence[T], lr: float, decay: float
    ) -> None:
        count_update(held)
        for h, g in zip(held, grads, strict=True):
            momentum = h.slots["momentum"].values.lerp_(g, 1 - self.momentum)
            whole = self.ranks.whole(g.lerp(momentum, self.momentum), h)  # Nesterov's
            size = SCALE * max(whole.shape[-2:]) ** 0.5
            made = (
                torch.stack([orthogonal(matrix) for matrix in whole.flatten(0, -3)])
                if whole.dim() > 2
                else None
            )
            made = orthogonal(whole) if made is None else made.view_as(whole)
            h.local.mul_(1 - lr * decay).sub_(self.ranks.mine(made, h), alpha=lr * size)


def orthogonal(x: T) -> T:
    """A matrix with the singular vectors of ``x [m, n]`` and singular values near one."""
    y = x.mT if x.size(0) > x.size(1) else x
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = y @ y.mT
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=B, alpha=C), y, beta=A)
    return y.mT if x.size(0) > x.size(1) else y
