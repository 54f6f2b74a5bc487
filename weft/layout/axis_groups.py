"""The process groups of a mesh: those of its axes, and of what is folded over them."""

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.layout.axes import FOLDED, LIVE_AXES
from weft.layout.layout import Layout
from weft.layout.placement import ExpertSizes, Place, expert_table, rank_table
from weft.net.groups import group_along


class AxisGroups(NamedTuple):
    """The position of this rank in a layout, and its process groups, as :class:`weft.layout.mesh.Mesh` needs them.

    ``place``: this rank's coordinates. ``device_mesh``: the ranks as PyTorch's mesh. ``groups``: process groups by the
    name of their axis. ``step_group``: the ranks that take a step together.
    """

    place: Place
    device_mesh: DeviceMesh
    groups: dict[str, dist.ProcessGroup]
    step_group: dist.ProcessGroup


def axis_groups(layout: Layout, device: torch.device, table: np.ndarray) -> AxisGroups:
    """Create the process groups of one or more meshes that have the same layout, and return those of this rank.

    The meshes have no rank in common, and this rank belongs to one of them. All ranks of the default process group must
    make this call. ``layout``: the layout of each mesh; ``device``: device on which this rank computes; ``table``:
    world ranks, ``[mesh, pp, dp, shard, cp, tp]``, ascending along every axis.
    """
    rank = dist.get_rank()
    ranks = torch.from_numpy(table.copy())
    own = int(np.argwhere(table == rank)[0][0])
    place = Place.of(layout, int(rank_table(layout)[0][table[own] == rank][0]))
    groups = {
        name: group_along(ranks, axis, name) for axis, name in enumerate(LIVE_AXES, 1)
    }
    # Context-parallel ranks share in holding the state: to the parameters they are data ranks like any other.
    holders = ranks.flatten(3, 4).sort(dim=3).values  # [mesh, pp, dp, state, tp]
    groups["state"] = group_along(holders, 3, "state")
    if layout.ep > 1:
        from weft.layout.placement_groups import exchange_table, expert_blocks

        folded = torch.from_numpy(expert_table(layout, table).copy())
        together = torch.from_numpy(exchange_table(layout, table).copy())
        groups |= {
            name: group_along(folded, i, name)
            for i, name in enumerate(ExpertSizes._fields, 2)
        }
    for axis, group in groups.items():
        # all index arithmetic rests on this
        if dist.get_rank(group) != place.rank(axis):
            raise RuntimeError(
                f"rank {rank} has another number along {axis} than its group gives it"
            )
    if layout.ep > 1:
        groups["exchange"] = groups[FOLDED]
        if layout.folds_tp:
            groups["exchange"] = group_along(together, -1, "exchange")
        for block in expert_blocks(layout):
            blocks = together.unflatten(-1, (-1, block))
            groups[f"within {block}"] = group_along(blocks, -1, f"within_{block}")
            groups[f"across {block}"] = group_along(blocks, -2, f"across_{block}")
    if layout.secondary:
        near = holders.unflatten(3, (-1, layout.secondary))
        groups["near"] = group_along(near, 4, "near")
    device_mesh = DeviceMesh.from_group(
        [groups[axis] for axis in LIVE_AXES],
        device.type,
        mesh=ranks[own].contiguous(),
        mesh_dim_names=LIVE_AXES,
    )
    step = group_along(ranks.flatten(1).sort(dim=1).values, 1, "step")
    return AxisGroups(place, device_mesh, groups, step)


def numbers_within(group: dist.ProcessGroup, whole: dist.ProcessGroup) -> list[int]:
    """Return the rank in the larger group ``whole`` of each member of ``group``, in the order of ``group``."""
    ranks = dist.get_process_group_ranks(group)
    return [dist.get_group_rank(whole, rank) for rank in ranks]
