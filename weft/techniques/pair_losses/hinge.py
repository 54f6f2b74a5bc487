"""Hinge loss on log-probabilities (SLiC, Zhao et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.models.pair_loss import PairLoss
from weft.registry import register

if TYPE_CHECKING:
    import torch

    T = torch.Tensor


@register(
    "pair-loss",
    "hinge",
    title="Hinge loss on log-probabilities",
    paper="Zhao et al. 2023 (SLiC)",
    recipe="preference.toml --set loss.kind=hinge",
    proof="tests/train/test_preference.py",
    figure="as DPO's",
)
class Hinge(PairLoss):
    """The hinge loss of the difference between the rewards of the chosen and the rejected answer (SLiC, Zhao et al.
    2023).

    The loss is 0 where the chosen answer's reward is larger by at least 1. The reward of an answer is ``beta`` times a
    difference: the answer's log-probability under the model minus its log-probability under the reference model.
    """

    smooths = False

    def of(self, gap: T, margin: T) -> T:
        from torch.nn.functional import relu

        return relu(1 - self.beta * gap)
