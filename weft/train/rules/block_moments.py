"""Moments in codes of 8 or 4 bits with one scale for each block of a row (Dettmers et al. 2021; Li et al. 2023).

Blocks are counted from the beginning of the logical row. Ranks that share a block agree on its scale, so that the
update does not depend on the layout, and a run can resume under another layout.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from weft.checkpoint.boxes import MOMENTS
from weft.layout.parts import Part
from weft.memory.quantised import (
    Blocks,
    decoded,
    dynamic_map,
    encoded,
    linear_map,
    unpacked,
)
from weft.models.nf4 import packed
from weft.parallel.state import Held
from weft.train.rules.rank_sums import Extent, RankSums

T = torch.Tensor


class BlockMoments:
    """Stores a parameter's two moments as codes of ``bits`` bits (8 or 4), in blocks of ``size`` neighbouring elements.

    Each block has a scale: the element of largest magnitude, with its sign. ``ranks``: collectives over the ranks that
    hold parts of the same block.
    """

    def __init__(self, bits: int, size: int, ranks: RankSums) -> None:
        self.bits, self.size, self.ranks = bits, size, ranks
        eight = dynamic_map(True, 7, 8), dynamic_map(False, 7, 8)
        self.maps = eight if bits == 8 else (dynamic_map(True, 3, 4), linear_map(4))

    def slots(self, held: Held) -> dict[str, Part]:
        last, per = len(held.logical.dims) - 1, 8 // self.bits
        # The table of conflicts refuses cuts that would part a pair.
        assert all(
            edge % per == 0 or edge == held.logical.shape[-1] for edge in held.box[-1]
        ), held.name
        rows = [Extent(i) for i in range(last)]
        slots = {}
        for moment in MOMENTS:
            slots[f"{moment}.codes"] = self.ranks.slot(
                held, *rows, Extent(last, per=per), dtype=torch.uint8
            )
            slots[f"{moment}.scale"] = self.ranks.slot(
                held, *rows, Extent(None, self._blocks(held).count)
            )
        # with scales of 0 any code is 0; this one stays it
        for moment, values in zip(MOMENTS, self.maps, strict=True):
            slots[f"{moment}.codes"].values.copy_(
                self._packed(torch.full_like(held.local, int(values.abs().argmin())))
            )
        return slots

    def load(self, held: Held) -> list[T]:
        blocks, n, moments = self._blocks(held), held.local.size(-1), []
        for moment, values in zip(MOMENTS, self.maps, strict=True):
            codes, scale = (
                held.slots[f"{moment}.{what}"].values for what in ("codes", "scale")
            )
            codes = unpacked(codes)[..., :n] if self.bits == 4 else codes
            moments.append(decoded(codes, blocks.spread(scale, n), values))
        return moments

    def store(self, held: Held, moments: Sequence[T]) -> None:
        blocks, n, last = (
            self._blocks(held),
            held.local.size(-1),
            len(held.logical.dims) - 1,
        )
        for moment, values, x in zip(MOMENTS, self.maps, moments, strict=True):
            # [2, ..., blocks]
            ends = torch.stack((blocks.largest(x), blocks.largest(-x)))
            above, below = self.ranks.largest(ends, held, last)
            scale = torch.where(above >= below, above, -below)
            held.slots[f"{moment}.scale"].values.copy_(scale)
            held.slots[f"{moment}.codes"].values.copy_(
                self._packed(encoded(x, blocks.spread(scale, n), values))
            )

    def _blocks(self, held: Held) -> Blocks:
        return Blocks(self.size, held.logical.shape[-1], held.box[-1][0])

    def _packed(self, codes: T) -> T:
        codes = codes.to(torch.uint8)
        return (
            packed(F.pad(codes, (0, codes.size(-1) % 2))) if self.bits == 4 else codes
        )
