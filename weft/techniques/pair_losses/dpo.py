"""DPO, which is conservative DPO with label smoothing (Rafailov et al. 2023; Mitchell 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.models.pair_loss import PairLoss
from weft.registry import register

if TYPE_CHECKING:
    import torch

    T = torch.Tensor


@register(
    "pair-loss",
    "dpo",
    title="DPO, with label smoothing conservative DPO",
    paper="Rafailov et al. 2023; Mitchell 2023",
    recipe="preference.toml",
    proof="tests/train/test_preference.py",
    figure=(
        "equal to 1e-10; TRL 1.16's losses and gradients on recorded batches to 1e-6;"
        " the reference computed once"
    ),
)
class DPO(PairLoss):
    """The logistic loss of the difference between the rewards of the chosen and the rejected answer (Rafailov et al.
    2023; Mitchell 2023).

    The reward of an answer is ``beta`` times a difference: the answer's log-probability under the model minus its
    log-probability under the reference model.
    """

    def of(self, gap: T, margin: T) -> T:
        return self.smoothed(self.beta * gap)
