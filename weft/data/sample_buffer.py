"""The interface of a buffer of samples, which decides what is drawn for training and what leaves for a new sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

#: Keys of the random numbers of a buffer, beside its seed: those of draws and those of evictions.
DRAWS, EVICTIONS = 1, 2


class DrawnPlace(NamedTuple):
    """A sample that a buffer has drawn: its number ``place``, and whether it ``leaves`` the buffer by being drawn."""

    place: int
    leaves: bool


class SampleBuffer(Protocol):
    """Interface of a buffer between processes that produce samples and a training that draws from them.

    A buffer knows samples by their places, which are integers, and holds no arrays. ``capacity``: largest number of
    samples; ``watermark``: number of samples that must stay in it while more will come. What it draws depends only on
    its seed, on :attr:`draws` and on the order in which samples have come.
    """

    #: Largest number of samples in the buffer, and of samples that stay back while more are expected.
    capacity: int
    watermark: int
    #: Whether a sample leaves when it is drawn, while more samples are expected.
    empties: bool
    #: Number of draws so far, from which the random numbers of the next one follow.
    draws: int

    def put(self, place: int, seen: bool = False) -> None:
        """Add the sample ``place``. If the buffer holds it already, it counts again as not drawn.

        ``seen``: whether the sample was drawn before.
        """

    def evict(self) -> int | None:
        """Choose a sample to make room for a new one, remove it and return its place; return None if none may leave."""

    def withdraw(self, place: int) -> None:
        """Remove the sample ``place``. A place that the buffer does not hold is ignored."""

    def draw(self, count: int, ended: bool) -> list[DrawnPlace]:
        """Draw ``count`` samples, in the order in which they are trained; return an empty list if too few have come
        yet.

        ``ended``: whether no further sample will come. Then fewer than ``count`` samples may be drawn.
        """

    def places(self) -> Iterator[tuple[int, bool]]:
        """Yield, for each sample in the buffer, its number (place), and whether it was drawn before."""


class PlaceBag:
    """Set of sample numbers (places), from which a buffer chooses and removes one by its index in constant time."""

    def __init__(self) -> None:
        self._listed: list[int] = []
        self._index: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._listed)

    def __iter__(self) -> Iterator[int]:
        return iter(self._listed)

    def __contains__(self, place: int) -> bool:
        return place in self._index

    def __getitem__(self, index: int) -> int:
        return self._listed[index]

    def add(self, place: int) -> None:
        """Add ``place``, which must not be in the bag yet."""
        self._index[place] = len(self._listed)
        self._listed.append(place)

    def take_out(self, place: int) -> None:
        """Remove ``place``. The last place of the bag gets its index."""
        index, last = self._index.pop(place), self._listed.pop()
        if last != place:
            self._listed[index] = last
            self._index[last] = index


def random_index(count: int, *keys: int) -> int:
    """Return a pseudo-random index below ``count`` that depends only on the integers ``keys``."""
    from weft.data.order import (
        hash_keys,
    )  # which a recipe that names a buffer does without

    return int(hash_keys(*keys)[0]) * count >> 64
