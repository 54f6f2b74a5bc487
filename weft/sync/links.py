"""Orders the islands of a ring by the bandwidth and latency of their links.

In a ring all-reduce every island sends to the next one all the time, so the slowest link of the ring sets the pace,
unless latency does. Links between the same two sites share the bandwidth between these. :func:`ring_times` says how
long an all-reduce takes for given orders; :func:`ring_order` finds the best order for up to ten islands, and a good one
for more. Because of the shared bandwidth it passes between two sites once in each direction, so that a two-level
all-reduce needs no code of its own.

This is no travelling salesman's problem: the time is not a sum over links, and dynamic programming over sums cannot
express shared bandwidth. So all orders are tried, which takes NumPy less than a second.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from weft.errors import WeftError

Numbers = NDArray[np.float64]
Orders = NDArray[np.int64]

#: For so many all orders are tried.
EXACT = 10
#: Links within a site are at least so many times as fast as those between sites.
GAP = 3.0
#: Weight of the way around the ring beside the time: it decides between orders that take equally long, and lets the
#: search see a step as better that mends one of several slow links.
TIE = 1e-3
#: Bytes per second of a link that is down.
SLOWEST = 1e-9
#: Starts of the search.
STARTS = 8


@dataclass(frozen=True)
class IslandLinks:
    """Measured links between islands.

    ``bandwidth[a][b]``: bytes per second from ``a`` to ``b``, 0 if there is no link; ``latency[a][b]``: one-way
    seconds. Each link is measured while nothing else is sent.
    """

    bandwidth: Numbers
    latency: Numbers

    @cached_property
    def sites(self) -> NDArray[np.int64]:
        """Index of the site that each island is in, ``[islands]``.

        A site is a group of islands joined by fast links. It is found from the links, if these divide into clearly
        faster and slower ones. Otherwise all islands are in one site.
        """
        count = len(self.bandwidth)
        both = np.minimum(self.bandwidth, self.bandwidth.T)[np.triu_indices(count, 1)]
        speeds = np.sort(both[both > 0])
        site = np.arange(count)
        jumps = speeds[1:] / speeds[:-1]
        if not len(jumps) or jumps.max() < GAP:
            return np.zeros(count, dtype=np.int64)
        fast = speeds[jumps.argmax() + 1]
        for a, b in zip(*np.triu_indices(count, 1), strict=True):
            if min(self.bandwidth[a, b], self.bandwidth[b, a]) >= fast:
                site[site == site[b]] = site[a]
        return np.unique(site, return_inverse=True)[1]


def ring_times(
    links: IslandLinks, orders: Orders, nbytes: float, pieces: int = 4
) -> Numbers:
    """Return the seconds that an all-reduce of ``nbytes`` takes around rings of islands, ``[count]``.

    ``orders``: the orders of the islands in each of ``count`` rings, ``[count, islands]``. ``links``: the links between
    islands; those between the same two sites share their bandwidth. ``pieces``: number of messages in which an island's
    chunk travels.

    An all-reduce takes as long as its slowest link needs to send all chunks, or as long as one message needs for its
    way around the ring, whichever is longer. The way of a message has ``2 (islands - 1)`` links, each with its latency.
    The modelled time is slightly too short, because at the beginning and the end the two times overlap only partly.
    """
    slowest, around = _steps(links, orders, nbytes, pieces)
    return 2 * (orders.shape[1] - 1) * np.maximum(slowest, around)


def _steps(
    links: IslandLinks, orders: Orders, nbytes: float, pieces: int
) -> tuple[Numbers, Numbers]:
    """Return two times of a step for each order: by its slowest link, and by the longest way of a piece."""
    islands = orders.shape[1]
    following = np.roll(orders, -1, axis=1)
    site, count = links.sites, int(links.sites.max()) + 1
    between = site[orders] * count + site[following]  # [count, islands]
    sharing = np.ones(orders.shape)
    for pair in np.unique(between):
        if pair // count != pair % count:
            here = between == pair
            sharing = np.where(here, here.sum(1, keepdims=True), sharing)
    sending = (
        nbytes
        / islands
        * sharing
        / np.maximum(links.bandwidth, SLOWEST)[orders, following]
    )
    hops = sending / pieces + links.latency[orders, following]
    # twice around are two links more than the way has
    spared = (hops + np.roll(hops, 1, axis=1)).min(1)
    return sending.max(1), (2 * hops.sum(1) - spared) / (2 * islands - 2)


def ring_order(
    links: IslandLinks, nbytes: float, pieces: int = 4, exact: int = EXACT
) -> list[int]:
    """Return the order of islands, from island 0, in which a ring all-reduce of ``nbytes`` takes the least time.

    ``pieces``: messages in which an island's chunk travels. For more than ``exact`` islands the order is a local
    optimum, reached from a few starts by moving or reversing groups of neighbours in the order. Raises
    :class:`WeftError` if no ring joins all islands. ``links``: measured links between the islands.
    """
    islands = len(links.bandwidth)
    if islands == 1:
        return [0]
    if islands <= max(exact, 3):
        orders = np.array([(0, *rest) for rest in permutations(range(1, islands))])
        best = orders[_scores(links, orders, nbytes, pieces).argmin()]
    else:
        improved = [
            _improved(links, start, nbytes, pieces)
            for start in _starts(links, nbytes, pieces)
        ]
        best = min(
            improved,
            key=lambda order: float(_scores(links, order[None], nbytes, pieces)[0]),
        )
    if not links.bandwidth[best, np.roll(best, -1)].all():
        raise WeftError(
            "no ring of measured links joins all islands; see which pairs cannot reach each other"
        )
    return np.roll(best, -int(np.flatnonzero(best == 0)[0])).tolist()


def _scores(links: IslandLinks, orders: Orders, nbytes: float, pieces: int) -> Numbers:
    slowest, around = _steps(links, orders, nbytes, pieces)
    return np.maximum(slowest, around) + TIE * around


def _starts(links: IslandLinks, nbytes: float, pieces: int) -> list[Orders]:
    """Return orders to begin a search from: each goes on to the nearest remaining island."""
    hops = (
        nbytes / len(links.bandwidth) / pieces / np.maximum(links.bandwidth, SLOWEST)
        + links.latency
    )
    orders = []
    for first in range(min(STARTS, len(hops))):
        order, left = [first], set(range(len(hops))) - {first}
        while left:
            order.append(
                min(left, key=lambda island: (hops[order[-1], island], island))
            )
            left.remove(order[-1])
        orders.append(np.array(order))
    return orders


def _improved(links: IslandLinks, order: Orders, nbytes: float, pieces: int) -> Orders:
    """Improve ``order`` by the best move again and again, until no move makes it faster."""
    score = float(_scores(links, order[None], nbytes, pieces)[0])
    while True:
        moved = _moves(order)
        scores = _scores(links, moved, nbytes, pieces)
        best = int(scores.argmin())
        if not scores[best] < score * (1 - 1e-12):
            return order
        order, score = moved[best], float(scores[best])


def _moves(order: Orders) -> Orders:
    """Return all orders with a run of up to three islands moved, or a run of any length reversed."""
    islands, moves = len(order), []
    for first in range(islands):
        turned = np.roll(order, -first)
        for length in range(1, min(4, islands - 1)):
            run, rest = turned[:length], turned[length:]
            moves += [
                np.concatenate((rest[:at], run, rest[at:]))
                for at in range(1, len(rest))
            ]
        moves += [
            np.concatenate((turned[:length][::-1], turned[length:]))
            for length in range(2, islands)
        ]
    return np.array(moves)
