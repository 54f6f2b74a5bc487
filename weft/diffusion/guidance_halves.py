"""Guidance over two groups of ranks: one computes predictions with conditions, the other those without."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from weft.net.groups import new_group
from weft.schedule.actions import Value
from weft.schedule.pipeline_wire import Specs, Wire

T = torch.Tensor


class GuidanceHalf(Protocol):
    """Interface of this rank's half of classifier-free guidance, when two groups of ranks divide the guidance.

    One group computes predictions with conditions, the other without.

    Attributes:
        ``conditional``: whether this rank computes predictions with conditions.
    """

    conditional: bool

    def exchanged(self, predicted: T) -> T:
        """Exchange predictions with the rank that computes the other half for the same tokens.

        Sends ``predicted``, and returns the other rank's prediction.
        """


class HalvesOverRanks:
    """This rank's half of classifier-free guidance, when the ranks of the default process group form two equal groups.

    The first half of the ranks computes with conditions. Rank ``r`` of one group has the same tokens, layers and steps
    as rank ``r`` of the other group. So both exchange predictions in the same order, and continue with equal latents.

    ``device``: device of predictions; ``timeout``: seconds that a rank waits for the other's prediction.

    Attributes:
        ``group``: the ranks with the same half.
        ``wire``: transfers between the halves; it counts their bytes.
    """

    def __init__(self, device: torch.device, timeout: float = 600) -> None:
        world = dist.group.WORLD
        assert world is not None
        rank, each = world.rank(), world.size() // 2
        self.conditional = rank < each
        self.other = (rank + each) % (2 * each)
        first = 0 if self.conditional else each
        self.group = new_group(range(first, first + each), "guidance")
        self._spec: Specs | None = None
        self._count = 0
        self.wire = Wire(world, device, timeout, lambda value: self._spec)
        pairs = {(r, (r + each) % (2 * each)) for r in range(2 * each)}
        self.wire.connect(pairs)

    def exchanged(self, predicted: T) -> T:
        self._spec = [(tuple(predicted.shape), predicted.dtype)]
        value = Value("guidance", 0, self._count)
        self._count += 1
        self.wire.ask(value, self.other)
        self.wire.send(value, predicted.contiguous(), self.other, 1)
        other: T = self.wire.take(value, self.other, "guidance")
        return other
