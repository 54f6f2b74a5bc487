"""Robust DPO: unbiased under flipped labels (Chowdhury et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.models.pair_loss import PairLoss
from weft.registry import register

if TYPE_CHECKING:
    import torch

    T = torch.Tensor


@register(
    "pair-loss",
    "robust",
    title="Robust DPO: unbiased under flipped labels",
    paper="Chowdhury et al. 2024",
    recipe="preference.toml --set loss.kind=robust --set loss.label_smoothing=0.1",
    proof="tests/train/test_preference.py",
    figure="as DPO's",
)
class RobustDPO(PairLoss):
    """DPO whose expectation stays the same if labels are flipped at random; the loss may be negative (Chowdhury et al.
    2024).

    The share of flipped labels is ``loss.label_smoothing``.
    """

    def of(self, gap: T, margin: T) -> T:
        from torch.nn.functional import logsigmoid

        right, wrong = (logsigmoid(sign * self.beta * gap) for sign in (1, -1))
        smoothing = self.settings.label_smoothing
        return (smoothing * wrong - (1 - smoothing) * right) / (1 - 2 * smoothing)
