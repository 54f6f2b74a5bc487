"""The mesh: which rank stands where, and the process group of every axis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.errors import UsageError
from weft.layout.dims import Dim, Logical, part
from weft.layout.groups import mesh_with_groups
from weft.layout.layout import AXES, CUTS, Layout

T = TypeVar("T")

#: Axes that exist as process groups today; ``ep`` is planned and must be 1.
LIVE_AXES = ("pp", "dp", "shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """A layout laid over the ranks of the default process group. ``device_mesh`` is None on a single device.

    ``data_mesh``: the same ranks as ``pp``, ``replica``, ``state`` and ``tp``. ``state`` are the ranks of ``shard`` and
    ``cp`` together, which share in holding the state; they are numbered by their rank in the world, whatever
    ``layout.order`` says, because that is how PyTorch numbers the ranks of a group. ``near_mesh``: as ``apart`` and
    ``near``, of which ``near`` are the groups of ``layout.secondary`` neighbours along ``state``.
    """

    layout: Layout
    device: torch.device
    device_mesh: DeviceMesh | None = None
    data_mesh: DeviceMesh | None = None
    near_mesh: DeviceMesh | None = None
    _size: dict[str, int] = field(init=False)
    _rank: dict[str, int] = field(default_factory=dict)
    _group: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = {axis: self.layout.size(axis) for axis in AXES}
        object.__setattr__(self, "_size", sizes | {"state": self.layout.size("shard", "cp")})

    @classmethod
    def single(cls, device: torch.device | str = "cpu", layout: Layout | None = None) -> Mesh:
        """One device and no process group: every boundary is the identity."""
        return cls(layout or Layout(), torch.device(device))

    @classmethod
    def create(cls, layout: Layout, device: torch.device | str) -> Mesh:
        """Lay ``layout`` over the initialised default process group.

        Raises :class:`UsageError` if the layout does not have exactly as many places as there are ranks.
        """
        device = torch.device(device)
        check_live(layout)
        if not dist.is_initialized():
            if layout.world > 1:
                raise UsageError(f"layout {layout} needs {layout.world} ranks but no process group is initialised")
            return cls.single(device, layout)
        if dist.get_world_size() != layout.world:
            raise UsageError(
                f"layout {layout} has {layout.world} places but {dist.get_world_size()} ranks were started; "
                f"start {layout.world} ranks or change --layout"
            )
        order = [axis for axis in layout.axis_order if axis in LIVE_AXES]
        laid = torch.arange(layout.world).view([layout.size(axis) for axis in order])
        ranks = laid.permute([order.index(axis) for axis in LIVE_AXES])  # the rank at each place
        device_mesh = mesh_with_groups(device.type, ranks, LIVE_AXES)
        # Context-parallel ranks share in holding the state: to the parameters they are data ranks like any other.
        places = ranks.reshape(layout.pp, layout.dp, layout.shard * layout.cp, layout.tp).sort(dim=2).values
        data_mesh = mesh_with_groups(device.type, places, ("pp", "replica", "state", "tp"))
        near_mesh = None
        if layout.secondary:
            near = places.unflatten(2, (-1, layout.secondary)).movedim(3, -1).flatten(0, -2)
            near_mesh = mesh_with_groups(device.type, near, ("apart", "near"))
            _check_numbering(near_mesh, "near")
        _check_numbering(device_mesh, *LIVE_AXES)
        _check_numbering(data_mesh, "replica", "state")
        own = {axis: device_mesh.get_local_rank(axis) for axis in LIVE_AXES}
        groups = {axis: device_mesh.get_group(axis) for axis in LIVE_AXES}
        own["state"], groups["state"] = data_mesh.get_local_rank("state"), data_mesh.get_group("state")
        return cls(layout, device, device_mesh, data_mesh, near_mesh, _rank=own, _group=groups)

    def size(self, *axes: str) -> int:
        """Places along ``axes`` together. Plain integers from a dictionary, which ``torch.compile`` can read."""
        product = 1
        for axis in axes:
            product *= self._size[axis]
        return product

    def rank(self, axis: str) -> int:
        """This rank's coordinate along ``axis``, or along ``state``; it is also its rank in the axis's group."""
        return self._rank.get(axis, 0)

    def group(self, axis: str) -> dist.ProcessGroup:
        return self._group[axis]

    @property
    def batch_rank(self) -> int:
        """Coordinate among the ranks that split the batch (``dp`` and ``shard`` together)."""
        return self.rank("dp") * self.size("shard") + self.rank("shard")

    @property
    def data_ranks(self) -> list[int]:
        """World ranks of those that see the step's data with this rank's part of the model, ``dp`` slowest."""
        if self.device_mesh is None:
            return [0]
        here = self.device_mesh.mesh[self.rank("pp"), ..., self.rank("tp")]
        ranks: list[int] = here.flatten().tolist()  # [dp, shard, cp] -> one number each
        return ranks

    @property
    def is_main(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def place(self, *dims: Dim, std: float | None, whole: bool = False) -> Logical:
        """The logical parameter with these dimensions, and the part of it at this place on ``tp``.

        ``whole=True`` keeps it whole although its dimensions could be cut (key/value heads fewer than ``tp``). With
        vocabulary passes the vocabulary is cut over ``pp`` too.
        """
        cut = [bool(CUTS.get(dim.name)) and not whole and self.size("tp") > 1 for dim in dims]
        if self.layout.vocab_barriers and self.size("pp") > 1:
            cut = [c or dim.name == "vocab" for c, dim in zip(cut, dims, strict=True)]
        box = tuple(
            tuple(i * dim.unit for i in part(dim.count, *self._cut_of(dim))) if c else (0, dim.size)
            for dim, c in zip(dims, cut, strict=True)
        )
        return Logical(dims, std, box, whole=not any(cut))  # type: ignore[arg-type]

    def _cut_of(self, dim: Dim) -> tuple[int, int]:
        """Into how many parts ``dim`` is cut and which of them is here."""
        tp, rank = self.size("tp"), self.rank("tp")
        if dim.name == "vocab" and self.layout.vocab_barriers:
            return self.size("pp") * tp, self.rank("pp") * tp + rank
        return tp, rank


def _check_numbering(mesh: DeviceMesh, *axes: str) -> None:
    """See that this rank's number in each axis's group is its coordinate, which all index arithmetic rests on."""
    for axis in axes:
        number, place = dist.get_rank(mesh.get_group(axis)), mesh.get_local_rank(axis)
        if number != place:
            raise RuntimeError(f"rank {dist.get_rank()} is number {number} of its {axis} group but stands at {place}")


def check_live(layout: Layout) -> None:
    """Refuse axes that are not built yet, by name."""
    for axis in AXES:
        if axis not in LIVE_AXES and layout.size(axis) > 1:
            raise UsageError(f"layout axis {axis!r} is not available yet; use {', '.join(LIVE_AXES)}")


def from_all(mine: T) -> list[T]:
    """What every rank of the default process group gives, in their order; of one process its own. Collective."""
    found = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found *= dist.get_world_size()
        dist.all_gather_object(found, mine)
    return found
