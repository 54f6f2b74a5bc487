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
    """A pipeline schedule for any number of ranks and microbatches.

    ``about``: the schedule in a few words; ``paper``: its source, by arXiv's number where there is one. ``chunks``:
    stages that a rank holds for a microbatch; ``free``: whether the caller may choose their number. ``splits``:
    backward is divided into I (input gradient) and W (weight gradient), by some schedules only in part. ``twice``: two
    ranks hold a stage. ``falls``: each rank runs this many forwards less ahead of its backwards than the rank before,
    and holds less memory accordingly (the tapes of postponed weight gradients aside). ``place``: the planner's order
    of schedules, which decides between equals.
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
        """List the actions of every rank in their order, as ``(kind, stage, microbatch)``.

        ``times`` are for schedules that fill holes by the clock.
        """
        raise NotImplementedError

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        """Return the idle time of a rank in a step, in closed form.

        ``chunks``: stages per rank; ``times``: of a microbatch on a rank. For schedules that fill holes by the clock
        the result holds only for ``2 * ranks`` microbatches or more.
        """
        raise NotImplementedError

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        """Return how many microbatches' activations ``rank`` holds at once, where one counts all stages of the rank.

        Infinity stands for all microbatches of a step. ``chunks``: stages per rank.
        """
        raise NotImplementedError

    def offers(self, ranks: int, microbatches: int, layers: int) -> Sequence[int]:
        """List the numbers of chunks per rank with which the planner should consider this schedule; by default none.

        The planner asks only for pipelines of several ranks with at least ``ranks`` microbatches. ``layers``: layers of
        the model.
        """
        return ()


def larger(a: Number, b: Number) -> Number:
    """Return the larger of two numbers, or of two arrays entry by entry."""
    return (a + b + abs(a - b)) / 2


def ramp(ranks: Number, times: Times) -> Number:
    """Return the time to fill and drain a pipeline whose ranks have no other work meanwhile."""
    return (ranks - 1) * (times.forward + times.backward)


def filled(times: Times) -> Number:
    """Return the idle time per rank where other work fills a part of a microbatch's way to the next rank and back.

    Of that way's time, forward and backward, a weight gradient is filled, and the shorter of forward and weight
    gradient.
    """
    return times.backward_input + larger(times.forward - times.backward_weight, 0)


def held_back(
    ranks: Number, microbatches: Number, most: Number, times: Times
) -> Number:
    """Return the idle time of a rank that waits for its first gradient with at most ``most`` microbatches under way.

    Each microbatch but the first shortens the wait by the time of its forward. If its weight gradient takes less time,
    which then runs at the end, that time counts.
    """
    ahead = -larger(-microbatches, -most)
    shorter = times.forward - larger(times.forward - times.backward_weight, 0)
    return larger((ranks - 1) * filled(times) + (ranks - ahead) * shorter, 0)
