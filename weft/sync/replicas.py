"""Ranks of one island that hold the same state each exchange a part of it and share the results."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.layout.mesh import Mesh
from weft.parallel.state import Held
from weft.sync.compressor import BLOCK

T = torch.Tensor


@dataclass(frozen=True)
class Replicas:
    """The ranks of an island that hold copies of the same parameters and optimizer state.

    Each of these ranks exchanges a part of the copy with other islands. The methods divide a flat tensor of ``size``
    elements, of which all these ranks have the same copy.

    Attributes:
        ``group``: process group of these ranks; None if a rank has no others.
        ``index``: this rank's number among these ranks.
        ``count``: number of these ranks.
        ``device``: device of the tensors that ``group`` takes.
    """

    group: dist.ProcessGroup | None = None
    index: int = 0
    count: int = 1
    device: torch.device | str = "cpu"

    def each(self, size: int) -> int:
        """Return the largest number of elements of a tensor of ``size`` elements that one of these ranks exchanges.

        It is a multiple of the block of elements that compressors scale together.
        """
        return -(-size // (self.count * BLOCK)) * BLOCK

    def part(self, size: int) -> slice:
        """Return the slice of a tensor of ``size`` elements that this rank exchanges.

        At the end of the tensor the slice is shorter than :meth:`each`, or empty.
        """
        each = self.each(size)
        return slice(min(self.index * each, size), min((self.index + 1) * each, size))

    def whole(self, part: T, size: int) -> T:
        """Gather the whole tensor of ``size`` elements from the slices of all ranks, and return it. Collective.
        ``part``: this rank's slice of the tensor (:meth:`part`).
        """
        if self.group is None:
            return part
        padded = torch.zeros(self.each(size), dtype=part.dtype, device=self.device)
        padded[: part.numel()] = part
        gathered = padded.new_empty(self.count * padded.numel())
        dist.all_gather_into_tensor(gathered, padded, group=self.group)
        return gathered[:size].to(part.device)


def replicas_of(held: Sequence[Held], mesh: Mesh) -> Replicas:
    """Return the ranks of this island that hold copies of the parameters ``held``, and share their exchange.

    If no other rank holds copies, the result is this rank alone.
    """
    names = {mesh.sharing(h.logical)[0] for h in held}
    if len(names) != 1 or mesh.size(*names) == 1:
        return Replicas()
    (name,) = names
    return Replicas(mesh.group(name), mesh.rank(name), mesh.size(name), mesh.device)
