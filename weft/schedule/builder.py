"""The interface of pipeline schedules: the order of every rank, and closed forms for the planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from weft.schedule.actions import Order
    from weft.schedule.times import Times

#: A number, or an array of them: closed forms take both, so that a planner asks for thousands of layouts at once.
Number = Any


class ScheduleBuilder:
    """Base class of pipeline schedules, each for any number of ranks and microbatches.

    Attributes:
        ``about``: the schedule in a few words.
        ``paper``: source of the schedule, as arXiv number where it has one.
        ``chunks``: number of stages that a rank runs for each microbatch.
        ``free``: whether the caller may choose another number of chunks.
        ``splits``: whether backward is split into I (input gradient) and W (weight gradient), for all microbatches or
            some.
        ``twice``: whether every stage is held by two ranks.
        ``falls``: difference between a rank and the rank before it: for how many fewer microbatches the rank holds
            activations at once. It is 1 for 1F1B. Inputs of postponed weight gradients do not count.
        ``place``: position in the planner's order. Of equally good schedules the planner chooses the one with the
            lowest position.
    """

    about: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    chunks: ClassVar[int] = 1
    free: ClassVar[bool] = False
    splits: ClassVar[bool] = False
    twice: ClassVar[bool] = False
    falls: ClassVar[int] = 0
    place: ClassVar[int] = 100

    def orders(
        self, ranks: int, microbatches: int, chunks: int, times: Times
    ) -> Sequence[Order]:
        """List each rank's actions in order, as ``(kind, stage, microbatch)``.

        ``chunks``: stages per rank; ``times``: times of one microbatch on a rank, by which some schedules decide
        what fills idle times. ``ranks``, ``microbatches``: numbers of ranks, and of microbatches in a step.
        """
        raise NotImplementedError

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        """Return the idle time of a rank in a step by a formula, without a simulation.

        The result is in the unit of ``times``. ``microbatches``: their number in a step; ``chunks``: stages per rank;
        ``times``: times of one microbatch on a rank. Some schedules fill idle times by simulating ``times`` when they
        are built. For these the formula holds only from ``2 * ranks`` microbatches on.
        """
        raise NotImplementedError

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        """Return how many microbatches' activations ``rank`` holds at the same time at most.

        Infinity stands for the activations of all microbatches of a step. The activations of one microbatch at one of
        the rank's ``chunks`` stages count ``1 / chunks``. ``ranks``: number of ranks in the pipeline; ``chunks``:
        number of stages per rank.
        """
        raise NotImplementedError

    def offers(self, ranks: int, microbatches: int, layers: int) -> Sequence[int]:
        """List the numbers of stages per rank (chunks) with which the planner should try this schedule.

        By default the list is empty, and the planner leaves the schedule out. The planner calls this method only if
        ``ranks`` is at least 2 and ``microbatches`` is at least ``ranks``. ``layers``: number of layers of the model.
        """
        return ()


def larger(a: Number, b: Number) -> Number:
    """Return the larger of the numbers ``a`` and ``b``, or of two arrays entry by entry."""
    return (a + b + abs(a - b)) / 2


def ramp(ranks: Number, times: Times) -> Number:
    """Return the time to fill and drain a pipeline with idle ranks: ``(ranks - 1) * (forward + backward)``.

    ``times``: times of one microbatch on a rank.
    """
    return (ranks - 1) * (times.forward + times.backward)


def filled(times: Times) -> Number:
    """Return by how much each rank after the first lengthens the bubble if weight gradients are postponed.

    The bubble is the idle time of a rank in a step. If backward is not split, each rank after the first lengthens it by
    the time of a whole forward and backward: ``forward + backward_input + backward_weight``. Here backward is split,
    and weight gradients are postponed, so that they fill times that would be idle. What remains for each rank is
    ``backward_input + max(forward - backward_weight, 0)``. This is the result.

    ``times``: times of one microbatch on a rank.
    """
    return times.backward_input + larger(times.forward - times.backward_weight, 0)


def held_back(
    ranks: Number, microbatches: Number, most: Number, times: Times
) -> Number:
    """Return the bubble of a zero-bubble schedule in which a rank holds at most ``most`` microbatches at once.

    The bubble is the idle time of a rank in a step. It is ``(ranks - 1) * filled(times) + (ranks - min(microbatches,
    most)) * min(forward, backward_weight)``, or 0 if this sum is negative. The second term becomes smaller with every
    further microbatch that a rank may hold, because that microbatch gives the rank work while it waits for its first
    gradient.

    ``microbatches``: their number in a step; ``times``: times of one microbatch on a rank.
    """
    ahead = -larger(-microbatches, -most)
    shorter = times.forward - larger(times.forward - times.backward_weight, 0)
    return larger((ranks - 1) * filled(times) + (ranks - ahead) * shorter, 0)
