"""Experts that change their owners while training, with all of their state: weights, moments, averages.

Where loads stay uneven for long, better owners save copies in every pass, at the price of one move. A parameter then
holds other rows than those of its box, and says which; whoever reads the whole state has them brought home first.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from weft.parallel.experts.copy_placement import copies_away, swapped, with_copies
from weft.parallel.experts.members import Members
from weft.parallel.experts.rows import start_exchange
from weft.parallel.state import Held

#: Steps between two moves of a layer's experts, in which they must have paid.
REST = 16

Array = np.ndarray


def better_order(
    loads: Array, order: Array, sizes: Array, spare: int, cost: float
) -> Array:
    """Experts owner by owner: ``order``, or another one if a move to that pays until the next.

    ``sizes``: how many each rank owns; ``cost``: that of moving an expert, as a multiple of sending a copy of it. A
    copy is sent at least twice in a step, as weights and as gradients.
    """

    def copies(order: Array) -> int:
        owners = np.empty_like(order)
        owners[order] = np.arange(len(sizes)).repeat(sizes)
        return copies_away(with_copies(loads, owners, len(sizes), spare), order, sizes)

    new = swapped(loads, order, sizes)
    return (
        new
        if 2 * REST * (copies(order) - copies(new)) > cost * (new != order).sum()
        else order
    )


def tensors_of(state: Sequence[Held]) -> list[torch.Tensor]:
    """All that these parameters consist of."""
    return [
        t for h in state for t in (h.local, *(part.values for part in h.slots.values()))
    ]


class Places(NamedTuple):
    """Where a layer's experts are: the experts in the order of their places, owner by owner.

    ``sizes``: how many each rank owns; ``home``: the experts in the order in which owners had them at first.
    """

    order: Array
    sizes: Array
    home: Array


@torch.no_grad()
def move_experts(
    ranks: Members, state: Sequence[Held], places: Places, order: Array
) -> None:
    """Let owners have a layer's experts in this ``order``. Collective among the ranks that have them all."""
    me, ends = ranks.rank, places.sizes.cumsum()
    rank_of, start = (np.arange(ranks.count).repeat(places.sizes), ends - places.sizes)
    to = np.nonzero(order != places.order)[0]  # places that get another expert
    source = np.argsort(places.order)[order[to]]  # and where that has been
    leaving = [
        source[(rank_of[to] == r) & (rank_of[source] == me)] - start[me]
        for r in range(ranks.count)
    ]
    coming = [
        to[(rank_of[source] == r) & (rank_of[to] == me)] - start[me]
        for r in range(ranks.count)
    ]
    tensors = tensors_of(state)
    out, into = (torch.from_numpy(np.concatenate(one)) for one in (leaving, coming))
    rows = torch.cat([t[out.to(t.device)].flatten(1) for t in tensors], 1).to(
        ranks.mesh.device
    )
    found, work = start_exchange(
        rows,
        [len(one) for one in leaving],
        [len(one) for one in coming],
        ranks,
        "moves",
    )
    work.wait()
    for t, piece in zip(
        tensors, found.split([t[0].numel() for t in tensors], 1), strict=True
    ):
        t[into.to(t.device)] = piece.view(-1, *t.shape[1:]).to(t.device)
    mine = slice(start[me], ends[me])
    held = (
        None
        if (order[mine] == places.home[mine]).all()
        else tuple(order[mine].tolist())
    )
    for h in state:
        h.rows = held
        h.slots = {slot: replace(part, rows=held) for slot, part in h.slots.items()}
