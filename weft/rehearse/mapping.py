"""Assigns workers to places of a layout: finds the order of ranks that keeps most traffic on fast links.

As in Pipette (Yim et al. 2024; real link tables instead of nominal ones) and Holmes (Yang et al. 2024; groups by the
network that joins them). The result is an order of axes (``layout.order``): the ranks of one host or site are
neighbours along the axes that come last. Times are seconds, traffic is in bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weft.layout.axes import AXES
from weft.layout.layout import Layout
from weft.layout.placement import rank_table
from weft.rehearse.worker_links import WorkerLinks

#: Axes whose ranks pass values on from one to the next; the others run rings over all.
CHAINS = ("pp",)


@dataclass(frozen=True)
class Traffic:
    """Traffic along one axis of the layout in a step: the messages that each rank sends to one neighbour.

    ``bytes``: bytes of all these messages of a rank. ``messages``: their number.
    """

    bytes: float
    messages: float = 1.0


def traffic_seconds(
    links: WorkerLinks, layout: Layout, traffic: Mapping[str, Traffic]
) -> float:
    """Return the seconds of communication in a step under ``layout``, if rank ``n`` runs on worker ``n``.

    A worker is a process of the probe. ``links``: the measured links between workers. ``traffic``: traffic of every
    rank, by axis. The axes communicate one after the other; all groups of an axis do so at once and share slow links.
    """
    places, total = rank_table(layout), 0.0
    for axis, t in traffic.items():
        size = layout.size(axis)
        if size < 2 or not t.bytes:
            continue
        groups = np.moveaxis(places, AXES.index(axis), -1).reshape(-1, size)
        speed, delay = links.pairs(groups, axis in CHAINS)
        total += float((t.bytes / speed + t.messages * delay).max())
    return total


def place_axes(
    links: WorkerLinks, layout: Layout, traffic: Mapping[str, Traffic]
) -> Layout:
    """Return ``layout`` with the order of axes for which communication takes least time; ties keep the usual order.

    ``links``: the measured links between ranks. ``traffic``: traffic of every rank in a step, by axis.
    """
    if len(links) != layout.world:
        raise ValueError(
            f"the table has links of {len(links)} workers, and layout {layout} has {layout.world} places"
        )
    # the usual order is the first of the permutations
    used = [axis for axis in AXES if layout.size(axis) > 1]
    turned = [
        layout.model_copy(update={"order": " ".join(order)})
        for order in itertools.permutations(used)
    ]
    return min(
        turned, key=lambda order: round(traffic_seconds(links, order, traffic), 9)
    )
