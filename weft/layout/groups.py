"""Process groups. All are made here, so that in none a rank waits longer than in the default one."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def limit() -> timedelta | None:
    """How long ranks wait for each other in the default process group; None if it moves nothing (``fake``)."""
    assert dist.group.WORLD is not None
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    # PyTorch has no public way to ask, and gives groups that are made later a limit of their own, up to 30 minutes.
    options = dist.group.WORLD._get_backend(torch.device(device)).options
    found: timedelta | None = getattr(options, "_timeout", None)
    return found


def new_group(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """The group of these ranks of the world, which all call this, and no others."""
    group = dist.new_group(list(ranks), limit(), use_local_synchronization=True, group_desc=name)
    assert isinstance(group, dist.ProcessGroup)
    return group


def mesh_with_groups(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh with these ranks of the world at its places, and a group along each of its axes; all ranks call this."""
    own, groups, world = dist.get_rank(), list[dist.ProcessGroup](), dist.group.WORLD
    assert world is not None
    for axis, name in enumerate(names):
        for members in ranks.movedim(axis, -1).reshape(-1, ranks.size(axis)).tolist():
            group = world
            if len(members) < world.size():  # the others take part too, as NCCL splits a communicator
                group = dist.new_group(members, limit(), group_desc=f"mesh_{name}")
            if own in members:
                groups.append(group)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks.contiguous(), mesh_dim_names=names)
