"""Splits layers into pipeline stages so that the slowest stage is as fast as possible."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from weft.errors import UsageError


class _Split(NamedTuple):
    """A split into shares: the longest time, the sum of the squared times, and the ``end`` of the first share."""

    longest: float
    squares: float
    end: int


def partition(
    costs: Sequence[float], parts: int, speeds: Sequence[float] | None = None
) -> list[range]:
    """Cut a sequence of items into ``parts`` contiguous, non-empty ranges so that the slowest is as fast as can be.

    Returns ranges of indices of ``costs``. Of equally good cuts, the most even one is chosen. ``costs``: work of each
    item, such as a layer; ``speeds``: work per unit of time of the device of each range; None: all devices are equally
    fast. Raises :class:`UsageError` for fewer items than ``parts``.
    """
    count = len(costs)
    if count < parts:
        raise UsageError(
            f"{count} layers (with embedding and head) cannot fill {parts} stages; use fewer stages"
        )
    speed = speeds or [1.0] * parts
    total = [0.0, *accumulate(costs)]
    limit = _least_largest(total, speed) * (1 + 1e-9) + 1e-9
    # speed of the parts from here on, together
    after = [*accumulate(reversed(speed), initial=0.0)][::-1]

    @cache
    def best(start: int, part: int) -> _Split:
        """Return the best split of ``costs[start:]`` over the parts from ``part`` on."""
        if part == parts - 1:
            time = (total[count] - total[start]) / speed[part]
            return _Split(time, time * time, count)
        best_split = _Split(float("inf"), float("inf"), start + 1)
        # No share takes longer than the limit, nor leaves more than the parts after it can do in that time.
        least = bisect_left(total, total[count] - limit * after[part + 1])
        for end in range(max(start + 1, least), count - (parts - part - 1) + 1):
            time = (total[end] - total[start]) / speed[part]
            if time > limit:
                break
            rest = best(end, part + 1)
            # Rounded, so that two sums of the same numbers in another order count as equal.
            longest = round(max(time, rest.longest), 9)
            squares = round(rest.squares + time * time, 9)
            best_split = min(best_split, _Split(longest, squares, end))
        return best_split

    cuts, at = [], 0
    for part in range(parts):
        end = best(at, part).end
        cuts.append(range(at, end))
        at = end
    return cuts


def _least_largest(total: Sequence[float], speed: Sequence[float]) -> float:
    """Return the time of the slowest share in the best split, by bisection; ``total``: sums of the first costs."""
    count, parts = len(total) - 1, len(speed)
    low, high = 0.0, total[-1] / min(speed)

    def enough(time: float) -> bool:
        at = 0
        for part in range(parts):
            reach = bisect_right(total, total[at] + time * speed[part]) - 1
            if reach == at:  # not even one item
                return False
            at = min(reach, count - (parts - part - 1))
        return at == count

    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
