"""Units to update during backward, and units to update in the next forward, where their state rests in a file."""

from collections.abc import Sequence
from typing import NamedTuple


class Sizes(NamedTuple):
    """Bytes of a unit's weights, gradients and moments in files, and when the unit may be updated.

    ``learns``: whether it is trained; ``free``: whether it may be updated before the norm of all gradients is known.
    """

    weights: float
    gradients: float
    moments: float
    learns: bool
    free: bool


class StepTraffic(NamedTuple):
    """Bytes that are read from and written to files during the forward and during the backward half of a step."""

    forward: float
    backward: float


def step_traffic(sizes: Sequence[Sizes], early: Sequence[bool]) -> StepTraffic:
    """Return the traffic of a step, given for each unit whether it is updated ``early``.

    An early unit is updated during backward, any other in the next step's forward. Both halves read weights. Backward
    writes the gradients, and a later update reads them again.
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
    """Return for each unit whether it is updated early (during backward) if ``waiting`` of the ``free`` units are not.

    The waiting units are at even distances. The first free unit is early, unless all wait.
    """
    places = [i for i, unit in enumerate(sizes) if unit.free]
    wait = {places[(2 * i + 1) * len(places) // (2 * waiting)] for i in range(waiting)}
    return [unit.free and i not in wait for i, unit in enumerate(sizes)]


def choose_early(sizes: Sequence[Sizes], backward: float) -> list[bool]:
    """Return for each unit whether to update it early, during backward.

    The choice minimises the time of transfers, relative to that of computation, in the half of a step where it is
    longer. ``backward``: the time that the backward half computes, in multiples of the forward half's.
    """

    def longest(early: Sequence[bool]) -> float:
        traffic = step_traffic(sizes, early)
        return max(traffic.forward, traffic.backward / backward)

    most = sum(unit.free for unit in sizes)
    choices = [spread_waiting(sizes, waiting) for waiting in range(most + 1)]
    return min(choices, key=longest)
