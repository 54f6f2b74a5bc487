"""How many blocks' activations leave the device: as many as transfers can hide, by a profile of the first passes.

The last blocks stay, as backward begins with them (SSDTrain, Wu et al. 2024, 2408.10013; Fuyou, Liao et al. 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Blocks whose activations may still be on the device, on their way from it, when all that stay are there, too.
MOST_LEAVING = 2

#: Transfers count as hidden while a pass takes at most so many times as long as one that keeps everything.
HIDDEN = 1.03


def most_leaving(index: int, away: int, length: int) -> int:
    """How many blocks may be on their way when block ``index`` of a pass begins, of which the first ``away`` leave.

    Those that stay and have not come yet lend their room, so that a slow disk has the whole forward pass.
    """
    return max(0, length - max(index, away)) + MOST_LEAVING - 1


class BlockCost(NamedTuple):
    """Seconds of a block's passes without any wait, and bytes that it has ``saved``, or of its ``inputs`` alone."""

    forward: float
    backward: float
    saved: int
    inputs: int


class BlocksSaving(NamedTuple):
    """What so many first ``blocks`` give if they leave, or are recomputed: most ``bytes`` saved, and ``seconds``."""

    blocks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    """A pass over the ``blocks`` of a model or stage; ``write`` and ``read``: bytes per second, one after the other.

    ``write_drag`` and ``read_drag``: seconds that each byte that moves meanwhile adds to what is computed, as threads
    that copy take processors and memory from it.
    """

    blocks: Sequence[BlockCost]
    write: float
    read: float
    write_drag: float = 0.0
    read_drag: float = 0.0

    def offloaded(self, away: int) -> BlocksSaving:
        """The pass played through, as :class:`weft.memory.activations.SavedActivations` runs it."""
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
            here = (
                sum(
                    b.saved
                    for j, b in enumerate(blocks[:i])
                    if j >= away or gone[j] > now
                )
                + block.saved
            )
            most = max(most, here)
        came = [now if j >= away or gone[j] > now else None for j in range(len(blocks))]
        here = sum(
            b.saved for b, end in zip(blocks, came, strict=True) if end is not None
        )
        link = min(link, now)  # what is still on its way need not leave any more
        for i in reversed(range(len(blocks))):
            for j in reversed([j for j in range(i + 1) if came[j] is None]):
                if j < i - 1 and here + blocks[j].saved > most:
                    break
                came[j] = link = max(link, now) + blocks[j].saved / self.read
                here += blocks[j].saved
            most = max(most, here)
            now = (
                max(now, came[i] or 0.0)
                + blocks[i].backward
                + (i < away) * self.read_drag * blocks[i].saved
            )
            here -= blocks[i].saved
        return BlocksSaving(away, most, now)

    def recomputed(self, count: int) -> BlocksSaving:
        """The pass with the first blocks run again before their backward; while that is, one has all that it saves."""
        again = self.blocks[:count]
        kept = sum(block.inputs for block in again) + sum(
            block.saved for block in self.blocks[count:]
        )
        working = max((block.saved - block.inputs for block in again), default=0)
        seconds = self.offloaded(0).seconds + sum(block.forward for block in again)
        return BlocksSaving(
            count, max(kept, sum(b.inputs for b in again) + working), seconds
        )

    def most_hidden(self) -> int:
        """As many as can leave for nothing; never the last one, which is wanted at once."""
        limit = HIDDEN * self.offloaded(0).seconds
        return max(
            n
            for n in range(max(1, len(self.blocks)))
            if self.offloaded(n).seconds <= limit
        )

    def curve(self) -> dict[str, Any]:
        """For every number of blocks, what leaving and recomputing give: none of them is keeping everything."""
        numbers = range(len(self.blocks) + 1)
        points: dict[str, Any] = {"offload": [self.offloaded(n) for n in numbers[:-1]]}
        # or else they are recomputed already
        if any(block.inputs < block.saved for block in self.blocks):
            points["recompute"] = [self.recomputed(n) for n in numbers]
        return points
