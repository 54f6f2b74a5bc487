"""First in, random out: every sample is trained once, in a random order among those that are there."""

from __future__ import annotations

from collections.abc import Iterator

from weft.data.sample_buffer import DRAWS, DrawnPlace, PlaceBag, random_index
from weft.registry import register


@register(
    "buffer", "firo", title="Training on a stream in random order, each sample once"
)
class Firo:
    """Buffer of a stream of samples that gives every sample once, in random order: a draw takes any sample in the
    buffer. ``capacity``: largest number of samples. ``watermark``: number of samples that stay in the buffer until the
    stream ends, so that a draw has a choice. ``seed``: seed of the random choices.
    """

    empties = True

    def __init__(self, capacity: int, watermark: int, seed: int) -> None:
        self.capacity, self.watermark, self.seed = capacity, watermark, seed
        self.draws = 0
        self._bag = PlaceBag()

    def __len__(self) -> int:
        return len(self._bag)

    def put(self, place: int, seen: bool = False) -> None:
        if not seen and place not in self._bag:
            self._bag.add(place)

    def withdraw(self, place: int) -> None:
        if place in self._bag:
            self._bag.take_out(place)

    def evict(self) -> int | None:
        return None

    def draw(self, count: int, ended: bool) -> list[DrawnPlace]:
        if not ended and len(self) - self.watermark < count:
            return []
        drawn = []
        for _ in range(min(count, len(self))):
            index = random_index(len(self), self.seed, DRAWS, self.draws)
            self.draws += 1
            place = self._bag[index]
            self._bag.take_out(place)
            drawn.append(DrawnPlace(place, True))
        return drawn

    def places(self) -> Iterator[tuple[int, bool]]:
        return ((place, False) for place in self._bag)
