"""ORPO: fine-tuning and the odds ratio of both answers in one loss, without a reference model (Hong et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.models.pair_loss import PairLoss
from weft.registry import register

if TYPE_CHECKING:
    import torch

    T = torch.Tensor


@register(
    "pair-loss",
    "orpo",
    title="ORPO: fine-tuning and the odds ratio of both answers at once, no reference",
    paper="Hong et al. 2024",
    recipe="preference.toml --set loss.kind=orpo",
    proof="tests/train/test_preference.py",
    figure="equal to 1e-10; plain PyTorch's loss and gradients by the paper's formula",
)
class ORPO(PairLoss):
    """The chosen answer's cross entropy plus the logistic loss of the log odds ratio of chosen to rejected answer (Hong
    et al. 2024).
    """

    averaged = True
    has_reference = False
    smooths = False

    def compared(self, chosen: T, rejected: T, margin: T) -> T:
        from torch.nn.functional import logsigmoid

        return -chosen - self.beta * logsigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(mean: T) -> T:
    """Return the log odds, ``log(p / (1 - p))``, of probabilities. ``mean``: the logarithms of the probabilities."""
    import torch

    return mean - torch.log(-torch.expm1(mean.clamp(max=-1e-12)))
