"""The second phase: blocks of texts move to the host when the cache has no free ones."""

from __future__ import annotations

from weft.generate.cache_policy import TextBlocks
from weft.generate.request import Request

#: The last blocks of a text, which stay on the device; and blocks that move at once.
NEAR, TOGETHER = 4, 8


class HostPhase:
    """Moves cache blocks of running texts to the host's memory. ``scheduler``: the engine's scheduler, whose texts have
    the blocks. ``room``: tokens for which the host has room; None: as many as the cache has. The block number ``n`` on
    the host is listed in its text's table as the negative number ``-1 - n``.
    """

    def __init__(self, scheduler: TextBlocks, room: int | None) -> None:
        self.scheduler, self.room = scheduler, room
        self._free: list[int] = []
        self._used = 0  # numbers that have been given away once

    def relieve(self) -> bool:
        """Take the text that has most blocks on the device, and move its oldest ones there to the host. The scheduler
        calls this when no block is free. Return whether a block has become free.
        """
        pool = self.scheduler.pool
        text = max(self.scheduler.running, key=self._movable, default=None)
        if text is None:
            return False
        count = min(TOGETHER, self._movable(text), self._rooms())
        first = self._first(text)
        for at in range(first, first + count):
            number = -1 - self._take()
            block = text.table[at]
            self.scheduler.moves.append((block, number))
            text.table[at] = number
            pool.lent[number] = 1
            pool.release([block])
        self.scheduler.moved_blocks += count
        return count > 0

    def _first(self, request: Request) -> int:
        """Return the index in the table of the oldest block on the device behind the first one, which stays."""
        table = request.table
        low, high = 1, max(1, len(table))
        while low < high:  # blocks move in order
            middle = (low + high) // 2
            low, high = (middle + 1, high) if table[middle] < 0 else (low, middle)
        return low

    def _movable(self, request: Request) -> int:
        last = request.computed // self.scheduler.pool.size - NEAR
        return max(0, last - self._first(request))

    def _rooms(self) -> int:
        """Return how many more blocks the host has room for."""
        pool = self.scheduler.pool
        most = pool.blocks if self.room is None else self.room // pool.size
        owned = [-1 - n for n, owners in pool.lent.items() if owners > 0]
        self._free = [*{*range(self._used)}.difference(owned)]
        return most - len(owned)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._used += 1
        return self._used - 1
