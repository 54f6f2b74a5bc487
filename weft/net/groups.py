"""Process groups. All are created here, so that no rank waits longer in any of them than in the default group."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

#: Returns the group of some world ranks, this rank among them, with a name. Where views of a run follow each other, its
#: only entry has groups of earlier views (:mod:`weft.net.kept_groups`). Without an entry each group is made anew.
keepers: list[Callable[[Sequence[int], str], dist.ProcessGroup]] = []


def limit() -> timedelta | None:
    """Return the longest time that a rank waits for others in a collective of the default process group.

    Returns None for a simulated group, which moves nothing (backend ``fake``).
    """
    assert dist.group.WORLD is not None
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    # PyTorch has no public way to ask, and gives groups that are made later a limit of their own, up to 30 minutes.
    options = dist.group.WORLD._get_backend(torch.device(device)).options
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def new_group(ranks: Sequence[int], name: str, unique: str = "") -> dist.ProcessGroup:
    """Create the process group of the world ranks ``ranks``. Exactly these ranks must call this function.

    ``name``: description of the group. ``unique``: a text that no other group has; by default it is derived from the
    number of groups of just these ranks.
    """
    # PyTorch hashes how many groups the process is in, which differs between ranks, so that they would wait for groups
    # of different names. How many groups of just these ranks there are is the same on all of them.
    members, c10d = sorted(ranks), dist.distributed_c10d
    known = c10d._world.pg_group_ranks.values()
    count = sum(sorted(of_group) == members for of_group in known)
    unique = unique or f"{members} {count}"
    hashed = hashlib.sha1(unique.encode(), usedforsecurity=False)
    named = mock.patch.object(c10d, "_hash_ranks_to_str", lambda _: hashed.hexdigest())
    with named:
        group = dist.new_group(
            members, limit(), use_local_synchronization=True, group_desc=name
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


def group_along(ranks: torch.Tensor, axis: int, name: str) -> dist.ProcessGroup:
    """Return the process group of those ranks that differ from this rank only along one axis of the device mesh.

    ``ranks``: the mesh, a tensor of world ranks; ``axis``: number of the axis; ``name``: name of the axis, for the
    descriptions of groups. The call also creates the other groups along the axis, so all ranks of the mesh must call
    it.
    """
    own, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    own_group = world
    for members in ranks.movedim(axis, -1).reshape(-1, ranks.size(axis)).tolist():
        # ranks that are not in it take part too, as NCCL splits a communicator
        if len(members) == world.size():
            continue
        if not keepers:
            group = dist.new_group(members, limit(), group_desc=f"mesh_{name}")
            own_group = group if own in members else own_group
        elif own in members:
            own_group = keepers[-1](members, f"mesh_{name}")
    return own_group


def enter_group(ranks: Sequence[int], name: str) -> dist.Store:
    """Replace this process's default process group by a smaller one, of the world ranks ``ranks`` alone.

    This rank must be one of ``ranks``. All ranks of the old group must call this function, each with the ranks of its
    own new group, because the call waits for all of them. ``name``: a text that no other group has. Returns the
    key-value store of the old group. It is then the only connection to ranks outside the new group.
    """
    # PyTorch has no public way to ask for the store of a group.
    whole, rank, backend = (
        dist.distributed_c10d._get_default_store(),
        dist.get_rank(),
        dist.get_backend(),
    )
    device = (
        torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    )
    patience = None
    if backend != "fake":
        patience = limit()
        if whole.add("weft/met", 1) == dist.get_world_size():
            whole.set("weft/all-met", "")
        # who leaves earlier cuts connections that others are about to make
        whole.wait(["weft/all-met"])
    dist.destroy_process_group()
    dist.init_process_group(
        backend, store=dist.PrefixStore(name, whole), rank=list(ranks).index(rank), world_size=len(ranks),
        timeout=patience, device_id=device,
    )  # fmt: skip
    return whole


@contextmanager
def fake_rank(rank: int, world: int, backend: str = "fake") -> Iterator[None]:
    """Simulate a rank while the context lasts, with a default process group that moves nothing.

    ``rank``: number of the rank; ``world``: number of ranks; ``backend``: backend of the group.
    """
    # The fake group lives in torch.testing: there is no public spelling of it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(backend, rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
