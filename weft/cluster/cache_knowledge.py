"""What a router knows of the cache of an engine between the engine's signs of life. The simulated router knows as much.

An engine says a few times a second how many blocks are used. In between, the router counts what it has sent there and
what has ended. It takes a text's blocks to be in the cache from the moment when it has sent the text.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable


class CacheKnowledge:
    """What is known of a cache of so many ``blocks``.

    Attributes:
        ``submitted``: how many submissions were sent to the engine.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks, self.submitted = blocks, 0
        self._said = 0
        # of each submission that the last sign of life does not count: its number, and the blocks that it needs
        self._recent: deque[tuple[int, int]] = deque()
        self._freed = 0
        self._prefixes: OrderedDict[bytes, None] = OrderedDict()

    @property
    def usage(self) -> int:
        """Virtual usage: blocks that requests own, and those that waiting ones will need."""
        sent = sum(blocks for _, blocks in self._recent)
        return max(0, self._said + sent - self._freed)

    def submit(self, blocks: int) -> None:
        """Note that a text of so many ``blocks`` was sent to the engine."""
        self.submitted += 1
        self._recent.append((self.submitted, blocks))

    def note_beat(self, usage: int, taken: int) -> None:
        """Take in a sign of life. ``usage``: blocks that requests own or will need. ``taken``: number of submissions
        that the engine has received, which are counted in ``usage``.
        """
        self._said, self._freed = usage, 0
        while self._recent and self._recent[0][0] <= taken:
            self._recent.popleft()

    def free(self, blocks: int) -> None:
        """Note that a text of so many ``blocks`` has left the engine or ended."""
        self._freed += blocks

    def remember(self, keys: Iterable[bytes]) -> None:
        """Note that the engine will have the blocks of ``keys``; those noted longest ago are forgotten."""
        for key in keys:
            self._prefixes[key] = None
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > self.blocks:
            self._prefixes.popitem(last=False)

    def known(self, keys: Iterable[bytes]) -> int:
        """Return how many of ``keys``, from the first one on without a gap, the engine's cache probably has."""
        count = 0
        for key in keys if self._prefixes else ():
            if key not in self._prefixes:
                break
            count += 1
        return count
