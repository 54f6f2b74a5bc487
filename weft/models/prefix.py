"""Prefix scan over states of linear attention that are spread along a mesh axis.

The scan gives the state before each rank's stretch, a run of tokens of each row. States form a monoid: the state after
a stretch is the stretch's own state plus what remains of the state before. Two routines combine states: all ranks
gather all states (LASP-2, Sun et al. 2025, 2502.07563), or each rank passes the running state to the next, in pieces
(ZeCO, Chou et al. 2025, 2507.01004). The communication of neither depends on the length of the sequence.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

T = torch.Tensor

#: Pieces in which a state is passed on: the next is combined while one travels.
PIECES = 4


class StretchOwners(NamedTuple):
    """The ranks that hold the stretches (runs of tokens) of a row.

    ``owner[s]``: the rank that holds stretch ``s``. ``rank``: this rank.
    """

    owner: tuple[int, ...]
    rank: int

    @property
    def own(self) -> list[int]:
        """Indices, in the row, of the stretches of tokens that this rank holds, ascending."""
        return [s for s, who in enumerate(self.owner) if who == self.rank]


def prefixes(
    states: dict[int, T],
    through: Sequence[T],
    places: StretchOwners,
    group: str,
    routine: str,
    backward: bool = False,
) -> dict[int, T]:
    """Return the state of linear attention before each stretch of tokens that this rank holds, by stretch number.

    The sequence is cut into stretches, numbered in order. A stretch turns the state before it into the state after it:
    it multiplies the state by its factor in ``through``, and adds its own part in ``states``. The state before the
    first stretch is zero. Collective over ``group``, unless one rank has all stretches.

    Args:
        ``states``: for each stretch of this rank, by number, what it adds: ``[rows, heads, dk, dv]``.
        ``through``: for every stretch of all ranks, its factor, broadcastable to that shape.
        ``places``: the ranks that hold the stretches.
        ``group``: name of the process group.
        ``routine``: with ``gather`` all ranks gather all states; otherwise each rank passes the state on to the next.
        ``backward``: whether to run from the last stretch to the first, for gradients. "Before" then means "after".
    """
    order = range(len(places.owner))[:: -1 if backward else 1]
    if len(set(places.owner)) == 1:
        return _fold(order, states, through, places)
    if routine == "gather":
        return _fold(order, _gather(states, places, group), through, places)
    return _pass_on(order, states, through, places, group)


def _fold(
    order: range, states: dict[int, T], through: Sequence[T], places: StretchOwners
) -> dict[int, T]:
    before, running = {}, torch.zeros_like(next(iter(states.values())))
    for s in order:
        if places.owner[s] == places.rank:
            before[s] = running
        running = states[s] + through[s] * running
    return before


def _gather(states: dict[int, T], places: StretchOwners, group: str) -> dict[int, T]:
    own_states = torch.stack([states[s] for s in places.own])
    peers = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    everyone = [torch.empty_like(own_states) for _ in set(places.owner)]
    dist.all_gather(everyone, own_states, group=peers)
    gathered: dict[int, T] = {}
    for who, theirs in enumerate(everyone):
        gathered |= zip(places._replace(rank=who).own, theirs, strict=True)
    return gathered


def _pass_on(
    order: range,
    states: dict[int, T],
    through: Sequence[T],
    places: StretchOwners,
    group: str,
) -> dict[int, T]:
    peers = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    before: dict[int, T] = {}
    sent: list[tuple[dist.Work, T]] = []
    last = order[-1]
    for number, s in enumerate(order):
        if places.owner[s] != places.rank:
            continue
        previous = order[number - 1] if number else None
        following = order[number + 1] if s != last else None
        incoming = torch.zeros_like(states[s])
        outgoing = torch.empty_like(incoming)
        allowed = through[s].expand_as(incoming)
        if previous is not None and places.owner[previous] == places.rank:
            incoming.copy_(before.pop(-1))
        tensors = (incoming, outgoing, states[s], allowed)
        pieces = zip(*(x.chunk(PIECES, dim=2) for x in tensors), strict=True)
        for piece, (into, out, own, let) in enumerate(pieces):
            if previous is not None and places.owner[previous] != places.rank:
                arrived = into.new_empty(into.shape)
                dist.recv(
                    arrived, group=peers, group_src=places.owner[previous], tag=piece
                )
                into.copy_(arrived)
            out.copy_(torch.addcmul(own, let, into))
            if following is not None and places.owner[following] != places.rank:
                leaving = out.contiguous()
                work = dist.isend(
                    leaving, group=peers, group_dst=places.owner[following], tag=piece
                )
                assert work is not None
                sent.append((work, leaving))
        before[s] = incoming
        if following is not None and places.owner[following] == places.rank:
            before[-1] = outgoing
    for work, _ in sent:
        work.wait()
    return before
