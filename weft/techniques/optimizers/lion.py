"""Lion: the sign of an average of gradients (Chen et al. 2023, "Symbolic discovery of optimization algorithms")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.registry import register
from weft.train.rules.update_rule import UpdateRule

if TYPE_CHECKING:
    import torch

    from weft.layout.parts import Part
    from weft.parallel.state import Held
    from weft.recipe import Optimizer
    from weft.train.rules.rank_sums import RankSums


@register(
    "optimizer",
    "lion",
    title="Lion",
    paper="Chen et al. 2023",
    recipe="optimizers.toml --set optimizer.kind=lion",
    proof="tests/techniques/test_optimizers.py",
    figure=(
        "4 bytes per parameter; loss 2.464 where AdamW has 2.292 on a small model, "
        "each at the better of two rates (`bench/optimizers.py`)"
    ),
)
class Lion(UpdateRule):
    """Updates parameters by the sign of an average of the gradient and the momentum (Chen et al. 2023)."""

    elementwise = True
    kept = 1.0

    def __init__(self, settings: Optimizer, ranks: RankSums) -> None:
        self.betas = settings.betas

    def slots(self, held: Held) -> dict[str, Part]:
        from weft.train.rules.rank_sums import like

        return {"momentum": like(held)}

    def update(
        self,
        held: Sequence[Held],
        grads: Sequence[torch.Tensor],
        lr: float,
        decay: float,
    ) -> None:
        from weft.train.rules.rank_sums import count_update

        near, far = self.betas
        count_update(held)
        for h, g in zip(held, grads, strict=True):
            momentum = h.slots["momentum"].values
            direction = momentum.lerp(g, 1 - near).sign_()
            h.local.mul_(1 - lr * decay).add_(direction, alpha=-lr)
            momentum.lerp_(g, 1 - far)
