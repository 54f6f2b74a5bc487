"""Tiles of one tensor that rest side by side, so that the whole tensor can be read and written where they rest."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, cast

import torch

from weft.memory.resting import RestingGroup
from weft.memory.tier_file import PAGE, BufferPool, Region, whole_pages

if TYPE_CHECKING:
    from weft.memory.on_device import OnDevice
    from weft.memory.resting import Tiers

T = torch.Tensor


class RestingTile(RestingGroup):
    """A tile (some rows) of a tensor that rests in a file, as a group of tensors that is read and written by itself.

    ``tensor``: the rows of the tile; ``region``: the bytes of the file in which the tile rests, a part of those of the
    whole tensor; ``pool``: pool of buffers into which the tile is read.
    """

    def __init__(self, tensor: T, region: Region, pool: BufferPool) -> None:
        self._part = region
        super().__init__([tensor], region.file, pool)

    def _room(self) -> tuple[Region | None, T]:
        return self._part, self._part.memory


def rows_of_whole_pages(row_bytes: int) -> int:
    """Return the least number of rows of ``row_bytes`` bytes each that fill whole pages, as direct I/O asks."""
    return PAGE // gcd(row_bytes, PAGE)


def rest_side_by_side(
    tiers: OnDevice, owners: Sequence[Hashable], kind: str, tiles: Sequence[T], slot: str = ""
) -> T:  # fmt: skip
    """Move tiles of a tensor to where its kind rests, side by side, and return the whole tensor that they make up.

    The tile objects stay the same. All tiles but the last must have whole pages if they rest in a file.

    ``tiers``: where tensors rest; ``owners``: for each tile the unit that is updated with it; ``kind``: "weights",
    "gradients" or "moments"; ``tiles``: consecutive rows of the tensor, ``[rows, ...]`` each; ``slot``: name of the
    optimizer's slot, where a unit has several tensors of a kind.
    """
    rows = sum(len(tile) for tile in tiles)
    first = tiles[0]
    if tiers.places.get(kind) != "file" or not rows * first[0:1].numel():
        whole = first.new_zeros(rows, *first.shape[1:])
        if first.is_pinned():
            whole = whole.pin_memory()
        for tile, place in zip(tiles, whole.split([len(t) for t in tiles]), strict=True):  # fmt: skip
            place.copy_(tile)
            tile.data = place
        return whole
    files, begin = cast("Tiers", tiers), 0
    region = files.file.region(sum(tile.nbytes for tile in tiles))
    for owner, tile in zip(owners, tiles, strict=True):
        if not tile.numel():
            continue
        size = whole_pages(tile.nbytes)
        part = replace(
            region,
            offset=region.offset + begin,
            size=size,
            memory=region.memory[begin : begin + size],
            sums={},
        )
        name = f"{kind} {slot}".strip()
        files.groups[owner][name] = RestingTile(tile, part, files.pool)
        begin += tile.nbytes
    memory = region.memory[: sum(tile.nbytes for tile in tiles)]
    return memory.view(first.dtype).view(rows, *first.shape[1:])
