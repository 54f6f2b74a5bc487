"""The order of ranks in rings, by the measured times of messages between them.

Collectives of gloo pass along a ring: each rank sends to a neighbour, and the slowest pair of neighbours sets the pace.
Where all ranks form one ring, a slow link matters only between neighbours. After a link has become slow, the ranks are
numbered anew, such that it is between ranks that are no neighbours (C4, Dong et al. 2024, plans paths; PCCL orders
rings).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weft.layout.axes import LIVE_AXES
from weft.layout.layout import Layout
from weft.resilience.views import View

#: Up to so many ranks the best ring is looked for among all, as their number doubles with each rank.
EXACT = 10
#: A ring pays for a new view if its slowest link is so many times as fast as that of the present one.
FASTER = 1.5


def is_one_ring(layout: Layout) -> bool:
    """Return whether all ranks of ``layout`` are along one axis, so that their order is that of one ring."""
    return layout.world > 3 and layout.world in (
        layout.size(axis) for axis in LIVE_AXES
    )


def slower_times(matrix: np.ndarray) -> np.ndarray:
    """Return the seconds of a message between each two ranks, in the slower direction.

    ``matrix``: seconds from each rank (row) to each other, ``nan`` where they are not known. These count as usual.
    """
    usual = np.nanmedian(matrix) if not np.isnan(matrix).all() else 0.0
    known = np.where(np.isnan(matrix), usual, matrix)
    return np.maximum(known, known.T)


def slowest_link(times: np.ndarray, order: Sequence[int]) -> float:
    """Return the time of the slowest neighbours in the ring ``order``; ``times``: as of :func:`slower_times`."""
    return max(times[a, b] for a, b in zip(order, [*order[1:], order[0]], strict=True))


def least_slow_ring(matrix: np.ndarray) -> list[int]:
    """Return the ring of ranks whose slowest link is as fast as can be, and of such rings the one with least in sum.

    Up to :data:`EXACT` ranks the result is the best of all rings, beyond them one that no reversal of a part betters.
    ``matrix``: as of :func:`slower_times`. The ring begins with rank 0.
    """
    times = slower_times(matrix)
    return _best_of_all(times) if len(times) <= EXACT else _bettered(times)


def _best_of_all(times: np.ndarray) -> list[int]:
    """Find the best ring by dynamic programming over sets of ranks (Held and Karp 1962)."""
    count = len(times)
    # by set of ranks and the last of them: slowest link, sum, path
    paths: dict[tuple[int, int], tuple[float, float, tuple[int, ...]]] = {
        (1, 0): (0.0, 0.0, (0,))
    }
    for chosen in range(1, 1 << count, 2):
        for last in range(count):
            slowest, total, path = paths.get((chosen, last), (0.0, 0.0, ()))
            if not path:
                continue
            for rank in range(1, count):
                if chosen >> rank & 1:
                    continue
                time = float(times[last, rank])
                longer = max(slowest, time), total + time, (*path, rank)
                key = chosen | 1 << rank, rank
                paths[key] = min(paths.get(key, longer), longer)
    rings = [
        (max(slowest, times[last, 0]), total + times[last, 0], path)
        for (chosen, last), (slowest, total, path) in paths.items()
        if chosen == (1 << count) - 1
    ]
    return list(min(rings)[2])


def _bettered(times: np.ndarray) -> list[int]:
    """Reverse parts of the ring 0, 1, 2, ... as long as that makes it better."""
    order = list(range(len(times)))

    def worth(ring: Sequence[int]) -> tuple[float, float]:
        pairs = zip(ring, [*ring[1:], ring[0]], strict=True)
        links = [float(times[a, b]) for a, b in pairs]
        return max(links), sum(links)

    better = True
    while better:
        better = False
        for lo in range(1, len(order) - 1):
            for hi in range(lo + 1, len(order)):
                other = order[:lo] + order[lo : hi + 1][::-1] + order[hi + 1 :]
                if worth(other) < worth(order):
                    order, better = other, True
    return order


def planned_order(matrix: np.ndarray, layout: Layout) -> list[int] | None:
    """Return the ranks in a better order than the present one; None if there is none that pays.

    ``matrix``: seconds of a message from each rank to each other; ``layout``: the present layout.
    """
    if not is_one_ring(layout) or len(matrix) != layout.world:
        return None
    times, order = slower_times(matrix), least_slow_ring(matrix)
    present = slowest_link(times, range(len(times)))
    return order if present >= FASTER * slowest_link(times, order) else None


def ordered_view(view: View, order: Sequence[int], before: View | None) -> View:
    """Return ``view`` with its members in the order of their numbers in ``order``; the others follow as they are.

    ``before``: the previous view of this rank, in whose order the ranks of lost members are counted.
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
