"""The blocks of a paged cache, by number: who owns each of them, and which of them hold the beginning of a text.

A negative number in a table stands for a block that lies in the cache of another engine
(:mod:`weft.generate.lending`). It takes no room here, and only its owners are counted.

A block has room for the keys and values (or whatever else layers remember, :mod:`weft.models.paged`) of ``size``
tokens. A request lists its blocks in its *table*. Several requests may own the same block, which nobody may then write
to (PagedAttention, Kwon et al. 2023, 2309.06180). A full block can be found by its *key*, also when it has no owner any
more, until it is used for something else: the least recently used goes first (as in vLLM and RadixAttention).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile


class BlockPool:
    """A pool of ``blocks`` cache blocks of ``size`` tokens each. An owner of a block is a text, or an adapter, that
    uses it; texts with equal beginnings own the same blocks. ``states``: whether the blocks hold recurrent states, from
    which a token cannot be removed.
    """

    def __init__(self, blocks: int, size: int, states: bool = False) -> None:
        self.blocks, self.size, self.states = blocks, size, states
        # the number of owners of every block that has any
        self.owners: dict[int, int] = {}
        self.known: dict[bytes, int] = {}  # blocks that can be found, by key
        self.keys: dict[int, bytes] = {}  # and their keys, by block
        self.lent: Counter[int] = Counter()  # owners of blocks that lie elsewhere
        # used before and free, in the order to use them again
        self._freed: OrderedDict[int, None] = OrderedDict()
        # the first block that was never used; from it on, blocks have no memory yet
        self._fresh = 0

    @property
    def free(self) -> int:
        """Number of blocks without an owner (a text or an adapter that uses them), which :meth:`take` can give to a
        text.
        """
        return self.blocks - len(self.owners)

    def take(self, key: bytes | None = None) -> int:
        """Take a free block for one text or adapter, and return the block's number. There must be a free block.
        ``key``: the key under which :meth:`find` returns the block from now on; None: it cannot be found.
        """
        if (
            not self._freed or next(iter(self._freed)) in self.keys
        ) and self._fresh < self.blocks:
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
        """Add an owner (a text or an adapter that uses them) to each of the blocks with the numbers ``blocks``."""
        for block in blocks:
            if block < 0:
                self.lent[block] += 1
                continue
            self._freed.pop(block, None)
            self.owners[block] = self.owners.get(block, 0) + 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one owner (a text or an adapter that used them) from each of ``blocks``, numbers of blocks in the
        order of the text's tokens. Blocks without an owner may be reused, those at the end of the list first.
        """
        for block in reversed(blocks):
            if block < 0:
                self.lent[block] -= 1
                continue
            self.owners[block] -= 1
            if not self.owners[block]:
                del self.owners[block]
                self._freed[block] = None
                # else there is nothing to find in it
                self._freed.move_to_end(block, last=block in self.keys)

    def remember(self, block: int, key: bytes) -> None:
        """Let :meth:`find` return the full block ``block`` for ``key`` from now on. Nothing changes if the key or the
        block is known already.
        """
        if key not in self.known and block not in self.keys:
            self.known[key], self.keys[block] = block, key

    def forget(self) -> None:
        """Let :meth:`find` return none of the blocks that can be found now. Owners keep their blocks."""
        self.known.clear()
        self.keys.clear()

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the numbers of the cached blocks for the first ``keys``, up to the first key that the pool does not
        know. ``keys``: the chained keys of a text's blocks (:func:`weft.generate.keys.chained_keys`).
        """
        return [self.known[key] for key in takewhile(self.known.__contains__, keys)]
