"""How long it takes to read cache blocks from a place outside the cache, as it was measured there."""

import threading
import time
from collections import deque

#: Readings that are remembered, and seconds after the last one from which on nothing is known any more, so that a place
#: which was slow is tried again.
READINGS, FORGET_S = 16, 5.0
#: Seconds after which a reading under way that has not ended counts as lost.
LOST_S = 60.0


class FetchPace:
    """The time of reading blocks as a linear function of their number, fitted to the last readings. The methods can be
    called in any thread.
    """

    def __init__(self) -> None:
        self._readings: deque[tuple[int, float]] = deque(maxlen=READINGS)
        self._under_way: list[float] = []
        self._last = 0.0
        self._lock = threading.Lock()

    def begin(self) -> float:
        """Note that a reading begins now. Return the time, which :meth:`end` needs."""
        now = time.monotonic()
        with self._lock:
            self._under_way = [
                begun for begun in self._under_way if now - begun <= LOST_S
            ]
            self._under_way.append(now)
        return now

    def end(self, begun: float, blocks: int) -> None:
        """Note that the reading of ``blocks`` blocks that began at the time ``begun`` has ended, whether they came or
        not.
        """
        now = time.monotonic()
        with self._lock:
            if now > self._last + FORGET_S:
                self._readings.clear()
            self._last = now
            if begun in self._under_way:
                self._under_way.remove(begun)
            self._readings.append((blocks, now - begun))

    def seconds(self, blocks: int) -> float:
        """Return the expected seconds of reading ``blocks`` blocks, at least as many as a reading under way lasts
        already; 0 if nothing was read in the last seconds. What has been under way for too long does not count.
        """
        now = time.monotonic()
        with self._lock:
            ages = [now - begun for begun in self._under_way]
            lasts = max((age for age in ages if age <= LOST_S), default=0.0)
            if not self._readings or now > self._last + FORGET_S:
                return lasts
            return max(lasts, line_at(blocks, [*self._readings]))


def line_at(blocks: int, readings: list[tuple[int, float]]) -> float:
    """Return the seconds of reading ``blocks`` blocks by the line that is nearest to ``readings``, pairs of blocks and
    seconds, at least one. Neither a reading of no block nor a further block takes less than no time.
    """
    count = len(readings)
    mean_blocks = sum(n for n, _ in readings) / count
    mean_seconds = sum(s for _, s in readings) / count
    spread = sum((n - mean_blocks) ** 2 for n, _ in readings)
    shared = sum((n - mean_blocks) * (s - mean_seconds) for n, s in readings)
    each = max(0.0, shared / spread) if spread else 0.0
    first = mean_seconds - each * mean_blocks
    if first < 0:
        first, each = 0.0, mean_seconds / mean_blocks
    return first + each * blocks
