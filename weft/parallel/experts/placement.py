"""Which experts are where, from how often each is chosen: pure functions of numbers on the host.

A placement is an array slot -> expert, ``[ranks, slots]``, -1 for an empty slot; or else a table ``[experts, ranks]``
of where each has a copy. No rank has two copies of an expert, and choices are divided evenly among the copies.
"""

import numpy as np
import torch

Array = np.ndarray
T = torch.Tensor

#: Planning ends where the most loaded rank has no more than this times the mean.
ENOUGH = 1.02


def replicated(loads: Array, ranks: int, slots: int) -> Array:
    """A placement with copies of hot experts in all of ``ranks * slots`` slots: int64 ``[ranks, slots]``.

    Each further copy is of the expert whose copies have most to do, and the largest shares are placed first, on the
    rank with least to do (after DeepSeek's EPLB, which may put copies of one expert side by side).
    """
    experts = len(loads)
    if experts > ranks * slots:
        raise ValueError(f"{experts} experts need more than {ranks} x {slots} slots")
    copies = np.ones(experts, np.int64)
    for _ in range(min(ranks * slots, experts * ranks) - experts):
        copies[np.where(copies < ranks, loads / copies, -1).argmax()] += 1
    shares = loads / copies
    placement, total = np.full((ranks, slots), -1), np.zeros(ranks)
    for expert in np.argsort(-shares, kind="stable").repeat(copies[np.argsort(-shares, kind="stable")]):
        free = (placement < 0).any(1) & ~(placement == expert).any(1)
        if free.any():  # else all ranks with room have it: the slot stays empty
            rank = np.where(free, total, np.inf).argmin()
            placement[rank, (placement[rank] < 0).argmax()] = expert
            total[rank] += shares[expert]
    return placement


def loads_of_ranks(loads: Array, copies: Array) -> Array:
    """What each rank has to do by a table ``copies`` ``[experts, ranks]``."""
    found: Array = (loads / copies.sum(1)) @ copies
    return found


def with_copies(loads: Array, owners: Array, ranks: int, spare: int) -> Array:
    """Where experts are computed that ``owners`` lend to ranks with so many ``spare`` slots: bool ``[experts, ranks]``.

    Owners need no slot for their own, and need not compute it. From all at home on, step by step, the copy is added,
    taken away, or taken from the most loaded rank to another, after which the squares of the ranks' loads add up to
    least; each copy away from home costs the bytes of an expert.
    """
    own = np.zeros((len(loads), ranks), bool)
    own[np.arange(len(loads)), owners] = True
    copies, loads = own.copy(), loads / max(1, loads.sum()) * ranks
    while True:
        count = copies.sum(1)
        shares = loads / count
        total = shares @ copies
        hottest, where = total.argmax(), copies @ total
        if total[hottest] <= ENOUGH:
            return copies
        closed = copies | (~own & ((copies & ~own).sum(0) >= spare))
        # What each change adds to the sum of squares: [experts, ranks].
        new, fewer = loads / (count + 1), loads / np.maximum(count - 1, 1)
        less, more = new - shares, fewer - shares
        add = (2 * less * where + less**2 * count + new**2)[:, None] + 2 * np.outer(new, total)
        drop = (2 * more * where + more**2 * (count - 1) + shares**2)[:, None] - 2 * np.outer(fewer, total)
        move = 2 * (shares**2)[:, None] + 2 * np.outer(shares, total - total[hottest])
        add[closed] = drop[~copies | (count < 2)[:, None]] = move[closed | ~copies[:, [hottest]]] = np.inf
        change = min((add, drop, move), key=np.min)
        if change.min() > -1e-9:
            return copies
        expert, rank = divmod(int(change.argmin()), ranks)
        copies[expert, rank] = change is not drop
        if change is move:
            copies[expert, hottest] = False


def swapped(loads: Array, order: Array, sizes: Array) -> Array:
    """``order``, in which ranks own so many experts each, after swaps between two ranks that even out what they own.

    What an expert has to do above the mean of the ranks can only go to copies, and is left out.
    """
    order, rank_of = order.copy(), np.arange(len(sizes)).repeat(sizes)
    loads = np.minimum(loads / max(1, loads.sum()) * len(sizes), 1)
    while True:
        here = loads[order]
        total = np.bincount(rank_of, here)
        hottest = total.argmax()
        less = here[rank_of == hottest, None] - here
        change = 2 * less * (total[rank_of] - total[hottest]) + 2 * less**2  # of the sum of squares
        change[:, rank_of == hottest] = np.inf
        if total[hottest] <= ENOUGH * total.mean() or change.min() > -1e-3:
            return order
        one, two = divmod(int(change.argmin()), len(order))
        one += int(sizes[:hottest].sum())
        order[[one, two]] = order[[two, one]]


def away(copies: Array, order: Array, sizes: Array) -> int:
    """How many copies are not on the rank that owns the expert."""
    return int(copies.sum() - copies[order, np.arange(len(sizes)).repeat(sizes)].sum())


def divided(counts: T, copies: T, rank: int) -> T:
    """How many of ``rank``'s choices of each expert go to the copy on each rank: int64 ``[experts, ranks]``.

    ``counts``: each rank's choices, ``[ranks, experts]``; ``copies``: as of :func:`with_copies`. Copies get equally
    many in all, to within one. A rank's choices go to its own copy first, and then to others with room, rank by rank.
    """
    counts = counts.t()
    total, number = counts.sum(1, keepdim=True), copies.sum(1, keepdim=True)
    each = (total // number + (copies.cumsum(1) <= total % number)) * copies
    kept = torch.minimum(counts, each)
    given, room = (counts - kept), (each - kept)  # of each rank to others, and from others
    stop, end = given.cumsum(1)[:, rank, None], room.cumsum(1)
    start = stop - given[:, rank, None]
    found = (torch.minimum(stop, end) - torch.maximum(start, end - room)).clamp(min=0)
    found[:, rank] += kept[:, rank]
    return found
