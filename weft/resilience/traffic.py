"""The order of ranks in rings, by the measured times of messages between them.

Collectives of gloo pass along a ring: each rank sends to a neighbour, and the slowest pair of neighbours sets the pace.
Where all ranks form one ring, a slow link matters only between neighbours. After a link has become slow, the ranks are
numbered anew, such that it is between ranks that are no neighbours (C4, Dong et al. 2024, plans paths; PCCL orders
rings). :mod:`weft.sync.links` finds the ring, as it does for islands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weft.layout.axes import LIVE_AXES
from weft.layout.layout import Layout
from weft.resilience.views import View
from weft.sync.links import IslandLinks, ring_order

#: Ranks for which a better ring is looked for at most, as that takes seconds for a hundred.
MOST = 64
#: A ring pays for a new view if its slowest link is so many times as fast as that of the present one.
FASTER = 1.5


def is_one_ring(layout: Layout) -> bool:
    """Return whether ``layout`` has at least four ranks, all along one axis, so that they form a single ring."""
    return layout.world > 3 and layout.world in (
        layout.size(axis) for axis in LIVE_AXES
    )


def slower_times(matrix: np.ndarray) -> np.ndarray:
    """Return the seconds of a message between every two ranks, in the slower direction, ``[ranks, ranks]``.

    ``matrix``: seconds of a message from each rank (row) to each other (column), ``[ranks, ranks]``; ``nan`` where the
    time is unknown. The median of the known times takes the place of an unknown one.
    """
    usual = np.nanmedian(matrix) if not np.isnan(matrix).all() else 0.0
    known = np.where(np.isnan(matrix), usual, matrix)
    return np.maximum(known, known.T)


def slowest_link(times: np.ndarray, order: Sequence[int]) -> float:
    """Return the seconds of a message between the slowest neighbours of a ring. ``order``: the ranks in the order of
    the ring.

    ``times``: seconds between every two ranks, as :func:`slower_times` returns them.
    """
    return max(times[a, b] for a, b in zip(order, [*order[1:], order[0]], strict=True))


def planned_order(matrix: np.ndarray, layout: Layout) -> list[int] | None:
    """Return the ranks in a faster ring order than the present one; None if none is clearly faster.

    The result is also None if the layout is no single ring, or has more than :data:`MOST` ranks. ``matrix``: seconds of
    a message from each rank to each other; ``layout``: the present layout.
    """
    if not is_one_ring(layout) or len(matrix) != layout.world or len(matrix) > MOST:
        return None
    times = slower_times(matrix)
    if not times.all():
        return None
    order = ring_order(IslandLinks(1 / times, np.zeros_like(times)), 1.0)
    present = slowest_link(times, range(len(times)))
    return order if present >= FASTER * slowest_link(times, order) else None


def ordered_view(view: View, order: Sequence[int], before: View | None) -> View:
    """Return ``view`` with its members in the order in which ``order`` lists their numbers.

    Members whose numbers are not in ``order`` come last. ``before``: the previous view of this rank. It tells which
    ranks the lost members had, as stated in ``view.lost``.
    """
    place = {number: index for index, number in enumerate(order)}
    ranks = sorted(
        range(len(view.members)),
        key=lambda rank: place.get(view.members[rank].number, len(place) + rank),
    )
    earlier = [member.number for member in before.members] if before else []
    lost = tuple(
        replace(gone, rank=earlier.index(gone.member.number))
        if gone.member.number in earlier
        else gone
        for gone in view.lost
    )
    return replace(
        view,
        members=tuple(view.members[rank] for rank in ranks),
        facts=tuple(view.facts[rank] for rank in ranks),
        lost=lost,
    )
