"""Sets of integers as lists of ranges, which are short where most integers are neighbours."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

#: Pairs of the first integer of a range, and the first one behind it.
Ranges = Sequence[Sequence[int]]


def as_ranges(integers: Collection[int]) -> list[list[int]]:
    """Return ``integers`` as a sorted list of ranges ``[first, end]``, in which ``end`` is excluded."""
    if not integers:
        return []
    listed = np.sort(np.fromiter(integers, np.int64, len(integers)))
    breaks = np.flatnonzero(np.diff(listed) != 1)
    firsts = listed[np.concatenate([[0], breaks + 1])]
    ends = listed[np.concatenate([breaks, [len(listed) - 1]])] + 1
    return [[int(a), int(b)] for a, b in zip(firsts, ends, strict=True)]


def of_ranges(ranges: Ranges) -> Iterator[int]:
    """Yield the integers in ``ranges``, pairs ``[first, end]`` in which ``end`` is excluded, in order."""
    for first, end in ranges:
        yield from range(first, end)
