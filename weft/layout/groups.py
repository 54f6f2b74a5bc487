"""Process groups. All are made here, so that in none a rank waits longer than in the default one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


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


def group_along(ranks: torch.Tensor, axis: int, name: str) -> dist.ProcessGroup:
    """This rank's group along one axis of a table of ranks; all ranks of the table call this, and make all groups."""
    own, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    found = world
    for members in ranks.movedim(axis, -1).reshape(-1, ranks.size(axis)).tolist():
        if len(members) < world.size():  # ranks that are not in it take part too, as NCCL splits a communicator
            group = dist.new_group(members, limit(), group_desc=f"mesh_{name}")
            found = group if own in members else found
    return found


@contextmanager
def fake_rank(rank: int, world: int, backend: str = "fake") -> Iterator[None]:
    """In here a default process group that moves nothing: one process sees what ``rank`` of ``world`` would do."""
    # The fake group lives in torch.testing: there is no public spelling of it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(backend, rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
