"""The optimizer: which rule updates which parameter, and the learning rate of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.registry import find
from weft.train.rules.rank_sums import RankSums

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.layout.parts import Part
    from weft.parallel.state import Held
    from weft.recipe import Optimizer
    from weft.train.rules.update_rule import UpdateRule


def slot_bytes(settings: Optimizer, width: int) -> float:
    """Return the estimated bytes of optimizer state per element of a parameter, without scales and other small tensors.

    ``width``: bytes of an element of the parameter itself. ``settings``: the recipe's section ``[optimizer]``.
    """
    return width * (settings.update_rule.kept + bool(settings.ema))


class Assignment(NamedTuple):
    """How a parameter is updated.

    ``rule``: its update rule. ``lr``: factor by which the learning rate is multiplied. ``decay``: its weight decay.
    """

    rule: UpdateRule
    lr: float
    decay: float


class RuleOptimizer:
    """Updates every parameter by the update rule that the recipe's ``settings`` choose for it.

    Weight decay applies to matrices only, unless a parameter group says otherwise. With ``optimizer.ema`` a moving
    average of each parameter is kept beside the rule's own state.
    """

    def __init__(self, settings: Optimizer, mesh: Mesh) -> None:
        self.settings, ranks = settings, RankSums(mesh)
        self.rule: UpdateRule = settings.update_rule(settings, ranks)
        self.rest = self.rule
        if self.rule.for_matrices:
            self.rest = find("optimizer", "adamw").implementation(settings, ranks)
        self.assigned: dict[str, Assignment] = {}  # by the parameter's name

    def assignment(self, held: Held) -> Assignment:
        """Return the update rule, the factor of the learning rate and the weight decay of the parameter ``held``.

        The parameter's shape decides the rule. The last group of ``optimizer.groups`` whose pattern matches the
        parameter's name decides factor and decay. The result is cached by name.
        """
        if held.name not in self.assigned:
            self.assigned[held.name] = self._assignment(held)
        return self.assigned[held.name]

    def _assignment(self, held: Held) -> Assignment:
        """Choose the rule by the parameter's shape, and rate and decay by the last group that matches its name."""
        matrix = len(held.logical.dims) > 1
        inner = matrix and all(dim.name != "vocab" for dim in held.logical.dims)
        # its directions are one's
        inner = inner and (self.rule.for_stacks or len(held.logical.dims) == 2)
        lr, decay = 1.0, self.settings.weight_decay if matrix else 0.0
        for group in self.settings.groups:
            if fnmatchcase(held.name, group.match):
                lr, decay = (
                    group.lr,
                    decay if group.weight_decay is None else group.weight_decay,
                )
        return Assignment(self.rule if inner else self.rest, lr, decay)

    def slots(self, held: Held) -> dict[str, Part]:
        slots = self.assignment(held).rule.slots(held)
        if self.settings.ema:
            slots["ema"] = held.part(held.local.clone())
        return slots

    @torch.no_grad()
    def __call__(
        self, held: Sequence[Held], grads: Sequence[torch.Tensor], lr: float
    ) -> None:
        alike: dict[Assignment, list[tuple[Held, torch.Tensor]]] = {}
        for h, g in zip(held, grads, strict=True):
            alike.setdefault(self.assignment(h), []).append((h, g))
        for (rule, multiple, decay), pairs in alike.items():
            rule.update(
                [h for h, _ in pairs], [g for _, g in pairs], lr * multiple, decay
            )
        if self.settings.ema:
            averages = [h.slots["ema"].values for h in held]
            torch._foreach_lerp_(
                averages, [h.local for h in held], 1 - self.settings.ema
            )


#: Steps of warm-up at most, where the recipe does not say how many.
LONGEST_WARMUP = 100


def warmup_steps(settings: Optimizer, steps: int) -> int:
    """Return the number of warm-up steps of a run of ``steps`` steps.

    It follows from ``optimizer.warmup``, a number of steps or a share of the run. If that is not set, it is a tenth
    of the steps, but at most 100. ``settings``: the recipe's section ``[optimizer]``.
    """
    if settings.warmup is None:
        return min(LONGEST_WARMUP, steps // 10)
    return (
        round(settings.warmup * steps)
        if isinstance(settings.warmup, float)
        else settings.warmup
    )


def learning_rate(settings: Optimizer, step: int, steps: int) -> float:
    """Return the learning rate of step ``step`` (from 0) of ``steps``: linear warm-up, then ``optimizer.schedule``.

    ``settings``: the recipe's section ``[optimizer]``.
    """
    warmup = warmup_steps(settings, steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    floor = settings.lr * settings.min_lr
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "cosine":
        done = (step - warmup) / max(1, steps - warmup)
        return floor + (settings.lr - floor) * 0.5 * (
            1 + math.cos(math.pi * min(1.0, done))
        )
    # Warm-up, stable, decay: in a short run decay is all that comes after warm-up, as it is of "linear" in any run.
    after = steps - warmup
    decay = max(
        1,
        after
        if settings.schedule == "linear"
        else min(settings.decay or steps // 5, after),
    )
    left = max(0.0, min(1.0, (steps - step) / decay))
    return floor + (settings.lr - floor) * left


def warmup_note(settings: Optimizer, steps: int) -> str:
    """Return a line for the user if the run of ``steps`` steps ends before its warm-up does, else an empty string.

    ``settings``: the recipe's section ``[optimizer]``.
    """
    warmup = warmup_steps(settings, steps)
    if warmup <= steps:
        return ""
    highest = learning_rate(settings, steps - 1, steps)
    return (
        f"optimizer.warmup = {warmup} steps is longer than the run, which has {steps}: the learning rate gets to "
        f"{highest:.2g} of {settings.lr:.2g}; set fewer steps, or a share of the run such as 0.1"
    )


#: Below it a share of the learning rate is as good as none, and is rather meant as a rate.
LEAST_SHARE = 1e-3


def floor_note(settings: Optimizer) -> str:
    """Return a line for the user if ``optimizer.min_lr`` looks like a learning rate, else an empty string.

    Megatron's ``min_lr`` is a rate, Weft's is a share of ``lr``. ``settings``: the recipe's section ``[optimizer]``.
    """
    share, lr = settings.min_lr, settings.lr
    if settings.schedule == "constant" or not 0 < share < min(lr, LEAST_SHARE):
        return ""
    return (
        f"optimizer.min_lr = {share:.3g} is a share of lr: the learning rate falls to {share * lr:.2g}; to end at a "
        f"rate of {share:.3g}, set it to {share / lr:.3g}"
    )


#: Settings that the learning rate of a step follows from.
RATE = ("lr", "schedule", "warmup", "decay", "min_lr")


def rate_jump(
    before: Optimizer, after: Optimizer, step: int, planned: int, steps: int
) -> str:
    """Return a line if the learning rate jumps by more than 1 % where a run is resumed, else an empty string.

    ``before`` and ``after``: the optimizer settings before and after ``step``, at which the run resumes. ``planned``:
    the total number of steps that was set before. ``steps``: the total number that is set now.
    """
    if step >= steps:
        return ""
    due, rate = learning_rate(before, step, planned), learning_rate(after, step, steps)
    if abs(due - rate) <= 0.01 * max(due, rate):
        return ""
    causes = [
        f"optimizer.{name}"
        for name in RATE
        if getattr(before, name) != getattr(after, name)
    ]
    causes += (
        [f"a run of {steps} steps instead of {planned}"] if steps != planned else []
    )
    since = (
        f"from {learning_rate(before, step - 1, planned):.3g} in step {step} "
        if step
        else ""
    )
    return (
        f"the learning rate jumps {since}to {rate:.3g} in step {step + 1}, where {due:.3g} was due, because of "
        f"{' and '.join(causes)}"
    )
