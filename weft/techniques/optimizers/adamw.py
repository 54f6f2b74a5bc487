"""AdamW (Loshchilov & Hutter 2019), by PyTorch's fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.checkpoint.boxes import MOMENTS
from weft.registry import register
from weft.train.rules.update_rule import UpdateRule

if TYPE_CHECKING:
    import torch

    from weft.layout.parts import Part
    from weft.parallel.state import Held
    from weft.recipe import Optimizer
    from weft.train.rules.rank_sums import RankSums


@register("optimizer", "adamw", title="AdamW", paper="Loshchilov & Hutter 2019")
class AdamW(UpdateRule):
    """AdamW with moments in the precision of the state (Loshchilov & Hutter 2019). It also updates the parameters that
    other rules leave to it.
    """

    elementwise = True
    kept = 2.0

    def __init__(self, settings: Optimizer, ranks: RankSums) -> None:
        self.settings = settings

    def slots(self, held: Held) -> dict[str, Part]:
        from weft.train.rules.rank_sums import like

        return {moment: like(held) for moment in MOMENTS}

    def update(
        self,
        held: Sequence[Held],
        grads: Sequence[torch.Tensor],
        lr: float,
        decay: float,
    ) -> None:
        from weft.train.rules.rank_sums import count_update

        count_update([h for h in held if not h.local.numel()])
        chosen = [(h, g) for h, g in zip(held, grads, strict=True) if h.local.numel()]
        averages, squares = (
            [h.slots[moment].values for h, _ in chosen] for moment in MOMENTS
        )
        self.step(
            [h for h, _ in chosen], [g for _, g in chosen], averages, squares, lr, decay
        )

    def step(
        self,
        held: Sequence[Held],
        grads: Sequence[torch.Tensor],
        averages: list[torch.Tensor],
        squares: list[torch.Tensor],
        lr: float,
        decay: float,
    ) -> None:
        """Apply AdamW once in place to the shards of parameters ``held``, with their gradients ``grads``. ``averages``,
        ``squares``: the parameters' first and second moments, changed in place. ``lr``: learning rate; ``decay``:
        decoupled weight decay, which is multiplied by ``lr``. All sequences have one entry for each parameter.
        """
        from torch.optim.adamw import adamw

        if not held:
            return
        beta1, beta2 = self.settings.betas
        adamw(
            [h.local for h in held],
            list(grads),
            averages,
            squares,
            [],
            [h.updates for h in held],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=decay,
            eps=self.settings.eps,
            maximize=False,
        )
