"""Units to update during backward, and units to update in the next forward, where their state rests in a file."""

from collections.abc import Sequence
from typing import NamedTuple


class Sizes(NamedTuple):
    """Bytes that the state of one unit (parameters that are updated together) takes in files, and when it may be
    updated.

    Tensors that are not in a file count 0.

    Attributes:
        ``weights``: bytes of its weights.
        ``gradients``: bytes of its gradients.
        ``moments``: bytes of its optimizer moments.
        ``learns``: whether it is trained.
        ``free``: whether it may be updated before the norm of all gradients is known, and so during backward.
    """

    weights: float
    gradients: float
    moments: float
    learns: bool
    free: bool


class StepTraffic(NamedTuple):
    """Bytes read from and written to files in one step.

    ``forward``: bytes moved during the forward half of the step; ``backward``: bytes moved during the backward half.
    """

    forward: float
    backward: float


def step_traffic(sizes: Sequence[Sizes], early: Sequence[bool]) -> StepTraffic:
    """Return the bytes that a step reads from and writes to files: those of its forward half, and those of its backward
    half.

    ``sizes``: sizes of each unit (parameters that are updated together). ``early``: for each unit, whether it is
    updated during backward; a trained unit that is not early is updated in the next step's forward. Both halves read
    all weights. Backward writes the gradients. An update in the forward half reads them again. Each update reads and
    writes the moments, and writes the weights.
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
    """Return for each unit (parameters that are updated together) whether it is updated early, during backward.

    ``sizes``: sizes of each unit. A unit whose ``free`` is not set is never early. Of the free units, ``waiting`` are
    not early either, and these are spread evenly among the free ones. The first free unit is early, unless all free
    units wait.
    """
    places = [i for i, unit in enumerate(sizes) if unit.free]
    wait = {places[(2 * i + 1) * len(places) // (2 * waiting)] for i in range(waiting)}
    return [unit.free and i not in wait for i, unit in enumerate(sizes)]


def choose_early(sizes: Sequence[Sizes], backward: float) -> list[bool]:
    """Choose for each unit (parameters that are updated together) whether it is updated early, during backward.
    Otherwise it is updated in the next step's forward. Return a list with True for each early unit.

    The state of units is in files, and an update reads and writes it. The choice spreads these transfers over the two
    halves of a step, so that computing hides them best: the larger of the two halves' ratios of bytes to computing time
    becomes as small as possible. ``sizes``: sizes of each unit. ``backward``: computing time of the backward half, in
    multiples of that of the forward half.
    """

    def longest(early: Sequence[bool]) -> float:
        traffic = step_traffic(sizes, early)
        return max(traffic.forward, traffic.backward / backward)

    most = sum(unit.free for unit in sizes)
    choices = [spread_waiting(sizes, waiting) for waiting in range(most + 1)]
    return min(choices, key=longest)
