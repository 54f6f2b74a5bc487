"""Which worker takes which place of a layout: the order of ranks that keeps the traffic on the links that carry it.

As in Pipette (Yim et al. 2024; real link tables instead of nominal ones) and Holmes (Yang et al. 2024; groups by what
joins them). What a run takes is an order of axes (``layout.order``): the ranks of one host or site are neighbours
along the axes that come last. Where the workers themselves stand in no good order, :func:`place_workers` also says in
which order to number them. Times are seconds, traffic is in bytes.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weft.layout.layout import AXES, Layout
from weft.planner.links import Links
from weft.planner.local import COLLECTIVES, Happening

#: Axes whose ranks pass values on from one to the next; the others run rings over all.
CHAINS = ("pp",)
SMALL = 8  # workers whose numberings are all tried


@dataclass(frozen=True)
class Traffic:
    """What every rank sends along one axis in a step: ``bytes`` in ``messages`` (per neighbour, of one direction)."""

    bytes: float
    messages: float = 1.0


@dataclass(frozen=True)
class Placement:
    """``order`` of the axes for ``layout.order``, the ``workers`` by rank, and the seconds of communication."""

    order: str
    workers: tuple[int, ...]
    seconds: float


def ranks_of(layout: Layout, order: Sequence[str]) -> np.ndarray:
    """The rank at every place, with one dimension per axis of :data:`AXES`: as :class:`weft.layout.mesh.Mesh`."""
    laid = np.arange(layout.world).reshape([layout.size(axis) for axis in order])
    return laid.transpose([list(order).index(axis) for axis in AXES])


def seconds(links: Links, layout: Layout, traffic: Mapping[str, Traffic], places: np.ndarray) -> float:
    """Communication of a step when worker ``places[...]`` has each place.

    Axes take turns; all groups of an axis are busy at once and share what is slow.
    """
    total = 0.0
    for axis, t in traffic.items():
        size = layout.size(axis)
        if size < 2 or not t.bytes:
            continue
        groups = np.moveaxis(places, AXES.index(axis), -1).reshape(-1, size)
        speed, delay = links.pairs(groups, axis in CHAINS)
        total += float((t.bytes / speed + t.messages * delay).max())
    return total


def orders(layout: Layout) -> Iterator[tuple[str, ...]]:
    """All orders of the axes that are larger than one."""
    used = [axis for axis in AXES if layout.size(axis) > 1]
    rest = tuple(axis for axis in AXES if axis not in used)
    for order in itertools.permutations(used):
        yield (*rest, *order)


def place_axes(links: Links, layout: Layout, traffic: Mapping[str, Traffic]) -> Placement:
    """The best order of axes for workers as they are numbered; ties go to the usual order."""
    _check(links, layout)
    usual = [axis for axis in AXES if layout.size(axis) > 1]
    found = []
    for order in orders(layout):
        used = [axis for axis in order if layout.size(axis) > 1]
        cost = seconds(links, layout, traffic, ranks_of(layout, order))
        found.append((round(cost, 9), used != usual, " ".join(used), cost))
    _, _, order_text, cost = min(found)
    return Placement(order_text, tuple(range(layout.world)), cost)


def place_workers(links: Links, layout: Layout, traffic: Mapping[str, Traffic], seed: int = 0) -> Placement:
    """The best order of axes and numbering of the workers: all of them for few, else from groups, then by exchanges."""
    best = place_axes(links, layout, traffic)
    count = layout.world
    if count <= SMALL:
        numberings: Iterator[tuple[int, ...]] = itertools.permutations(range(count))
        order = next(orders(layout))  # numberings say all that orders of axes could
        base = ranks_of(layout, order)
        for numbers in numberings:
            cost = seconds(links, layout, traffic, np.array(numbers)[base])
            if cost < best.seconds * (1 - 1e-9):
                used = " ".join(axis for axis in order if layout.size(axis) > 1)
                best = Placement(used, numbers, cost)
        return best
    grouped = np.array(_near_first(links))
    for order in orders(layout):
        cost = seconds(links, layout, traffic, grouped[ranks_of(layout, order)])
        if cost < best.seconds * (1 - 1e-9):
            best = Placement(" ".join(a for a in order if layout.size(a) > 1), tuple(map(int, grouped)), cost)
    return _exchanged(links, layout, traffic, best, random.Random(seed))


def _near_first(links: Links) -> list[int]:
    """Workers such that each is followed by the one that is fastest to reach from it."""
    left = set(range(1, len(links)))
    found = [0]
    while left:
        here = found[-1]
        following = max(left, key=lambda w: (links.bandwidth[here, w], -links.latency[here, w], -w))
        left.remove(following)
        found.append(following)
    return found


def _exchanged(
    links: Links, layout: Layout, traffic: Mapping[str, Traffic], start: Placement, chance: random.Random
) -> Placement:
    """Annealing over exchanges of two workers."""
    axes = (*(a for a in AXES if a not in start.order.split()), *start.order.split())
    base = ranks_of(layout, axes)
    now, cost = list(start.workers), start.seconds
    best, least = list(now), cost
    turns = 2000 if len(now) <= 64 else 500
    for turn in range(turns):
        i, j = chance.sample(range(len(now)), 2)
        now[i], now[j] = now[j], now[i]
        new = seconds(links, layout, traffic, np.array(now)[base])
        heat = 0.05 * start.seconds * (1 - turn / turns) + 1e-15
        if new <= cost or chance.random() < math.exp((cost - new) / heat):
            cost = new
            if cost < least:
                best, least = list(now), cost
        else:
            now[i], now[j] = now[j], now[i]
    return Placement(start.order, tuple(best), least) if least < start.seconds * (1 - 1e-9) else start


def _check(links: Links, layout: Layout) -> None:
    if len(links) != layout.world:
        raise ValueError(f"the table has links of {len(links)} workers, and layout {layout} has {layout.world} places")


def traffic_of(events: Sequence[Happening], rank: int, layout: Layout) -> dict[str, Traffic]:
    """What ``rank`` sends along every axis in a rehearsed step. Small sums over the world are left out."""
    at = np.argwhere(ranks_of(layout, layout.axis_order) == rank)[0]
    places = ranks_of(layout, layout.axis_order)
    lines = {}  # the ranks along an axis through this one
    for i, axis in enumerate(AXES):
        index = tuple(slice(None) if i == j else int(k) for j, k in enumerate(at))
        lines[axis] = frozenset(map(int, places[index]))
    found: dict[str, list[float]] = {}
    for e in events:
        if e.kind == "send":
            axis = next((a for a in lines if layout.size(a) > 1 and e.ranks[0] in lines[a]), "")
            sent, times = float(e.bytes), 1
        elif e.kind in ("collective", "later"):
            axis = next((a for a in lines if layout.size(a) > 1 and set(e.ranks) == lines[a]), "")
            n = max(1, len(e.ranks))
            rounds = 2 if COLLECTIVES.get(e.name) == "reduce" else 1
            sent, times = rounds * (n - 1) / n * e.bytes, rounds * (n - 1)
        else:
            continue
        if axis:
            total = found.setdefault(axis, [0.0, 0.0])
            total[0] += sent
            total[1] += times
    return {axis: Traffic(*total) for axis, total in found.items()}
