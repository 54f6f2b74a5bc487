"""Muon (Jordan et al. 2024): the momentum of a matrix, made orthogonal by a Newton-Schulz iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from weft.registry import register
from weft.section import Section
from weft.train.rules.update_rule import UpdateRule

if TYPE_CHECKING:
    import torch

    from weft.layout.parts import Part
    from weft.parallel.state import Held
    from weft.recipe import Optimizer
    from weft.train.rules.rank_sums import RankSums

#: Of the quintic iteration, and how often it runs.
A, B, C, STEPS = 3.4445, -4.7750, 2.0315, 5
#: So that an update is about as large as AdamW's (Liu et al. 2025, "Muon is scalable for LLM training").
SCALE = 0.2


class MuonSettings(Section):
    """Settings of Muon that a recipe gives: the momentum."""

    momentum: float = Field(
        0.95,
        ge=0,
        lt=1,
        description=(
            "Decay of the momentum, a moving average of past gradients: the share of the old average that each step "
            "keeps."
        ),
    )


@register(
    "optimizer",
    "muon",
    settings=MuonSettings,
    draws={"momentum": (0.0, 0.9)},
    title="Muon",
    paper="Jordan et al. 2024; Liu et al. 2025",
    recipe="optimizers.toml",
    proof="tests/techniques/test_optimizers.py",
    figure="4.5 bytes per parameter, loss 2.182 (AdamW 2.292) (`bench/optimizers.py`)",
)
class Muon(UpdateRule):
    """Updates each matrix by its momentum, made orthogonal: with all singular values near one (Jordan et al. 2024; Liu
    et al. 2025). In a stack of matrices (experts) each matrix is treated by itself. Every rank gathers the whole
    matrix, computes its update and takes its own shard, so that the result is exact.
    """

    for_matrices = True
    kept = 1.0

    def __init__(self, settings: Optimizer, ranks: RankSums) -> None:
        self.momentum, self.ranks = settings.own(MuonSettings).momentum, ranks

    def slots(self, held: Held) -> dict[str, Part]:
        from weft.train.rules.rank_sums import like

        return {"momentum": like(held)}

    def update(
        self,
        held: Sequence[Held],
        grads: Sequence[torch.Tensor],
        lr: float,
        decay: float,
    ) -> None:
        import torch

        from weft.train.rules.rank_sums import count_update

        count_update(held)
        for h, g in zip(held, grads, strict=True):
            momentum = h.slots["momentum"].values.lerp_(g, 1 - self.momentum)
            whole = self.ranks.whole(g.lerp(momentum, self.momentum), h)  # Nesterov's
            size = SCALE * max(whole.shape[-2:]) ** 0.5
            whole_update = (
                torch.stack([orthogonal(matrix) for matrix in whole.flatten(0, -3)])
                if whole.dim() > 2
                else None
            )
            whole_update = (
                orthogonal(whole)
                if whole_update is None
                else whole_update.view_as(whole)
            )
            h.local.mul_(1 - lr * decay).sub_(
                self.ranks.own_part(whole_update, h), alpha=lr * size
            )


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Return a matrix ``[m, n]`` with the singular vectors of ``x`` ``[m, n]`` and with all singular values near one,
    by Newton-Schulz iterations.
    """
    import torch

    y = x.mT if x.size(0) > x.size(1) else x
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = y @ y.mT
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=B, alpha=C), y, beta=A)
    return y.mT if x.size(0) > x.size(1) else y
