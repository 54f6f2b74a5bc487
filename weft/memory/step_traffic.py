"""Units to update during backward, and units to update in the next forward, where their state rests in a file."""

from collections.abc import Sequence
from typing import NamedTuple


class Sizes(NamedTuple):
    """Bytes of a unit in files, whether it ``learns``, and whether it may be updated before the norm is known
    (``free``).
    """

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
    """Return the traffic of a step that updates units ``early``, during backward, or else in the next forward.

    Both halves read weights. Backward writes a gradient, and an update that has waited reads it again.
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
    """Choose ``waiting`` of the units that may be early to wait, at even distances. The first unit is early if
    any is.
    """
    places = [i for i, unit in enumerate(sizes) if unit.free]
    wait = {places[(2 * i + 1) * len(places) // (2 * waiting)] for i in range(waiting)}
    return [unit.free and i not in wait for i, unit in enumerate(sizes)]


def choose_early(sizes: Sequence[Sizes], backward: float) -> list[bool]:
    """Choose the units to update early so that transfers delay neither half of a step more than the other.

    ``backward``: the time that backward computes, in multiples of forward's.
    """

    def longest(early: Sequence[bool]) -> float:
        traffic = step_traffic(sizes, early)
        return max(traffic.forward, traffic.backward / backward)

    most = sum(unit.free for unit in sizes)
    choices = [spread_waiting(sizes, waiting) for waiting in range(most + 1)]
    return min(choices, key=longest)
