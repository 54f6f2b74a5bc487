"""Ranks of one island that hold the same state each exchange a part of it, and share the results."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.layout.mesh import Mesh
from weft.parallel.state import Held
from weft.sync.compress import BLOCK

T = torch.Tensor


@dataclass(frozen=True)
class Replicas:
    """The ``count`` ranks of an island that hold the same, of which this is the one of this ``index``.

    They talk over ``group``, by tensors of ``device``. All is about flat tensors that they have alike.
    """

    group: dist.ProcessGroup | None = None
    index: int = 0
    count: int = 1
    device: torch.device | str = "cpu"

    def each(self, size: int) -> int:
        """How many of so many elements a rank exchanges at most: whole blocks of what compressors scale together."""
        return -(-size // (self.count * BLOCK)) * BLOCK

    def part(self, size: int) -> slice:
        """The elements, of so many, that this rank exchanges."""
        each = self.each(size)
        return slice(min(self.index * each, size), min((self.index + 1) * each, size))

    def whole(self, part: T, size: int) -> T:
        """All elements, of which this rank has its part. Collective."""
        if self.group is None:
            return part
        mine = torch.zeros(self.each(size), dtype=part.dtype, device=self.device)
        mine[: part.numel()] = part
        found = mine.new_empty(self.count * mine.numel())
        dist.all_gather_into_tensor(found, mine, group=self.group)
        return found[:size].to(part.device)


def replicas_of(held: Sequence[Held], mesh: Mesh) -> Replicas:
    """Who shares in exchanging these parameters: nobody, if different ranks have copies of different ones."""
    names = {mesh.sharing(h.logical)[0] for h in held}
    if len(names) != 1 or mesh.size(*names) == 1:
        return Replicas()
    (name,) = names
    return Replicas(mesh.group(name), mesh.rank(name), mesh.size(name), mesh.device)
