"""SimPO: mean log-probabilities over tokens, a margin, and no reference model (Meng et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.models.pair_loss import PairLoss
from weft.registry import register

if TYPE_CHECKING:
    import torch

    T = torch.Tensor


@register(
    "pair-loss",
    "simpo",
    title="SimPO: no reference",
    paper="Meng et al. 2024",
    recipe="preference.toml --set loss.kind=simpo --set loss.beta=2",
    proof="tests/train/test_preference.py",
    figure="as DPO's",
)
class SimPO(PairLoss):
    """The logistic loss of the difference of the answers' mean log-probabilities, times ``beta``, minus a margin (Meng
    et al. 2024).

    The difference is that of the chosen minus the rejected answer. The margin is ``loss.margin`` plus the margin that
    the data gives the pair. No reference model is used.
    """

    averaged = True
    has_reference = False
    has_margin = True

    def of(self, gap: T, margin: T) -> T:
        return self.smoothed(self.beta * gap - margin)
