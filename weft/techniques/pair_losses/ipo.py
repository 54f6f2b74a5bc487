"""IPO, with means over an answer's tokens as in its authors' program (Azar et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.models.pair_loss import PairLoss
from weft.registry import register

if TYPE_CHECKING:
    import torch

    T = torch.Tensor


@register(
    "pair-loss",
    "ipo",
    title="IPO, of averages over tokens",
    paper="Azar et al. 2023",
    recipe="preference.toml --set loss.kind=ipo",
    proof="tests/train/test_preference.py",
    figure="as DPO's",
)
class IPO(PairLoss):
    """The squared difference between a target, which ``beta`` sets, and the difference of the two answers' log ratios.

    A log ratio compares an answer's mean log-probability with that by the reference model.
    """

    averaged = True
    smooths = False

    def of(self, gap: T, margin: T) -> T:
        return (gap - 1 / (2 * self.beta)).square()
