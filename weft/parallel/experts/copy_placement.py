"""Places copies of experts by how often each is chosen: pure functions of numbers on the host.

A placement is a table ``[experts, ranks]`` of the ranks that have a copy of each expert (at most one per rank), or
``order``: experts owner by owner. Choices of an expert are divided evenly among its copies.
"""

import numpy as np
import torch

Array = np.ndarray
T = torch.Tensor

#: Planning ends where the most loaded rank has no more than this times the mean; where it ends above ``NEARLY``, it
#: begins once more elsewhere.
ENOUGH, NEARLY = 1.02, 1.05


def loads_of_ranks(loads: Array, copies: Array) -> Array:
    """Return the load of each rank, ``[ranks]``, where an expert's load is divided evenly among the expert's copies.

    ``loads``: tokens routed to each expert; ``copies``: the ranks that have a copy of each expert, ``[experts,
    ranks]``.
    """
    return np.asarray((loads / copies.sum(1)) @ copies)


def with_copies(loads: Array, owners: Array, ranks: int, spare: int) -> Array:
    """Choose the ranks that compute each expert so that the ranks' loads are even: bool ``[experts, ranks]``.

    ``loads``: tokens routed to each expert; ``owners``: the rank that owns each expert; ``spare``: number of other
    ranks' experts that a rank has room for. An expert is computed by its owner, by ranks with a copy of it, or by both.
    Few copies are preferred, as each costs the transfer of an expert's weights.
    """
    own = np.eye(ranks, dtype=bool)[owners]
    loads = loads / max(1, loads.sum()) * ranks  # so that a rank has 1 on average

    def largest(copies: Array) -> float:
        return float(loads_of_ranks(loads, copies).max())

    copies = evened(loads, own, own, spare)
    if largest(copies) <= NEARLY:
        return copies
    other = evened(loads, halved(loads, own, spare), own, spare)
    return min(copies, other, key=largest)


def halved(loads: Array, own: Array, spare: int) -> Array:
    """Give experts with large loads more copies; return the ranks that have each expert, bool ``[experts, ranks]``.

    At first each expert is on its owner alone. Then the expert with the largest load per copy is copied to the least
    loaded rank that has room for it (after DeepSeek's EPLB). This is repeated until no copy has more than half of a
    rank's mean load, or until no rank has room. ``loads``: load of each expert, 1 being a rank's mean load; ``own``:
    whether a rank owns an expert, bool ``[experts, ranks]``; ``spare``: number of other ranks' experts that a rank has
    room for.
    """
    copies = own.copy()
    while True:
        shares = loads / copies.sum(1)
        expert = shares.argmax()
        room = ((copies & ~own).sum(0) < spare) & ~copies[expert]
        if shares[expert] <= 0.5 or not room.any():
            return copies
        copies[expert, np.where(room, shares @ copies, np.inf).argmin()] = True


def evened(loads: Array, copies: Array, own: Array, spare: int) -> Array:
    """Change which ranks have each expert until their loads are even enough; return the new table like ``copies``.

    ``copies``: whether a rank has an expert, bool ``[experts, ranks]``. Each change concerns one expert on the most
    loaded rank: the expert gets a copy on another rank, moves to another rank, or leaves the rank if other ranks have
    it. The change that makes the sum of squares of the ranks' loads smallest is made, until no change lowers it.
    ``loads``: load of each expert, 1 being a rank's mean load; ``own``: whether a rank owns an expert, bool
    ``[experts, ranks]``; ``spare``: number of other ranks' experts that a rank has room for.
    """
    copies, unit = copies.copy(), np.eye(copies.shape[1])
    while True:
        total = loads_of_ranks(loads, copies)
        hottest = total.argmax()
        if total[hottest] <= ENOUGH:
            return copies
        here = np.nonzero(copies[:, hottest])[0]
        load, count, where = loads[here], copies[here].sum(1), copies[here]
        closed = where | (~own[here] & ((copies & ~own).sum(0) >= spare))
        share, less, more = (load / np.maximum(1, count + n) for n in (0, 1, -1))
        # What all ranks then have, by expert and the rank that it comes to: [here, ranks, ranks].
        shared = total + (less - share)[:, None] * where
        added = shared[:, None] + unit * less[:, None, None]
        moved = total + (unit - unit[hottest]) * share[:, None, None]
        added[closed] = moved[closed] = np.inf
        gone = total + (more - share)[:, None] * where - unit[hottest] * more[:, None]
        gone[count < 2] = np.inf
        change = min(
            (added, moved, gone[:, None]),
            key=lambda loads: np.square(loads).sum(-1).min(),
        )
        squares = np.square(change).sum(-1)
        if squares.min() > np.square(total).sum() - 1e-9:
            return copies
        expert, rank = divmod(int(squares.argmin()), squares.shape[1])
        copies[here[expert], hottest] = change is added
        if len(squares[0]) > 1:
            copies[here[expert], rank] = True


def swapped(loads: Array, order: Array, sizes: Array) -> Array:
    """Swap pairs of experts between owners until the owners' loads are even; return the new order of experts.

    An order lists all experts: those of the first rank, then those of the second, and so on. ``order``: the present
    order; ``loads``: tokens routed to each expert; ``sizes``: number of experts that each rank owns. An expert's load
    counts as at most the mean load of a rank, because only copies of the expert could take over the rest of its load.
    """
    order, rank_of = order.copy(), np.arange(len(sizes)).repeat(sizes)
    loads = np.minimum(loads / max(1, loads.sum()) * len(sizes), 1)
    while True:
        here = loads[order]
        total = np.bincount(rank_of, here)
        hottest = total.argmax()
        less = here[rank_of == hottest, None] - here
        # of the sum of squares
        change = 2 * less * (total[rank_of] - total[hottest]) + 2 * less**2
        change[:, rank_of == hottest] = np.inf
        if total[hottest] <= ENOUGH * total.mean() or change.min() > -1e-3:
            return order
        first, second = divmod(int(change.argmin()), len(order))
        first += int(sizes[:hottest].sum())
        order[[first, second]] = order[[second, first]]


def copies_away(copies: Array, order: Array, sizes: Array) -> int:
    """Return the number of copies of experts on ranks that do not own the expert.

    ``copies``: whether a rank has an expert, bool ``[experts, ranks]``; ``order``: all experts, those of the first
    owner, then those of the second, and so on; ``sizes``: number of experts of each owner.
    """
    return int(copies.sum() - copies[order, np.arange(len(sizes)).repeat(sizes)].sum())


def divided(counts: T, copies: T, rank: int) -> T:
    """Return, for each expert, how many tokens of rank ``rank`` each rank computes: int64 ``[experts, ranks]``.

    An expert has copies on several ranks, which share the tokens of all ranks evenly: their numbers differ by one at
    most. Tokens go to the copy on their own rank first, up to that copy's even part. The other tokens go to the copies
    on other ranks, rank by rank. ``counts``: tokens that each rank routes to each expert, ``[ranks, experts]``;
    ``copies``: whether a rank has a copy of an expert, bool ``[experts, ranks]``.
    """
    counts = counts.t()
    total, number = counts.sum(1, keepdim=True), copies.sum(1, keepdim=True)
    each = (total // number + (copies.cumsum(1) <= total % number)) * copies
    kept = torch.minimum(counts, each)
    # of each rank to others, and from others
    given, room = (counts - kept), (each - kept)
    stop, end = given.cumsum(1)[:, rank, None], room.cumsum(1)
    start = stop - given[:, rank, None]
    shares = (torch.minimum(stop, end) - torch.maximum(start, end - room)).clamp(min=0)
    shares[:, rank] += kept[:, rank]
    return shares
