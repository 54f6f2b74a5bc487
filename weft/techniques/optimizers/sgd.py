"""Stochastic gradient descent, without momentum or any other state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.registry import register
from weft.train.rules.update_rule import UpdateRule

if TYPE_CHECKING:
    import torch

    from weft.parallel.state import Held
    from weft.recipe import Optimizer
    from weft.train.rules.rank_sums import RankSums


@register("optimizer", "sgd", title="Stochastic gradient descent")
class SGD(UpdateRule):
    """Stochastic gradient descent: subtracts the gradient times the learning rate, without momentum."""

    elementwise = True
    stays = True

    def __init__(self, settings: Optimizer, ranks: RankSums) -> None:
        pass

    def update(
        self,
        held: Sequence[Held],
        grads: Sequence[torch.Tensor],
        lr: float,
        decay: float,
    ) -> None:
        from weft.train.rules.rank_sums import count_update

        count_update(held)
        for h, g in zip(held, grads, strict=True):
            h.local.mul_(1 - lr * decay).sub_(g, alpha=lr)
