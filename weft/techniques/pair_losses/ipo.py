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
    """The squared difference between the gap of the two answers and a target for this gap, ``1 / (2 beta)`` (Azar et
    al. 2023).

    The gap is the value of the chosen answer minus the value of the rejected answer. The value of an answer is its mean
    log-probability per token under the model minus that under the reference model.
    """

    averaged = True
    smooths = False

    def of(self, gap: T, margin: T) -> T:
        return (gap - 1 / (2 * self.beta)).square()
