"""Collectives over ``tp`` that have started: each rank's messages travel in a process group of their own.

Gloo sends a message once its receiver has said that it is ready, and says so on the connection on which it also sends.
In an all-to-all exchange over one group, a rank that comes a little later starts to send at once, because the other
rank is ready. It then says that it is ready itself, behind all it sends. The other rank begins to send only when it
has received everything, so that the two directions of the cable are used one after the other: exchanges of ranks that
do not arrive within the latency of a message took twice as long. Where only one member of a group sends, nothing
stands in front of what the receivers say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from weft.net.groups import new_group

T = torch.Tensor

# PyTorch 2.13 renamed these two and warns at every call by the old name, the only one that 2.11 has.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class StartedCollective:
    """Handle of a collective that runs in the background; :meth:`land` waits for it and returns its result.

    ``result``: the tensor that the collective fills. ``work``: PyTorch's work object; None if there is nothing to wait
    for. ``unpack``: function that brings the filled tensor into the shape of the result.
    """

    def __init__(
        self, result: T, work: Any = None, unpack: Callable[[T], T] = lambda x: x
    ) -> None:
        self.result, self.work, self.unpack = result, work, unpack

    def land(self) -> T:
        """Wait until the collective has ended, and return its result in its final shape."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.unpack(self.result)

    def has_ended(self) -> bool:
        """Return whether :meth:`land` would return at once."""
        return self.work is None or self.work.is_completed()


class OneWayGroups(NamedTuple):
    """Process groups of the same ranks. ``groups``: for each rank, the group in which only this rank sends. ``world``:
    weak reference to the default process group at their creation, with which they end.
    """

    groups: Sequence[dist.ProcessGroup]
    world: Any


_one_way: WeakKeyDictionary[dist.ProcessGroup, OneWayGroups] = WeakKeyDictionary()


def one_way_groups(group: dist.ProcessGroup) -> Sequence[dist.ProcessGroup]:
    """Return, for each rank of ``group``, a group of the same ranks in which only this rank sends.

    The first call for ``group`` makes the groups. All ranks of ``group`` must make that call, and no others.
    """
    world = dist.group.WORLD
    known = _one_way.get(group)
    # groups that outlive a view of a run keep their members, and lose those that were made here
    if known is None or known.world() is not world:
        ranks = dist.get_process_group_ranks(group)
        groups = []
        for rank in ranks:
            group_of_rank = new_group(ranks, f"messages of rank {rank}")
            groups.append(group_of_rank)
        known = _one_way[group] = OneWayGroups(groups, ref(world))
    return known.groups


class Exchange(NamedTuple):
    """Collectives that are waited for together: ``works``, PyTorch's handles."""

    works: Sequence[dist.Work]

    def wait(self) -> None:
        """Wait until all have ended."""
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        """Return whether all have ended."""
        return all(work.is_completed() for work in self.works)


def _exchange(came: T, leaving: Sequence[T], group: dist.ProcessGroup) -> Exchange:
    """Start to send ``leaving[r]`` to each rank ``r`` of ``group``, and to receive what rank ``r`` sends in
    ``came[r]``. All tensors have one shape, and are contiguous.
    """
    rank, works = group.rank(), list[dist.Work]()
    for source, messages in enumerate(one_way_groups(group)):
        sent = [*leaving] if source == rank else None
        work = dist.scatter(came[source], sent, group=messages, async_op=True, group_src=source)  # fmt: skip
        assert work is not None
        works.append(work)
    return Exchange(works)


def swap(came: Sequence[T], leaving: Sequence[T], group: dist.ProcessGroup) -> None:
    """Send ``leaving[r]`` to each rank ``r`` of ``group``, and receive what rank ``r`` sends in ``came[r]``; return
    when all is there. All tensors are contiguous; empty ones are not sent.
    """
    rank, works = group.rank(), list[dist.Work | None]()
    groups = one_way_groups(group)
    came[rank].copy_(leaving[rank])
    for source, x in enumerate(came):
        if source != rank and x.numel():
            works.append(dist.irecv(x, group=groups[source], group_src=source))
    for target, x in enumerate(leaving):
        if target != rank and x.numel():
            works.append(dist.isend(x, group=groups[rank], group_dst=target))
    for work in works:
        assert work is not None
        work.wait()


def gather_flight(x: T, group: dist.ProcessGroup) -> StartedCollective:
    """Start to gather ``x`` ``[batch, seq/tp, ...]`` over ``group``; the result is ``[batch, seq, ...]``."""
    ranks = group.size()
    parts, x = x.new_empty(ranks, *x.shape), x.contiguous()
    if dist.get_backend(group) == "gloo":
        work: Any = _exchange(parts, [x] * ranks, group)
    else:
        work = all_gather(parts.flatten(0, 1), x, group=group, async_op=True)
    # [tp, batch, seq/tp, ...] -> [batch, seq, ...]
    return StartedCollective(
        parts, work, lambda parts: parts.transpose(0, 1).flatten(1, 2)
    )


def scatter_flight(x: T, group: dist.ProcessGroup) -> StartedCollective:
    """Start to sum ``x`` ``[batch, seq, ...]`` over ``group``; the result is this rank's ``[batch, seq/tp, ...]``."""
    # [batch, seq, ...] -> [tp, batch, seq/tp, ...]
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    if x.device.type == "cpu":
        # gloo's reduce-scatter is an all-reduce, which sends twice the bytes
        came = torch.empty_like(parts)
        if dist.get_backend(group) == "gloo":
            work: Any = _exchange(came, parts.unbind(0), group)
        else:
            work = dist.all_to_all_single(came, parts, group=group, async_op=True)
        return StartedCollective(came, work, lambda came: came.sum(0))
    own = torch.empty_like(parts[0])
    started = reduce_scatter(own, parts.flatten(0, 1), group=group, async_op=True)
    return StartedCollective(own, started)


def sum_flight(x: T, group: dist.ProcessGroup) -> StartedCollective:
    """Start an all-reduce that sums ``x`` over ``group``; the result is the whole sum, shaped like ``x``."""
    total = x.clone(memory_format=torch.contiguous_format)
    return StartedCollective(total, dist.all_reduce(total, group=group, async_op=True))
