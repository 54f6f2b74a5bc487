"""Moves experts between ranks while training, with all of their state: weights, moments, averages.

If loads stay uneven for long, better owners save copies in every pass, at the price of one move. A moved parameter then
holds other rows than those of its box, and says which. Readers of the whole state have the rows moved home first.
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
    """Return an order of experts that needs fewer copies, or ``order`` itself if moving the experts does not pay.

    An order lists all experts: those that the first rank owns, then those of the second, and so on. Moving pays if it
    costs less than the copies that it saves until experts may move again. Costs are multiples of sending an expert's
    weights once. A copy costs 2 per step: one for its weights, one for its gradients.

    Args:
        ``loads``: tokens routed to each expert.
        ``order``: the present order.
        ``sizes``: number of experts that each rank owns.
        ``spare``: number of other ranks' experts that a rank has room for.
        ``cost``: cost of moving one expert with its optimizer state.
    """

    def copies(order: Array) -> int:
        owners = np.empty_like(order)
        owners[order] = np.arange(len(sizes)).repeat(sizes)
        return copies_away(with_copies(loads, owners, len(sizes), spare), order, sizes)

    new = swapped(loads, order, sizes)
    saved = 2 * REST * (copies(order) - copies(new))
    return new if saved > cost * (new != order).sum() else order


def tensors_of(state: Sequence[Held]) -> list[torch.Tensor]:
    """Return this rank's tensors of the parameters in ``state``: for each parameter its value, then its slots."""
    return [
        t for h in state for t in (h.local, *(part.values for part in h.slots.values()))
    ]


class Places(NamedTuple):
    """The owners of a layer's experts.

    ``order``: all experts, those of the first owner, then those of the second owner, and so on; ``sizes``: number of
    experts that each rank owns; ``home``: the same list as ``order`` at the beginning, before any expert has moved.
    """

    order: Array
    sizes: Array
    home: Array


@torch.no_grad()
def move_experts(
    ranks: Members, state: Sequence[Held], places: Places, order: Array
) -> None:
    """Move a layer's experts between ranks, with their weights and optimizer slots. Collective among ``ranks``.

    ``state``: the parameters of the experts on this rank; ``places``: present owners; ``order``: all experts after the
    move, those of the first owner, then those of the second owner, and so on.
    """
    me, ends = ranks.rank, places.sizes.cumsum()
    rank_of, start = np.arange(ranks.count).repeat(places.sizes), ends - places.sizes
    to = np.nonzero(order != places.order)[0]  # places that get another expert
    source = np.argsort(places.order)[order[to]]  # and where that has been

    def rows_by_peer(rows: Array, here: Array, peer: Array) -> list[Array]:
        return [rows[here & (peer == rank)] - start[me] for rank in range(ranks.count)]

    leaving = rows_by_peer(source, rank_of[source] == me, rank_of[to])
    coming = rows_by_peer(to, rank_of[to] == me, rank_of[source])
    out, into = (torch.from_numpy(np.concatenate(rows)) for rows in (leaving, coming))
    tensors = tensors_of(state)
    # [experts, numbers of all tensors of an expert]
    rows = torch.cat([t[out.to(t.device)].flatten(1) for t in tensors], 1)
    sent, received = [*map(len, leaving)], [*map(len, coming)]
    rows = rows.to(ranks.mesh.device)
    arriving, work = start_exchange(rows, sent, received, ranks, "moves")
    work.wait()
    pieces = arriving.split([t[0].numel() for t in tensors], 1)
    for t, piece in zip(tensors, pieces, strict=True):
        t[into.to(t.device)] = piece.view(-1, *t.shape[1:]).to(t.device)
    own = slice(start[me], ends[me])
    is_home = (order[own] == places.home[own]).all()
    held = None if is_home else tuple(order[own].tolist())
    for h in state:
        h.rows = held
        h.slots = {slot: replace(part, rows=held) for slot, part in h.slots.items()}
