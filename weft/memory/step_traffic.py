"""Units to update during backward, and units to update in the next forward, where their state rests in a file."""

from collections.abc import Sequence
from typing import NamedTuple


class Sizes(NamedTuple):
    """Sizes of the state of one unit (parameters that are updated together) in files, and when it may be updated.

    Attributes:
        ``weights``: bytes of its weights in files.
        ``gradients``: bytes of its gradients in files.
        ``moments``: bytes of its optimizer moments in files.
        ``learns``: whether it is trained.
        ``free``: whether it may be updated before the norm of all gradients is known.
    """

    weights: float
    gradients: float
    moments: float
    learns: bool
    free: bool


class StepTraffic(NamedTuple):
    """Bytes read from and written to files in one step.

    ``forward``: during the forward half of the step; ``backward``: during the backward half.
    """

    forward: float
    backward: float


def step_traffic(sizes: Sequence[Sizes], early: Sequence[bool]) -> StepTraffic:
    """Return the bytes that a step reads from and writes to files, in its forward and in its backward half.

    ``sizes``: sizes of each unit; ``early``: for each unit, whether it is updated during backward instead of in the
    next step's forward. Both halves read weights. Backward writes the gradients, and a later update reads them again.
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
    """Return a list that says for each unit whether it is updated early, that is, during backward.

    ``sizes``: sizes of each unit; ``waiting``: number of units that could be updated early but are updated later. These
    units are spread evenly over the units whose ``free`` is set. The first free unit is early, unless all of them wait.
    A unit that is not free is never early.
    """
    places = [i for i, unit in enumerate(sizes) if unit.free]
    wait = {places[(2 * i + 1) * len(places) // (2 * waiting)] for i in range(waiting)}
    return [unit.free and i not in wait for i, unit in enumerate(sizes)]


def choose_early(sizes: Sequence[Sizes], backward: float) -> list[bool]:
    """Return a list that says for each unit whether to update it early (during backward), to hide transfers best.

    ``sizes``: sizes of each unit; ``backward``: computing time of the backward half of a step, in multiples of the
    computing time of the forward half. For each half of the step there is a ratio of transfer time to computing time.
    The choice makes the larger of the two ratios as small as possible.
    """

    def longest(early: Sequence[bool]) -> float:
        traffic = step_traffic(sizes, early)
        return max(traffic.forward, traffic.backward / backward)

    most = sum(unit.free for unit in sizes)
    choices = [spread_waiting(sizes, waiting) for waiting in range(most + 1)]
    return min(choices, key=longest)
