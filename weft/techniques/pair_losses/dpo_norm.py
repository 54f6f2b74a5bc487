"""Length-normalised DPO (Rafailov et al. 2024, "r to Q*")."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.models.pair_loss import PairLoss
from weft.registry import register

if TYPE_CHECKING:
    import torch

    T = torch.Tensor


@register(
    "pair-loss",
    "dpo-norm",
    title="Length-normalised DPO",
    paper="Rafailov et al. 2024 (r to Q*)",
    recipe="preference.toml --set loss.kind=dpo-norm",
    proof="tests/train/test_preference.py",
    figure="as DPO's",
)
class NormalisedDPO(PairLoss):
    """DPO on log-probabilities that are averaged over an answer's tokens instead of summed (Rafailov et al. 2024)."""

    averaged = True

    def of(self, gap: T, margin: T) -> T:
        return self.smoothed(self.beta * gap)
