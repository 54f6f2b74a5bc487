"""AdamW over what a rank holds of the parameters, and the learning rate of a step."""

import math
from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from weft.checkpoint.format import MOMENTS
from weft.parallel.state import Held
from weft.recipe import Optimizer


class AdamW:
    """The rule by which :meth:`weft.parallel.state.State.update` updates a unit: PyTorch's fused AdamW.

    Weight decay applies to matrices only.
    """

    def __init__(self, settings: Optimizer) -> None:
        self.settings = settings

    @torch.no_grad()
    def __call__(self, held: Sequence[Held], grads: Sequence[torch.Tensor], lr: float) -> None:
        settings, (beta1, beta2) = self.settings, self.settings.betas
        for decay, matrices in ((settings.weight_decay, True), (0.0, False)):
            chosen = [(h, g) for h, g in zip(held, grads, strict=True) if (len(h.logical.dims) > 1) is matrices]
            if chosen:
                averages, squares = ([h.slots[moment] for h, _ in chosen] for moment in MOMENTS)
                adamw(
                    [h.local for h, _ in chosen], [g for _, g in chosen], averages, squares, [],
                    [h.updates for h, _ in chosen], fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=lr,
                    weight_decay=decay, eps=settings.eps, maximize=False,
                )  # fmt: skip


def learning_rate(settings: Optimizer, step: int, steps: int) -> float:
    """Rate of step ``step`` (from 0) of ``steps``: linear warm-up, then cosine, constant, or stable and decay."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    floor = settings.lr * settings.min_lr
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "cosine":
        done = (step - settings.warmup) / max(1, steps - settings.warmup)
        return floor + (settings.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    decay = settings.decay or max(1, steps // 5)  # warm-up, stable, decay (Hu et al. 2024)
    left = max(0.0, min(1.0, (steps - step) / decay))
    return floor + (settings.lr - floor) * left
