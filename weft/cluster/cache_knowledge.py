"""What a router knows of the cache of an engine between the engine's messages. The simulated router knows as much.

An engine says how many blocks are used with the tokens of each step and with its signs of life. In between, the router
counts what it has sent there and what has ended. It takes a text's blocks to be in the cache from the moment when it
has sent the text.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable


class CacheKnowledge:
    """What the router knows of an engine's cache of ``blocks`` blocks: how much is used, and which blocks it has. A
    block's key is the hash of its tokens and of all tokens before them.

    Attributes:
        ``submitted``: number of texts that the router has sent to the engine.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks, self.submitted = blocks, 0
        self._said = 0
        # of each submission that the last message does not count: its number, and the blocks that it needs
        self._recent: deque[tuple[int, int]] = deque()
        self._freed = 0
        self._prefixes: OrderedDict[bytes, None] = OrderedDict()

    @property
    def usage(self) -> int:
        """Virtual usage of the cache in blocks: the number of blocks that requests own, plus the number that waiting
        requests will need.
        """
        sent = sum(blocks for _, blocks in self._recent)
        return max(0, self._said + sent - self._freed)

    def submit(self, blocks: int) -> None:
        """Note that a text that will need ``blocks`` cache blocks was sent to the engine."""
        self.submitted += 1
        self._recent.append((self.submitted, blocks))

    def note_beat(self, usage: int, taken: int) -> None:
        """Update the usage from a message of the engine. ``usage``: number of blocks that requests own or will
        need. ``taken``: number of texts that the engine has received so far; ``usage`` includes these.
        """
        self._said, self._freed = usage, 0
        while self._recent and self._recent[0][0] <= taken:
            self._recent.popleft()

    def free(self, blocks: int) -> None:
        """Note that a text of ``blocks`` cache blocks has left the engine or ended there."""
        self._freed += blocks

    def take(self, blocks: int) -> None:
        """Note that a text has come from another engine with ``blocks`` cache blocks, which no message of this engine
        has told yet.
        """
        self._freed -= blocks

    def remember(self, keys: Iterable[bytes]) -> None:
        """Note that the engine will have the blocks of ``keys``. If that makes more keys than the cache has blocks, the
        keys noted longest ago are forgotten.
        """
        for key in keys:
            self._prefixes[key] = None
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > self.blocks:
            self._prefixes.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Note that the blocks of ``keys`` are lost."""
        for key in keys:
            self._prefixes.pop(key, None)

    def known(self, keys: Iterable[bytes]) -> int:
        """Return how many blocks of a text the engine's cache probably has, from the first one on without a gap.
        ``keys``: keys of the text's blocks, in order.
        """
        count = 0
        for key in keys if self._prefixes else ():
            if key not in self._prefixes:
                break
            count += 1
        return count
