"""AdamW whose moments are kept in 8 or 4 bits, or in bfloat16, between updates.

8 and 4 bits are codes with one scale for each block of a row (Dettmers et al. 2021; Li et al. 2023 for 4 bits). Blocks
are counted from the beginning of the logical row: ranks that share a block agree on its scale, so that the update does
not depend on the layout, and another layout can go on with the same state.
"""

from collections.abc import Sequence
from typing import Protocol
from zlib import crc32

import torch
import torch.nn.functional as F

from weft.checkpoint.format import MOMENTS
from weft.layout.parts import Part
from weft.memory.noise import random_bits
from weft.memory.quantised import (
    Blocks,
    decoded,
    dynamic_map,
    encoded,
    linear_map,
    rounded_bf16,
    unpacked,
)
from weft.models.nf4 import packed
from weft.parallel.state import Held
from weft.recipe import Optimizer
from weft.train.rules.elementwise import AdamW
from weft.train.rules.rule import Extent, RankSums, like, logical_positions

T = torch.Tensor

#: Matrices with fewer elements, and all vectors, keep full moments: they weigh little, and norms suffer most.
SMALL = 4096


class Encoding(Protocol):
    """How the moments of a parameter are kept."""

    def slots(self, held: Held) -> dict[str, Part]: ...

    def load(self, held: Held) -> list[T]:
        """The two moments, in the state's precision."""

    def store(self, held: Held, moments: Sequence[T]) -> None:
        """Keep them; ``held.updates`` has counted the update that made them."""


class InBlocks:
    """Codes of ``bits`` bits, and as scale of a block of ``size`` elements the largest in magnitude, with its sign."""

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
        found = {}
        for moment in MOMENTS:
            found[f"{moment}.codes"] = self.ranks.slot(
                held, *rows, Extent(last, per=per), dtype=torch.uint8
            )
            found[f"{moment}.scale"] = self.ranks.slot(
                held, *rows, Extent(None, self._blocks(held).count)
            )
        # with scales of 0 any code is 0; this one stays it
        for moment, values in zip(MOMENTS, self.maps, strict=True):
            found[f"{moment}.codes"].values.copy_(
                self._packed(torch.full_like(held.local, int(values.abs().argmin())))
            )
        return found

    def load(self, held: Held) -> list[T]:
        blocks, n, found = self._blocks(held), held.local.size(-1), []
        for moment, values in zip(MOMENTS, self.maps, strict=True):
            codes, scale = (
                held.slots[f"{moment}.{what}"].values for what in ("codes", "scale")
            )
            codes = unpacked(codes)[..., :n] if self.bits == 4 else codes
            found.append(decoded(codes, blocks.spread(scale, n), values))
        return found

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


class InBfloat16:
    """Moments in bfloat16, rounded up or down at random so that small changes are not lost.

    The noise is a function of parameter, element, update and moment, and so the same on whatever rank draws it.
    """

    def slots(self, held: Held) -> dict[str, Part]:
        return {moment: like(held, torch.bfloat16) for moment in MOMENTS}

    def load(self, held: Held) -> list[T]:
        return [held.slots[moment].values.to(held.local.dtype) for moment in MOMENTS]

    def store(self, held: Held, moments: Sequence[T]) -> None:
        positions = logical_positions(held)
        for number, (moment, x) in enumerate(zip(MOMENTS, moments, strict=True)):
            seed = (
                crc32(held.name.encode()) << 32
                | int(held.updates.item()) * len(MOMENTS) + number
            )
            held.slots[moment].values.copy_(
                rounded_bf16(x, random_bits(positions, seed))
            )


class SmallAdamW:
    """AdamW that brings one parameter's moments to full precision at a time."""

    def __init__(self, settings: Optimizer, encoding: Encoding) -> None:
        self.full, self.encoding = AdamW(settings), encoding

    def slots(self, held: Held) -> dict[str, Part]:
        return self.encoding.slots(held) if is_large(held) else self.full.slots(held)

    def update(
        self, held: Sequence[Held], grads: Sequence[T], lr: float, decay: float
    ) -> None:
        small = [(h, g) for h, g in zip(held, grads, strict=True) if not is_large(h)]
        self.full.update([h for h, _ in small], [g for _, g in small], lr, decay)
        for h, g in zip(held, grads, strict=True):
            if is_large(h):
                moments = self.encoding.load(h)
                if h.local.numel():
                    self.full.step([h], [g], [moments[0]], [moments[1]], lr, decay)
                self.encoding.store(h, moments)


def is_large(held: Held) -> bool:
    return held.logical.numel >= SMALL and len(held.logical.dims) > 1
