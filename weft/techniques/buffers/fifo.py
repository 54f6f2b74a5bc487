"""First in, first out: every sample is trained once, in the order in which samples come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from weft.data.sample_buffer import DrawnPlace
from weft.registry import register


@register("buffer", "fifo", title="Training on a stream in its order")
class Fifo:
    """Buffer of a stream of samples that gives every sample once, the earliest first. ``capacity``: largest number of
    samples. ``watermark``: number of samples that stay in the buffer until the stream ends. ``seed`` is not used,
    because nothing is random.
    """

    empties = True

    def __init__(self, capacity: int, watermark: int, seed: int) -> None:
        self.capacity, self.watermark = capacity, watermark
        self.draws = 0
        self._queue: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, place: int, seen: bool = False) -> None:
        if not seen and place not in self._queue:
            self._queue.append(place)

    def withdraw(self, place: int) -> None:
        if place in self._queue:
            self._queue.remove(place)

    def evict(self) -> int | None:
        return None

    def draw(self, count: int, ended: bool) -> list[DrawnPlace]:
        if not ended and len(self) - self.watermark < count:
            return []
        count = min(count, len(self))
        self.draws += count
        return [DrawnPlace(self._queue.popleft(), True) for _ in range(count)]

    def places(self) -> Iterator[tuple[int, bool]]:
        return ((place, False) for place in self._queue)
