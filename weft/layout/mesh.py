"""The mesh: which rank stands where, and the process group of every axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.errors import UsageError, WeftError
from weft.layout.groups import mesh_with_groups
from weft.layout.layout import AXES, BATCH_AXES, FOLDED, Layout
from weft.layout.placement import Place, rank_table

T = TypeVar("T")

#: Axes that exist as process groups today; ``island`` and ``ep`` are counted with and must be 1.
LIVE_AXES = ("pp", "dp", "shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """A layout laid over the ranks of the default process group. ``device_mesh`` is None on a single device.

    ``place`` is this rank's. ``data_mesh``: the same ranks as ``pp``, ``replica``, ``state`` and ``tp``
    (:class:`weft.layout.placement.Place` says what ``state`` is); ``near_mesh``: as ``apart`` and
    ``near``, of which ``near`` are the groups of ``layout.secondary`` neighbours along ``state``. ``step_group``: the
    ranks that take a step together, of which this is one; None on a single device.
    """

    layout: Layout
    device: torch.device
    place: Place
    device_mesh: DeviceMesh | None = None
    data_mesh: DeviceMesh | None = None
    near_mesh: DeviceMesh | None = None
    _size: dict[str, int] = field(init=False)
    _group: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    step_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        sizes = {axis: self.layout.size(axis) for axis in (*AXES, FOLDED)}
        object.__setattr__(self, "_size", sizes | {"state": self.layout.size("shard", "cp")})

    @classmethod
    def single(cls, device: torch.device | str = "cpu", layout: Layout | None = None) -> Mesh:
        """One device and no process group: every boundary is the identity."""
        layout = layout or Layout()
        return cls(layout, torch.device(device), Place.of(layout, 0))

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
        place = Place.of(layout, dist.get_rank())
        ranks = torch.from_numpy(rank_table(layout)[place.rank("island")].copy())  # [pp, dp, shard, cp, tp]
        device_mesh = mesh_with_groups(device.type, ranks, LIVE_AXES)
        # Context-parallel ranks share in holding the state: to the parameters they are data ranks like any other.
        places = ranks.reshape(layout.pp, layout.dp, layout.shard * layout.cp, layout.tp).sort(dim=2).values
        data_mesh = mesh_with_groups(device.type, places, ("pp", "replica", "state", "tp"))
        near_mesh = None
        if layout.secondary:
            near = places.unflatten(2, (-1, layout.secondary)).movedim(3, -1).flatten(0, -2)
            near_mesh = mesh_with_groups(device.type, near, ("apart", "near"))
        groups = {axis: device_mesh.get_group(axis) for axis in LIVE_AXES} | {"state": data_mesh.get_group("state")}
        for axis, group in groups.items():
            if dist.get_rank(group) != place.rank(axis):  # all index arithmetic rests on this
                raise RuntimeError(f"rank {dist.get_rank()} has another number along {axis} than its group gives it")
        return cls(layout, device, place, device_mesh, data_mesh, near_mesh, groups, dist.group.WORLD)

    def size(self, *axes: str) -> int:
        """Places along ``axes`` together. Plain integers from a dictionary, which ``torch.compile`` can read."""
        product = 1
        for axis in axes:
            product *= self._size[axis]
        return product

    def rank(self, axis: str) -> int:
        """This rank's coordinate along ``axis``, or along ``state``; it is also its rank in the axis's group."""
        return self.place.rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        return self._group[axis]

    @property
    def batch_rank(self) -> int:
        """Coordinate among the ranks that the sequences of a step are dealt out to."""
        return self.place.along(*BATCH_AXES)

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


def check_live(layout: Layout) -> None:
    """Refuse axes that are not built yet, by name."""
    for axis in (*AXES, FOLDED):
        if axis not in LIVE_AXES and layout.size(axis) > 1:
            raise UsageError(f"layout axis {axis!r} is not available yet; use {', '.join(LIVE_AXES)}")


def on_main(work: Callable[[], T], main: bool) -> T:
    """What ``work`` returns or raises on rank 0, on all ranks. Collective."""
    done: list[T | WeftError | None] = [None]
    if main:
        try:
            done[0] = work()
        except WeftError as error:
            done[0] = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(done, src=0)
    if isinstance(done[0], WeftError):
        raise done[0]
    return done[0]  # type: ignore[return-value]


def from_all(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What every rank of ``group`` (default: all) gives, in their order; of one process its own. Collective."""
    found = [mine]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        found *= dist.get_world_size(group)
        dist.all_gather_object(found, mine, group=group)
    return found
