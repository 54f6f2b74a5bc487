"""How many blocks' activations are moved off the device: as many as transfers can hide, by a profile of the first
passes.

The last blocks stay, as backward begins with them (SSDTrain, Wu et al. 2024, 2408.10013; Fuyou, Liao et al. 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Blocks that may still be on their way off the device when all blocks that stay have run.
MOST_LEAVING = 2

#: Transfers count as hidden while a pass takes at most so many times as long as one that keeps everything.
HIDDEN = 1.03


def most_leaving(index: int, away: int, length: int) -> int:
    """Return how many earlier blocks may still be in transfer off the device when forward begins the block ``index``.

    ``away``: number of first blocks whose activations are moved; ``length``: number of all blocks. The result is
    :data:`MOST_LEAVING` - 1, plus the number of blocks from ``index`` on whose activations stay on the device. The
    memory for the activations of these blocks is still empty. Until they need it, blocks in transfer may occupy it, so
    that a slow disk can use the whole forward pass.
    """
    return max(0, length - max(index, away)) + MOST_LEAVING - 1


class BlockCost(NamedTuple):
    """Cost of one block in a pass.

    ``forward`` and ``backward``: seconds without any wait; ``saved``: bytes that the block saves for backward;
    ``inputs``: bytes of its input.
    """

    forward: float
    backward: float
    saved: int
    inputs: int


class BlocksSaving(NamedTuple):
    """Effect of moving the activations of the first blocks off the device, or of recomputing them.

    ``blocks``: number of these blocks; ``bytes``: largest number of bytes of activations on the device at once;
    ``seconds``: time of forward and backward.
    """

    blocks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    """Measured cost of a pass (forward and backward) over the blocks of a model or pipeline stage.

    Attributes:
        ``blocks``: cost of each block.
        ``write``: bytes per second of transfers from the device.
        ``read``: bytes per second of transfers to the device.
        ``write_drag``: seconds by which each byte moved off the device slows the computation beside it. Threads that
            copy take processors and memory bandwidth from the computation.
        ``read_drag``: the same for each byte moved to the device.
    """

    blocks: Sequence[BlockCost]
    write: float
    read: float
    write_drag: float = 0.0
    read_drag: float = 0.0

    def offloaded(self, away: int) -> BlocksSaving:
        """Simulate the pass with the activations of the first ``away`` blocks moved off the device.

        Returns the simulated memory and time.
        """
        blocks = self.blocks
        now = 0.0
        link = 0.0
        here = 0
        most = 0
        gone: list[float] = []  # when each block that leaves will be written
        for i, block in enumerate(blocks):
            late = len(gone) - most_leaving(i, away, len(blocks)) - 1
            now = max(now, gone[late]) if late >= 0 else now
            now += block.forward
            if i < away:
                now += self.write_drag * block.saved
                link = max(link, now) + block.saved / self.write
                gone.append(link)
            held = [j for j in range(i) if j >= away or gone[j] > now]
            most = max(most, sum(blocks[j].saved for j in (*held, i)))
        came = [now if j >= away or gone[j] > now else None for j in range(len(blocks))]
        here = sum(blocks[j].saved for j, end in enumerate(came) if end is not None)
        link = min(link, now)  # what is still on its way need not leave any more
        for i in reversed(range(len(blocks))):
            for j in reversed([j for j in range(i + 1) if came[j] is None]):
                if j < i - 1 and here + blocks[j].saved > most:
                    break
                came[j] = link = max(link, now) + blocks[j].saved / self.read
                here += blocks[j].saved
            most = max(most, here)
            now = max(now, came[i] or 0.0) + blocks[i].backward
            now += (i < away) * self.read_drag * blocks[i].saved
            here -= blocks[i].saved
        return BlocksSaving(away, most, now)

    def recomputed(self, count: int) -> BlocksSaving:
        """Return the memory and time of the pass if backward recomputes the first ``count`` blocks.

        Each of these blocks keeps only its input until backward recomputes the block. One block at a time is
        recomputed.
        """
        again = self.blocks[:count]
        inputs = sum(block.inputs for block in again)
        kept = inputs + sum(block.saved for block in self.blocks[count:])
        working = max((block.saved - block.inputs for block in again), default=0)
        seconds = self.offloaded(0).seconds + sum(block.forward for block in again)
        return BlocksSaving(count, max(kept, inputs + working), seconds)

    def most_hidden(self) -> int:
        """Return the largest number of first blocks whose activations can be moved while the pass hardly slows down.

        The pass may take at most :data:`HIDDEN` times as long as without moves. The last block is never moved, because
        backward needs its activations at once.
        """
        limit = HIDDEN * self.offloaded(0).seconds
        numbers = range(max(1, len(self.blocks)))
        return max(n for n in numbers if self.offloaded(n).seconds <= limit)

    def curve(self) -> dict[str, Any]:
        """Return the memory and time of a pass for every number of first blocks that are moved off the device, or
        recomputed.

        The result is a dict of lists of :class:`BlocksSaving`. Item n of the list ``offload`` is for moving the
        activations of the first n blocks. Item n of the list ``recompute`` is for recomputing the first n blocks. The
        list ``recompute`` is missing if the model recomputes its blocks already.
        """
        numbers = range(len(self.blocks) + 1)
        points: dict[str, Any] = {"offload": [self.offloaded(n) for n in numbers[:-1]]}
        # or else they are recomputed already
        if any(block.inputs < block.saved for block in self.blocks):
            points["recompute"] = [self.recomputed(n) for n in numbers]
        return points
