"""Weights in memory that a learner and its workers share: the learner writes without waiting, workers read the newest.

There are two places. A new version goes into the one that the newest version is not in, so a reader who finds after
its copy that the version is still the same has a whole one.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import numpy as np

#: Bytes before the places: version, and the share of random actions.
HEAD = 16


class WeightsVersion(NamedTuple):
    """A version of the weights that a learner has published.

    ``version``: number of the version; 0: none is published yet. ``explore``: probability with which a worker takes a
    random action in place of the policy's. ``weights``: all parameters one after another, ``[parameters]``.
    """

    version: int
    explore: float
    weights: np.ndarray


class PublishedWeights:
    """Shared memory in which a learner publishes weights to its workers: ``count`` numbers of the type ``dtype``.

    ``handle``: file descriptor of memory that exists already; None creates it.
    """

    def __init__(self, count: int, dtype: str, handle: int | None = None) -> None:
        self._count, self._dtype = count, np.dtype(dtype)
        size = HEAD + 2 * count * self._dtype.itemsize
        handle = os.memfd_create("weft-weights") if handle is None else handle
        if os.fstat(handle).st_size < size:
            os.ftruncate(handle, size)
        self.handle = handle
        self._memory = mmap.mmap(handle, size)

    def _place(self, version: int) -> np.ndarray:
        offset = HEAD + version % 2 * self._count * self._dtype.itemsize
        return np.frombuffer(self._memory, self._dtype, self._count, offset)

    def _read_version(self) -> int:
        return int.from_bytes(self._memory[:8], "little")

    def publish(self, explore: float, weights: np.ndarray) -> int:
        """Make ``weights`` the newest version, and return its number. Does not wait for readers.

        ``explore``: probability with which a worker takes a random action in place of the policy's.
        """
        # the place that readers of the newest version do not read
        other = self._read_version() + 1
        self._place(other)[:] = weights
        self._memory[8:16] = np.float64(explore).tobytes()
        self._memory[:8] = other.to_bytes(8, "little")
        return other

    def newest(self, known: WeightsVersion) -> WeightsVersion:
        """Return the newest version of the weights, or ``known`` itself if it is the newest."""
        while (version := self._read_version()) != known.version:
            weights = self._place(version).copy()
            explore = float(np.frombuffer(self._memory[8:16])[0])
            if self._read_version() == version:
                return WeightsVersion(version, explore, weights)
        return known

    def close(self) -> None:
        """Close the file descriptor of the shared memory. The memory itself stays mapped in this process until the
        process ends.
        """
        os.close(self.handle)


#: What a worker knows before there are weights.
NO_WEIGHTS = WeightsVersion(0, 1.0, np.empty(0))
