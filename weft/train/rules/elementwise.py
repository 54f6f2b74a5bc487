"""Elementwise update rules: AdamW, SGD and Lion."""

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from weft.checkpoint.format import MOMENTS
from weft.layout.parts import Part
from weft.parallel.state import Held
from weft.recipe import Optimizer
from weft.train.rules.rule import count_update, like

T = torch.Tensor


class AdamW:
    """AdamW (Loshchilov & Hutter 2019), by PyTorch's fused kernel."""

    def __init__(self, settings: Optimizer) -> None:
        self.settings = settings

    def slots(self, held: Held) -> dict[str, Part]:
        return {moment: like(held) for moment in MOMENTS}

    def update(
        self, held: Sequence[Held], grads: Sequence[T], lr: float, decay: float
    ) -> None:
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
        grads: Sequence[T],
        averages: list[T],
        squares: list[T],
        lr: float,
        decay: float,
    ) -> None:
        """The update with these moments, which it changes."""
        if held:
            beta1, beta2 = self.settings.betas
            adamw(
                [h.local for h in held], list(grads), averages, squares, [], [h.updates for h in held], fused=True,
                amsgrad=False, beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=self.settings.eps,
                maximize=False,
            )  # fmt: skip


class SGD:
    """A step along the gradient, with nothing kept."""

    def slots(self, held: Held) -> dict[str, Part]:
        return {}

    def update(
        self, held: Sequence[Held], grads: Sequence[T], lr: float, decay: float
    ) -> None:
        count_update(held)
        for h, g in zip(held, grads, strict=True):
            h.local.mul_(1 - lr * decay).sub_(g, alpha=lr)


class Lion:
    """The sign of an average of gradients (Chen et al. 2023, "Symbolic discovery of optimization algorithms")."""

    def __init__(self, settings: Optimizer) -> None:
        self.betas = settings.betas

    def slots(self, held: Held) -> dict[str, Part]:
        return {"momentum": like(held)}

    def update(
        self, held: Sequence[Held], grads: Sequence[T], lr: float, decay: float
    ) -> None:
        near, far = self.betas
        count_update(held)
        for h, g in zip(held, grads, strict=True):
            momentum = h.slots["momentum"].values
            h.local.mul_(1 - lr * decay).add_(
                momentum.lerp(g, 1 - near).sign_(), alpha=-lr
            )
            momentum.lerp_(g, 1 - far)
