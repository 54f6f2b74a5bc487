"""Reward models: a scalar head scores answers (Bradley & Terry 1952; Ouyang et al. 2022)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.models.pair_loss import PairLoss
from weft.registry import register

if TYPE_CHECKING:
    import torch

    T = torch.Tensor


@register(
    "pair-loss",
    "reward",
    title="Reward models",
    paper="Bradley & Terry 1952; Ouyang et al. 2022",
    recipe="preference.toml --set loss.kind=reward",
    proof="tests/train/test_preference.py",
    figure="as DPO's; transformers' scores of the export equal ours",
)
class Reward(PairLoss):
    """The logistic loss of a reward model, on the difference of the scores of two answers (Bradley & Terry 1952; Ouyang
    et al. 2022).

    The difference is the chosen answer's score minus the rejected answer's score, minus a margin. The margin is
    ``loss.margin`` plus the margin that the data gives the pair.
    """

    has_reference = False
    scores = True
    has_margin = True

    def of(self, gap: T, margin: T) -> T:
        return self.smoothed(gap - margin)
