"""What tests of recovery need: process groups of other ranks in one call, and states whose values are known."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.layout.parts import Part
from weft.resilience.recover import FACT
from weft.resilience.snapshots import Snapshots


class Groups:
    """Ends the process group of a pool's call, and makes others of some of its ranks, one after the other."""

    def __init__(self) -> None:
        self.store = dist.distributed_c10d._get_default_store()
        self.me, self.count = dist.get_rank(), 0

    def meet(self, ranks: Sequence[int]) -> bool:
        """From now on these ranks are the world, in this order; whether this is one of them."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.count += 1
        if self.me not in ranks:
            return False
        store = dist.PrefixStore(f"view-{self.count}", self.store)
        rank, limit = ranks.index(self.me), timedelta(seconds=120)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=len(ranks), timeout=limit
        )
        return True


def logical(name: str, part: Part, salt: int) -> torch.Tensor:
    """The values of a whole tensor: other ones for every name and ``salt``."""
    drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()) + salt)
    shape = part.tensor.shape
    if part.values.is_floating_point():
        return torch.rand(shape, generator=drawn, dtype=torch.float64).to(
            part.values.dtype
        )
    return torch.randint(0, 100, shape, generator=drawn).to(part.values.dtype)


def fill(
    parts: Mapping[str, Part], salt: int, fixed: frozenset[str] = frozenset()
) -> None:
    """Give every tensor its values; those that never change the same ones each time."""
    for name, part in parts.items():
        part.values.copy_(logical(name, part, 0 if name in fixed else salt)[part.index])


def wrong(
    parts: Mapping[str, Part], salt: int, fixed: frozenset[str] = frozenset()
) -> list[str]:
    """The tensors whose values are others than :func:`fill` has given, to the bit."""
    return [
        name
        for name, part in parts.items()
        if not torch.equal(
            part.values, logical(name, part, 0 if name in fixed else salt)[part.index]
        )
    ]


def said(snapshots: Sequence[Snapshots]) -> dict[str, Any]:
    """A member's facts."""
    return {FACT: [one.held() for one in snapshots]}
