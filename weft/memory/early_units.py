"""Which units to update during backward and which in the next forward, where their state rests in a file."""

from collections.abc import Sequence
from typing import NamedTuple


class Sizes(NamedTuple):
    """Bytes of what a unit has in files, whether it learns, and whether it may be updated before the norm is known."""

    weights: float
    gradients: float
    moments: float
    learns: bool
    free: bool


class StepTraffic(NamedTuple):
    """Bytes that are read and written in the two halves of a step."""

    forward: float
    backward: float


def step_traffic(sizes: Sequence[Sizes], early: Sequence[bool]) -> StepTraffic:
    """What a step moves if these units are updated ``early``, that is during backward.

    Weights come for each half. A gradient leaves in backward, and comes back for an update that has waited.
    """
    forward = backward = 0.0
    for unit, now in zip(sizes, early, strict=True):
        changed = unit.weights + unit.moments
        forward += unit.weights
        backward += unit.weights + unit.gradients
        if now:
            backward += unit.moments + changed
        elif unit.learns:
            forward += unit.gradients + unit.moments + changed
    return StepTraffic(forward, backward)


def spread_waiting(sizes: Sequence[Sizes], waiting: int) -> list[bool]:
    """``waiting`` units of those that may be early wait, at even distances; the first one is early if any is."""
    places = [i for i, unit in enumerate(sizes) if unit.free]
    wait = {places[(2 * i + 1) * len(places) // (2 * waiting)] for i in range(waiting)}
    return [unit.free and i not in wait for i, unit in enumerate(sizes)]


def choose_early(sizes: Sequence[Sizes], backward: float) -> list[bool]:
    """Which units to update early so that transfers hold up the computing of neither half more than the other's.

    ``backward``: how many times as long as forward it computes.
    """
    candidates = [
        spread_waiting(sizes, waiting)
        for waiting in range(sum(unit.free for unit in sizes) + 1)
    ]

    def longest(early: Sequence[bool]) -> float:
        traffic = step_traffic(sizes, early)
        return max(traffic.forward, traffic.backward / backward)

    return min(candidates, key=longest)
