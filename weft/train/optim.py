"""AdamW over each rank's own part of the parameters, and the learning rate of a step."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from weft.parallel.build import LocalPart
from weft.recipe import Optimizer


def build_optimizer(parts: Sequence[LocalPart], settings: Optimizer) -> torch.optim.AdamW:
    """Fused AdamW on plain local tensors that share storage with the model's parameters.

    Weight decay applies to matrices only. Parameters appear in the order of ``parts``, matrices first.
    """
    storage = {p.name: nn.Parameter(p.local) for p in parts}
    matrices = [storage[p.name] for p in parts if len(p.logical.dims) > 1]
    vectors = [storage[p.name] for p in parts if len(p.logical.dims) == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True
    )
    for tensor in matrices + vectors:  # from the start, so that loading has somewhere to write
        moments = {"exp_avg": torch.zeros_like(tensor.data), "exp_avg_sq": torch.zeros_like(tensor.data)}
        optimizer.state[tensor] = {"step": torch.zeros((), device=tensor.device), **moments}
    return optimizer


def optimizer_order(parts: Sequence[LocalPart]) -> list[LocalPart]:
    """The parts in the order in which :func:`build_optimizer` stores them."""
    return [p for p in parts if len(p.logical.dims) > 1] + [p for p in parts if len(p.logical.dims) == 1]


def set_gradients(optimizer: torch.optim.Optimizer, grads: dict[str, torch.Tensor], parts: Sequence[LocalPart]) -> None:
    """Point the optimizer's tensors at this step's reduced local gradients."""
    stored = [p for group in optimizer.param_groups for p in group["params"]]
    for tensor, p in zip(stored, optimizer_order(parts), strict=True):
        tensor.grad = grads[p.name]


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
