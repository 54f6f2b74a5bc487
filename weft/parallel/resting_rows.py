"""Rows of a tensor that rests on the host or in a file, which are read and written alone."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

if TYPE_CHECKING:
    from weft.memory.on_device import OnDevice
    from weft.memory.resting import Tiers
    from weft.memory.tier_file import Region

T = torch.Tensor


class BroughtRows(NamedTuple):
    """Rows of a resting tensor that were read into memory.

    ``blocks``: indices of the blocks of rows that were read, ascending; ``memory``: the rows of these blocks, ``[blocks
    * rows per block, width]``; ``places``: for every requested row, its index in ``memory``.
    """

    blocks: T
    memory: T
    places: T

    @property
    def values(self) -> T:
        """A copy of the rows that :meth:`RestingRows.bring` was asked for, in the order in which it was asked, ``[rows,
        width]``.
        """
        return self.memory[self.places]


class RestingRows:
    """A tensor ``[rows, width]`` on the host or in a file, of which single rows are read and written back.

    ``tensor``: the tensor, which rests from now on where ``tiers`` say for its ``kind`` ("weights" or "moments");
    ``block``: the number of rows that travel together, because they fill whole pages of a file.
    """

    def __init__(self, tensor: T, tiers: OnDevice, kind: str, block: int) -> None:
        self.tensor, self.tiers, self.kind, self.block = tensor, tiers, kind, block
        self.width = tensor.shape[1]
        self.block_bytes = block * self.width * tensor.itemsize
        # whole in no unit's update
        self.owner = object()
        tiers.rest(self.owner, kind, [tensor], self.block_bytes)

    @property
    def _region(self) -> Region | None:
        """The tensor's part of a file; None if it rests in the host's memory."""
        group = self.tiers.groups.get(self.owner, {}).get(self.kind)
        return cast("Region | None", getattr(group, "region", None))

    def bring(self, rows: T) -> BroughtRows:
        """Read the rows with the indices ``rows``, ascending, into memory, and return them."""
        if self._region is None:
            return BroughtRows(rows, self.tensor[rows], torch.arange(len(rows)))
        blocks = torch.unique(rows // self.block)
        memory = cast("Tiers", self.tiers).pool.take(max(1, len(blocks)) * self.block_bytes)  # fmt: skip
        self._transfer(blocks, memory, write=False)
        values = memory.view(self.tensor.dtype)[: len(blocks) * self.block * self.width]
        places = torch.searchsorted(blocks, rows // self.block) * self.block + rows % self.block  # fmt: skip
        return BroughtRows(blocks, values.view(-1, self.width), places)

    def put(self, brought: BroughtRows, values: T) -> None:
        """Write ``values`` ``[rows, width]`` to where the rows rest that :meth:`bring` has returned as ``brought``."""
        if self._region is None:
            self.tensor[brought.blocks] = values
            return
        brought.memory[brought.places] = values
        memory = brought.memory.flatten().view(torch.uint8)
        self._transfer(brought.blocks, memory, write=True)

    def _transfer(self, blocks: T, memory: T, write: bool) -> None:
        """Read blocks into ``memory``, or write them from there, and wait."""
        region, each = self._region, self.block_bytes
        assert region is not None
        move = region.store if write else region.load
        moves, total = [], 0
        for place, block in enumerate(blocks.tolist()):
            size = min(each, region.size - block * each)
            total += size
            moves.append(partial(move, memory[place * each : place * each + size], block * each))  # fmt: skip
        region.run(moves, total, write).wait()
