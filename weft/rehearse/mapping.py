"""Which worker takes which place of a layout: the order of ranks that keeps the traffic on the links that carry it.

As in Pipette (Yim et al. 2024; real link tables instead of nominal ones) and Holmes (Yang et al. 2024; groups by what
joins them). What a run takes is an order of axes (``layout.order``): the ranks of one host or site are neighbours
along the axes that come last. Times are seconds, traffic is in bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from weft.layout.layout import AXES, Layout
from weft.layout.placement import rank_table
from weft.rehearse.links import Links

#: Axes whose ranks pass values on from one to the next; the others run rings over all.
CHAINS = ("pp",)


@dataclass(frozen=True)
class Traffic:
    """What every rank sends along one axis in a step: ``bytes`` in ``messages`` (per neighbour, of one direction)."""

    bytes: float
    messages: float = 1.0


@dataclass(frozen=True)
class Placement:
    """``order`` of the axes for ``layout.order``, and the seconds of communication."""

    order: str
    seconds: float


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
        cost = seconds(links, layout, traffic, rank_table(layout, order))
        found.append((round(cost, 9), used != usual, " ".join(used), cost))
    _, _, order_text, cost = min(found)
    return Placement(order_text, cost)


def _check(links: Links, layout: Layout) -> None:
    if len(links) != layout.world:
        raise ValueError(f"the table has links of {len(links)} workers, and layout {layout} has {layout.world} places")
