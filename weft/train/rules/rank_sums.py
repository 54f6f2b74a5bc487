"""Sums over the ranks that hold the other shards of a parameter, for update rules.

An update rule sees this rank's shard of each parameter. Whatever else the rule needs it gets by sums over the ranks
among which a dimension is cut, so that its update equals that of one device under every layout. All ranks that hold
shards of the same parameters must call a rule with these parameters in the same order, even if they hold no rows of
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft.layout.axes import MODEL_AXES
from weft.layout.dims import Tensor, slices
from weft.layout.mesh import Mesh
from weft.layout.parts import NAMES, Part
from weft.parallel.state import Held

T = torch.Tensor


class Extent(NamedTuple):
    """One dimension of a slot (a tensor that an update rule keeps for a parameter).

    ``of``: index of the parameter's dimension that the slot's dimension follows. The slot then has one entry for every
    ``per`` elements of that dimension. For example, ``Extent(1, per=2)`` has 512 entries if the parameter has 1,024
    columns. None: the slot's dimension follows none of the parameter, and has ``size`` entries.
    """

    of: int | None
    size: int = 0
    per: int = 1


@dataclass(frozen=True)
class RankSums:
    """Collectives over the ranks that hold different shards of a parameter, for update rules."""

    mesh: Mesh

    def axes(self, held: Held, dims: Sequence[int]) -> list[str]:
        """Return the mesh axes larger than 1 that cut the parameter ``held`` along some dimensions.

        ``dims``: indices of these dimensions.
        """
        _, sharing = self.mesh.sharing(held.logical)
        cutting = [axis for i in dims for axis in held.logical.cuts[i]] + [sharing] * (
            0 in dims
        )
        return [axis for axis in dict.fromkeys(cutting) if self.mesh.size(axis) > 1]

    def sum(self, x: T, held: Held, *dims: int) -> T:
        """Sum ``x`` in place over ranks, and return it. Collective.

        The ranks are those among which the parameter ``held`` is cut along the dimensions with indices ``dims``.
        """
        return self._reduced(x, held, dims, dist.ReduceOp.SUM)

    def largest(self, x: T, held: Held, *dims: int) -> T:
        """Replace ``x``, in place, by its elementwise maximum over ranks, and return it. Collective.

        The ranks are those among which the parameter ``held`` is cut along the dimensions with indices ``dims``.
        """
        return self._reduced(x, held, dims, dist.ReduceOp.MAX)

    def _reduced(
        self, x: T, held: Held, dims: Sequence[int], op: dist.ReduceOp.RedOpType
    ) -> T:
        axes = self.axes(held, dims)
        there = x.to(self.mesh.device)  # the state may be on the host
        for axis in axes:
            dist.all_reduce(there, op, group=self.mesh.group(axis))
        return x.copy_(there) if axes and there is not x else x

    def whole(self, x: T, held: Held) -> T:
        """Return the whole tensor of which each rank has a shard ``x``, cut like the parameter ``held``. Collective."""
        full = x.new_zeros(held.logical.shape)
        full[slices(held.box)] = x
        return self.sum(full, held, *range(full.dim()))

    def own_part(self, full: T, held: Held) -> T:
        """Return this rank's shard of ``full``, a whole tensor shaped like the parameter ``held``."""
        return full[slices(held.box)]

    def agreed(self, x: T) -> T:
        """Replace ``x``, in place, by the value of one rank, so that all ranks that share the parameters have the
        same bits.

        All these ranks must have computed ``x`` from the same values, and ``x`` must be a whole result, not a shard.
        An example is singular vectors, which processors compute differently: by rounding, or by the choice among
        equal values.
        """
        there = x.to(self.mesh.device)
        for axis in ("dp", "state", *MODEL_AXES):
            if self.mesh.size(axis) > 1:
                group = self.mesh.group(axis)
                dist.broadcast(there, dist.get_global_rank(group, 0), group=group)
        return x.copy_(there) if there is not x else x

    def slot(
        self, held: Held, *extents: Extent, dtype: torch.dtype | None = None
    ) -> Part:
        """Return a slot of zeros (a tensor to keep for the parameter ``held``) with the dimensions ``extents``.

        Slot dimensions that follow a dimension of the parameter are cut over ranks like that dimension. ``dtype``: by
        default that of the parameter.
        """
        dims = held.logical.dims
        here = [(0, e.size) if e.of is None else held.box[e.of] for e in extents]
        box = tuple(
            (lo // e.per, -(-hi // e.per))
            for (lo, hi), e in zip(here, extents, strict=True)
        )
        shape = tuple(
            -(-(e.size if e.of is None else dims[e.of].size) // e.per) for e in extents
        )
        names = tuple("" if e.of is None else dims[e.of].name for e in extents)
        left_out = [i for i in range(len(dims)) if all(e.of != i for e in extents)]
        replica, replicas = held.placement.replica, held.placement.replicas
        # ranks that differ in nothing but these hold the same
        for axis in self.axes(held, left_out):
            replica += replicas * self.mesh.rank(axis)
            replicas *= self.mesh.size(axis)
        values = torch.zeros(
            [hi - lo for lo, hi in box],
            dtype=dtype or held.local.dtype,
            device=held.local.device,
        )
        return Part(
            values, box, Tensor(shape, NAMES[values.dtype], names), replica, replicas
        )


def like(held: Held, dtype: torch.dtype | None = None) -> Part:
    """Return a slot of zeros (a tensor to keep for the parameter ``held``), shaped and cut like the parameter.
    ``dtype``: its type; None: that of the parameter.
    """
    return held.part(torch.zeros_like(held.local, dtype=dtype))


def count_update(held: Sequence[Held]) -> int:
    """Count one more update of the parameters ``held``, and return how many updates there have been, this one included.

    The parameters must always be updated together. A rule must also count updates of parameters of which this rank
    holds no rows: the count seeds random directions that must be equal on all ranks.
    """
    for h in held:
        h.updates += 1
    return int(held[0].updates.item()) if held else 0


def logical_positions(held: Held, first: int = 0, last: int | None = None) -> T:
    """Return the index of each element of this rank's rows in the flattened whole tensor of ``held``. Int64.

    ``first``: index of the first local row to take. ``last``: end of the rows, exclusive; None: to the end.
    """
    positions = torch.zeros((), dtype=torch.int64, device=held.local.device)
    (begin, end), *others = held.box
    rows = (begin + first, end if last is None else begin + last)
    for (lo, hi), size in zip((rows, *others), held.logical.shape, strict=True):
        positions = positions[..., None] * size + torch.arange(
            lo, hi, device=held.local.device
        )
    return positions
