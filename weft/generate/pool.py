"""Blocks of a cache by number: who owns each of them, and which of them hold the beginning of a text.

A block has room for the keys and values (or whatever else layers remember, :mod:`weft.models.paged`) of ``size``
tokens. A request lists its blocks in its *table*; several requests may own one block, which nobody may then write to
(PagedAttention, Kwon et al. 2023, 2309.06180). A block that is full can be found again by its *key*, after its owners
have gone too: until it is needed for something else, the least recently used first (as in vLLM and RadixAttention).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile


class BlockPool:
    """``blocks`` blocks of ``size`` tokens each; ``states``: they sum up their tokens, none of which can be undone."""

    def __init__(self, blocks: int, size: int, states: bool = False) -> None:
        self.blocks, self.size, self.states = blocks, size, states
        self.owners: dict[int, int] = {}  # of every block that is in use, how many
        self.known: dict[bytes, int] = {}  # blocks that can be found again
        self.keys: dict[int, bytes] = {}  # and their keys
        self._freed: OrderedDict[int, None] = OrderedDict()  # used before: first those to use again first
        self._fresh = 0  # the first block that never was used, which as those behind it has no memory yet

    @property
    def free(self) -> int:
        """How many blocks nobody owns."""
        return self.blocks - len(self.owners)

    def take(self, key: bytes | None = None) -> int:
        """A block for one owner, whose contents nobody needs; ``key``: by which it is found from now on.

        There must be one that is free.
        """
        if (not self._freed or next(iter(self._freed)) in self.keys) and self._fresh < self.blocks:
            block, self._fresh = self._fresh, self._fresh + 1
        else:
            block, _ = self._freed.popitem(last=False)
        if old := self.keys.pop(block, None):
            del self.known[old]
        self.owners[block] = 1
        if key is not None:
            if key in self.known:
                del self.keys[self.known.pop(key)]
            self.remember(block, key)
        return block

    def hold(self, blocks: Iterable[int]) -> None:
        """Add an owner to each of ``blocks``."""
        for block in blocks:
            self._freed.pop(block, None)
            self.owners[block] = self.owners.get(block, 0) + 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take an owner from each of ``blocks``, a table or its end: the last tokens are the first to be forgotten."""
        for block in reversed(blocks):
            self.owners[block] -= 1
            if not self.owners[block]:
                del self.owners[block]
                self._freed[block] = None
                self._freed.move_to_end(block, last=block in self.keys)  # else there is nothing to find in it

    def remember(self, block: int, key: bytes) -> None:
        """Let a full block be found by ``key``, unless another one is, or it has one already."""
        if key not in self.known and block not in self.keys:
            self.known[key], self.keys[block] = block, key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest beginning of ``keys`` that is known."""
        return [self.known[key] for key in takewhile(self.known.__contains__, keys)]
