"""Islands simulated in one process, one after the other: the reference for methods of synchronisation.

Written apart from what islands do (:mod:`weft.sync.methods`, :mod:`weft.train.islands`): parameter by parameter, with
the parameters of all islands at hand, and no messages.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch

from weft.parallel.state import State
from weft.recipe import Sync

T = torch.Tensor

#: Maps (number of an exchange, island) to the islands that this one agrees with in it, itself included.
Members = Callable[[int, int], Collection[int]]


class One(NamedTuple):
    """A parameter on one island: its values ``now``, and by slot what it ``kept`` from round to round."""

    now: T
    kept: dict[str, T]


class Round(NamedTuple):
    """An exchange of one parameter among islands.

    ``ones``: the parameter on every island, by the island's number. ``step`` counts from when rounds of this parameter
    begin, ``offset`` steps after the first. ``past``: a list in which rules keep what they need later. ``near(i)``: the
    islands that island ``i`` agrees with, itself included.
    """

    ones: dict[int, One]
    step: int
    offset: int
    how: Sync
    past: list[Any]
    near: Callable[[int], Collection[int]]

    @property
    def is_due(self) -> bool:
        return self.step % self.how.every == 0 and self.step + self.offset > 0

    def differences(self) -> dict[int, T]:
        return {i: one.kept["anchor"] - one.now for i, one in self.ones.items()}

    def mean(self, values: Mapping[int, T]) -> T:
        """The mean over all that take part, who are the same for all."""
        return torch.stack([values[i] for i in sorted(self.near(min(self.ones)))]).mean(
            0
        )


@torch.no_grad()
def agree(
    states: Mapping[int, State],
    step: int,
    how: Sync,
    past: dict[str, Any],
    members: Members | None = None,
) -> None:
    """Change these states, by island, as islands do after ``step`` (from 1).

    ``past`` is a dictionary to pass to every call, for what rules need later. ``members``: who takes part, where
    islands come and go; else all always do.
    """
    for held in zip(*(state.learning for state in states.values()), strict=True):
        ones = {
            i: One(h.local, {k: s.values for k, s in h.slots.items()})
            for i, h in zip(states, held, strict=True)
        }
        name = held[0].name
        block = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0
        fragment = block % how.fragments
        offset = how.every * fragment // how.fragments
        number = (step - offset) // how.every * how.fragments + fragment

        def near(i: int, number: int = number) -> Collection[int]:
            return (
                members(number, i) if members else partners(i, len(states), how, number)
            )

        RULES[how.update](
            Round(ones, step - offset, offset, how, past.setdefault(name, []), near)
        )
    for state in states.values():
        state.release()


def partners(i: int, count: int, how: Sync, number: int) -> Collection[int]:
    """The islands that island ``i`` of ``count`` agrees with in exchange ``number``, itself included; all are there."""
    if how.partner == "ring":
        return {(i - 1) % count, i, (i + 1) % count}
    if how.partner == "graph":
        return {
            i,
            *(j for j in range(count) if (i, j) in how.graph or (j, i) in how.graph),
        }
    if how.partner == "all" and how.update != "noloco":
        return range(count)
    order = torch.randperm(
        count, generator=torch.Generator().manual_seed(number)
    ).tolist()
    return next(
        {*order[k : k + 2]} for k in range(0, count, 2) if i in order[k : k + 2]
    )


def step_anchor(one: One, gradient: T, how: Sync) -> None:
    """Move the anchor of a parameter along ``gradient``, by PyTorch's own SGD."""
    optimizer = torch.optim.SGD(
        [one.kept["anchor"].clone()], how.lr, how.momentum, nesterov=how.momentum > 0
    )
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = gradient
    optimizer.state[parameter]["momentum_buffer"] = one.kept["outer"].clone()
    optimizer.step()
    one.kept["anchor"].copy_(parameter)
    # Without momentum PyTorch keeps no buffer, and ours has the last gradient, which nobody reads.
    one.kept["outer"].copy_(
        optimizer.state[parameter]["momentum_buffer"] if how.momentum else gradient
    )


def average(at: Round) -> None:
    if at.is_due:
        before = {i: one.now.clone() for i, one in at.ones.items()}
        for i, one in at.ones.items():
            if at.how.partner == "graph":
                one.now.add_(
                    sum(
                        weight(i, j, at.how) * (before[j] - before[i])
                        for j in at.near(i)
                    )
                )
            else:
                one.now.copy_(
                    torch.stack([before[j] for j in sorted(at.near(i))]).mean(0)
                )
            if at.how.partner == "all":
                one.kept["anchor"].copy_(one.now)


def weight(i: int, j: int, how: Sync) -> float:
    """The weight of island ``j`` in the average of island ``i`` (Metropolis): one over the larger degree plus one."""
    return 1 / max(
        sum(1 for edge in {frozenset(edge) for edge in how.graph} if one in edge) + 1
        for one in (i, j)
    )


def nesterov(at: Round) -> None:
    if at.is_due:
        mean = at.mean(at.differences())
        for one in at.ones.values():
            step_anchor(one, mean, at.how)
            one.now.copy_(one.kept["anchor"])


def streaming(at: Round) -> None:
    if at.is_due:
        at.past.append((at.step + at.how.delay, at.mean(at.differences())))
    if at.past and at.past[0][0] == at.step:
        _, mean = at.past.pop(0)
        for one in at.ones.values():
            step_anchor(one, mean, at.how)
            one.now.copy_(at.how.mix * one.now + (1 - at.how.mix) * one.kept["anchor"])


def eager(at: Round) -> None:
    if at.is_due:
        now = at.differences()
        mean, count = (
            at.past.pop()
            if at.past
            else (torch.zeros_like(next(iter(now.values()))), len(at.ones))
        )
        at.past.append((at.mean(now), len(at.near(min(at.ones)))))
        # the own difference of now in the place of the last
        for i, one in at.ones.items():
            step_anchor(one, mean + (now[i] - one.kept["own"]) / count, at.how)
            one.now.copy_(one.kept["anchor"])
            one.kept["own"].copy_(now[i])


def co2(at: Round) -> None:
    how = at.how
    if at.is_due:
        mean = at.mean(at.differences())
        late = at.past.pop() if at.past else torch.zeros_like(mean)
        at.past.append(mean)
        for one in at.ones.values():
            momentum = (how.momentum * one.kept["outer"] + late / how.penalty).clip(
                -how.clip, how.clip
            )
            one.kept["outer"].copy_(momentum)
            one.kept["anchor"].copy_(one.kept["anchor"] - how.lr * momentum)
            one.now.copy_(one.kept["anchor"])


def noloco(at: Round) -> None:
    how = at.how
    if at.is_due:
        learned = {i: -one for i, one in at.differences().items()}
        anchors = {i: one.kept["anchor"].clone() for i, one in at.ones.items()}
        for i, one in at.ones.items():
            pair = sorted(at.near(i))
            mean, middle = (
                torch.stack([of[j] for j in pair]).mean(0) for of in (learned, anchors)
            )
            moved = (
                how.momentum * one.kept["outer"]
                + how.lr * mean
                + how.lr * (middle - anchors[i])
            )
            one.kept["outer"].copy_(moved)
            one.kept["anchor"].copy_(anchors[i] + moved)
            one.now.copy_(one.kept["anchor"])


RULES: dict[str, Callable[[Round], None]] = {
    "average": average, "nesterov": nesterov, "streaming": streaming, "eager": eager, "co2": co2, "noloco": noloco,
}  # fmt: skip
