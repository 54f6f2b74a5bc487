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
        ``chunks``: stages that a rank holds for a microbatch.
        ``free``: whether the caller may choose another number of chunks.
        ``splits``: whether backward is split into I (input gradient) and W (weight gradient), wholly or in part.
        ``twice``: whether two ranks hold every stage.
        ``falls``: how many fewer microbatches' activations each rank holds than the rank before it. 1F1B has 1. Inputs
            of postponed weight gradients do not count.
        ``place``: position in the planner's order; of equally good schedules that with the lowest position is chosen.
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

        ``chunks``: stages per rank; ``times``: times of one microbatch on a rank, by which some schedules decide what
        fills idle times.
        """
        raise NotImplementedError

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        """Return the idle time of a rank in a step, in closed form and in the unit of ``times``.

        ``chunks``: stages per rank; ``times``: times of one microbatch on a rank. For schedules that simulate ``times``
        to fill idle times, the result holds only for ``2 * ranks`` microbatches or more.
        """
        raise NotImplementedError

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        """Return for how many microbatches ``rank`` holds activations at once; infinity stands for all of a step.

        A microbatch whose activations the rank holds for only one of its stages counts ``1 / chunks``, where ``chunks``
        is the number of stages per rank.
        """
        raise NotImplementedError

    def offers(self, ranks: int, microbatches: int, layers: int) -> Sequence[int]:
        """List the numbers of chunks (stages per rank) with which the planner should consider this schedule.

        By default there are none. The planner asks only for pipelines of several ranks with at least ``ranks``
        microbatches. ``layers``: layers of the model.
        """
        return ()


def larger(a: Number, b: Number) -> Number:
    """Return the larger of two numbers, or of two arrays entry by entry."""
    return (a + b + abs(a - b)) / 2


def ramp(ranks: Number, times: Times) -> Number:
    """Return the time to fill and drain a pipeline with idle ranks: ``(ranks - 1) * (forward + backward)``."""
    return (ranks - 1) * (times.forward + times.backward)


def filled(times: Times) -> Number:
    """Return by how much each rank after the first lengthens the bubble if backward is split and W is postponed.

    I is the gradient of a stage's input, W the gradient of its weights. Without a split each rank lengthens the bubble
    by ``forward + backward_input + backward_weight``. Postponed weight gradients fill a part of this time. What remains
    is ``backward_input + max(forward - backward_weight, 0)``, the result.
    """
    return times.backward_input + larger(times.forward - times.backward_weight, 0)


def held_back(
    ranks: Number, microbatches: Number, most: Number, times: Times
) -> Number:
    """Return the bubble of a zero-bubble schedule in which a rank holds at most ``most`` microbatches at once.

    The bubble is the idle time of a rank in a step. It is ``(ranks - 1) * filled(times)``, plus ``(ranks -
    min(microbatches, most)) * min(forward, backward_weight)``, but never below 0. The second term says that each
    further microbatch in flight gives a rank work while it waits for its first gradient.
    """
    ahead = -larger(-microbatches, -most)
    shorter = times.forward - larger(times.forward - times.backward_weight, 0)
    return larger((ranks - 1) * filled(times) + (ranks - ahead) * shorter, 0)
