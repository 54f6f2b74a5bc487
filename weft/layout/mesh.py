"""The mesh: the position of each rank, and the process group of every axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.errors import UsageError, WeftError
from weft.layout.axes import AXES, BATCH_AXES, FOLDED
from weft.layout.dims import Logical
from weft.layout.layout import Layout
from weft.layout.placement import Place, expert_sizes, rank_table
from weft.net.groups import enter_group

if TYPE_CHECKING:
    from weft.layout.sums import TokenSums

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """The layout of an island over the ranks of the default process group, and this rank's position in it.

    An island is a group of ranks that trains as if there were no others. Without islands it is all ranks.

    Attributes:
        ``layout``: number of ranks along each axis of this island.
        ``device``: what this rank computes on.
        ``place``: this rank's coordinates.
        ``device_mesh``: the same ranks as PyTorch's mesh; None on a single device.
        ``step_group``: the ranks of this island, which take a step together; None on a single device.
        ``island``, ``islands``: number of this island, and how many islands there are.
        ``island_store``: store that the ranks of all islands share; None without islands.
        ``sums``: object that sums activations over ``tp`` during generation, in place of the process group of ``tp``.
            Every rank of ``tp`` then holds all tokens where norms are computed. None in training.
        ``uneven``: whether ranks have different numbers of rows, because slow ones get fewer.

    :meth:`group` knows a group of ranks by the name of its axis. Some groups have names of their own:

        ``state``: the ranks of ``shard`` and ``cp`` together.
        ``expert_state``, ``expert_dp``: ranks with the same experts, which share the experts' state or replicate it.
        ``exchange``: ranks that have all experts together.
        ``within n``, ``across n``: a block of n neighbours of ``exchange``; ranks at the same position in each block.
        ``near``: neighbours along ``state``.

    ``near`` needs ``layout.secondary``. The groups of experts need ``layout.ep`` above 1.
    """

    layout: Layout
    device: torch.device
    place: Place
    device_mesh: DeviceMesh | None = None
    _size: dict[str, int] = field(init=False)
    _group: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    step_group: dist.ProcessGroup | None = None
    island: int = 0
    islands: int = 1
    island_store: dist.Store | None = None
    sums: TokenSums | None = None
    uneven: bool = False

    def __post_init__(self) -> None:
        sizes = {axis: self.layout.size(axis) for axis in (*AXES, FOLDED)}
        sizes |= {
            "state": self.layout.size("shard", "cp"),
            "near": self.layout.secondary,
        }
        sizes |= expert_sizes(self.layout)._asdict()
        object.__setattr__(self, "_size", sizes)

    @classmethod
    def single(
        cls, device: torch.device | str = "cpu", layout: Layout | None = None
    ) -> Mesh:
        """Return the mesh of a single device, without process groups. Collectives return their input.

        A model of such a mesh computes with its parameters themselves, in float32 or float64: computing in bfloat16
        with float32 parameters needs a process group, also of one rank (:meth:`create`). ``layout``: a layout of one
        rank, which may set other fields than axes; by default that of :class:`Layout`.
        """
        layout = layout or Layout()
        return cls(layout, torch.device(device), Place.of(layout, 0))

    @classmethod
    def create(
        cls,
        layout: Layout,
        device: torch.device | str,
        needed: float = 0,
        uneven: bool = False,
    ) -> Mesh:
        """Return the mesh of ``layout`` over the default process group, which must have been initialised.

        With several islands the default process group is replaced: it then has the ranks of this rank's island only.
        ``device``: device on which this rank computes. Shares of ``tp`` that are ``"auto"`` are measured. ``needed``:
        bytes of all weights, for these shares; 0: memory does not matter. ``uneven``: as the attribute. Raises
        :class:`UsageError` if the number of ranks is not that of the layout.
        """
        device = torch.device(device)
        if not dist.is_initialized():
            if layout.world > 1:
                raise UsageError(
                    f"layout {layout} needs {layout.world} ranks but no process group is initialised"
                )
            return cls.single(device, layout)
        if dist.get_world_size() != layout.world:
            raise UsageError(
                f"layout {layout} has {layout.world} places but {dist.get_world_size()} ranks were started; "
                f"start {layout.world} ranks or change --layout"
            )
        if layout.tp_shares == "auto":
            from weft.layout.rank_power import with_measured_shares

            layout = with_measured_shares(layout, device, needed)
        rank, island, islands, island_store = dist.get_rank(), 0, layout.island, None
        if islands > 1:
            from weft.layout.placement_groups import island_ranks

            island, members = island_ranks(layout, rank)
            layout = layout.inside
            island_store = enter_group(members, f"island-{island}")
        from weft.layout.axis_groups import axis_groups

        live = axis_groups(layout, device, rank_table(layout))
        apart = island, islands, island_store
        return cls(layout, device, *live, *apart, uneven=uneven)

    def become(self, other: Mesh) -> None:
        """Replace all fields of this mesh by those of ``other``, so that objects that refer to this mesh use the new
        groups.
        """
        vars(self).update(vars(other))

    def size(self, *axes: str) -> int:
        """Return the number of ranks along ``axes`` together.

        It is a product of plain integers, which ``torch.compile`` can trace.
        """
        product = 1
        for axis in axes:
            product *= self._size[axis]
        return product

    def rank(self, axis: str) -> int:
        """Return this rank's coordinate along ``axis``, which is also its rank in the group of the axis."""
        return self.place.rank(axis)

    def on_main(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the first rank of the step group only; return its result, or raise its error, on every rank.

        The step group has all ranks of this island, and each of them must make this call. Only a :class:`WeftError` is
        passed to the other ranks; any other error is raised on the first rank alone.
        """
        done: list[T | WeftError | None] = [None]
        if self.step_group is None or self.step_group.rank() == 0:
            try:
                done[0] = work()
            except WeftError as error:
                done[0] = error
        if self.step_group is not None and self.step_group.size() > 1:
            dist.broadcast_object_list(done, group_src=0, group=self.step_group)
        if isinstance(done[0], WeftError):
            raise done[0]
        return done[0]  # type: ignore[return-value]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of an axis, or of another group whose name :class:`Mesh` lists."""
        return self._group[axis]

    def sharing(self, logical: Logical) -> tuple[str, str]:
        """Return the names of two groups of ranks: the ranks with the same part of a parameter's state, and the
        ranks that share it.

        The second group divides the state among its ranks. The groups are ``expert_dp`` and ``expert_state`` if the
        parameter ``logical`` is cut by ``ep``, else ``dp`` and ``state``.
        """
        if logical.cut_by(FOLDED):
            return ("expert_dp", "expert_state")
        return ("dp", "state")

    @property
    def batch_rank(self) -> int:
        """Coordinate of this rank among the ranks over which the sequences of a step are distributed."""
        return self.place.along(*BATCH_AXES)

    @property
    def data_ranks(self) -> list[int]:
        """The ranks that have this rank's coordinates along ``pp`` and ``tp``.

        They are ordered by their coordinates along ``dp``, ``shard`` and ``cp``, of which ``dp`` varies slowest.
        """
        if self.device_mesh is None:
            return [0]
        here = self.device_mesh.mesh[self.rank("pp"), ..., self.rank("tp")]
        ranks: list[int] = here.flatten().tolist()  # [dp, shard, cp] -> one number each
        return ranks

    @property
    def is_main(self) -> bool:
        """Whether this is the first rank of its island."""
        return not dist.is_initialized() or dist.get_rank() == 0

    @property
    def speaks(self) -> bool:
        """Whether this rank prints: the first rank of the first island."""
        return self.is_main and not self.island


def from_all(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather the ``value`` of every rank of ``group`` into a list in rank order. Collective.

    ``group``: the process group, by default that of all ranks.
    """
    values = [value]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        values *= dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
    return values
