"""KTO: answers judged one by one, compared with how far the model has moved (Ethayarajh et al. 2024, 2402.01306)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveFloat

from weft.models.pair_loss import PairLoss
from weft.registry import register
from weft.section import Section

if TYPE_CHECKING:
    import torch

    from weft.data.batch import Pairs

    T = torch.Tensor


class KTOSettings(Section):
    """Recipe settings of KTO: the weights of good and of bad answers."""

    desirable: PositiveFloat = Field(
        1.0, description="Weight of answers marked as good in the loss."
    )
    undesirable: PositiveFloat = Field(
        1.0, description="Weight of answers marked as bad in the loss."
    )


@register(
    "pair-loss",
    "kto",
    settings=KTOSettings,
    title="KTO: answers judged one by one, compared with how far the model has moved",
    paper="Ethayarajh et al. 2024",
    recipe=(
        "preference.toml --set loss.kind=kto --set data.kind=feedback --set "
        "data.path=FILE"
    ),
    proof="tests/train/test_preference.py",
    figure=(
        "equal to 1e-10; the loss and gradients of plain PyTorch over a step of "
        "several passes"
    ),
)
class KTO(PairLoss):
    """The loss of single answers that are judged good or bad; the judged answer is the first of each pair (Ethayarajh
    et al. 2024).

    The log ratio of an answer is its log-probability minus that under the reference model. The loss depends on the log
    ratio minus a reference point, times ``beta``. The reference point is the mean log ratio of the pairs' second
    answers in a step, or 0 if that is negative. These second answers belong to other prompts. No gradient flows through
    the reference point.
    """

    smooths = False
    judged = True
    has_point = True

    def __call__(self, sums: T, lengths: T, pairs: Pairs) -> T:
        import torch

        own = self.settings.own(KTOSettings)
        ahead = (sums - torch.from_numpy(pairs.reference).to(sums))[:, 0] - self.point
        # 1 of a good answer, -1 of a bad one
        good = torch.from_numpy(pairs.margin).to(sums)
        weight = torch.where(good > 0, own.desirable, own.undesirable)
        return weight * (1 - torch.sigmoid(self.beta * good * ahead))
