"""Assigns the nodes of a cluster to the places of a layout by measured links between nodes.

As in Pipette (Yim et al. 2024, DATE): links of one cluster differ, so which node holds which stage and replica matters.
Few nodes are tried in every order, and many are swapped by simulated annealing (Kirkpatrick et al. 1983).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from math import exp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.errors import UsageError
from weft.layout.axes import AXES
from weft.layout.layout import Layout
from weft.layout.placement import rank_table
from weft.planner.cost import Cost, Plan
from weft.planner.finalists import Final

#: The most nodes whose orders are all tried.
EXACT = 7
#: Swaps that annealing tries, and the share of the first time at which it starts to accept worse orders.
SWAPS, WARM = 6000, 0.2
#: Axes that communicate in a chain; all others communicate in rings.
CHAINS = ("pp",)


class Flows(NamedTuple):
    """Transfers between nodes that communication along one axis makes at the same time.

    A place is a group of neighbouring ranks that fills one node. ``axis``: the axis. ``counts``: number of transfers
    from each place to each other, ``[places, places]``. ``seconds``: time per step if every node had one transfer at a
    time, over a link of 1 GB/s.
    """

    axis: str
    counts: NDArray[np.float64]
    seconds: float


@dataclass(frozen=True)
class NodeMapping:
    """Assignment of nodes to the places of a layout; a place is a group of neighbouring ranks that fills one node.

    ``nodes``: the node of each place, in rank order. ``usual``: seconds per step of communication between nodes if
    place ``i`` is on node ``i``. ``mapped``: the same with ``nodes``. ``exact``: whether all assignments were tried.
    """

    nodes: tuple[int, ...]
    usual: float
    mapped: float
    exact: bool

    @property
    def saved(self) -> float:
        """Share of the seconds of communication between nodes that the assignment saves, from 0 to 1."""
        return 1 - self.mapped / self.usual if self.usual else 0.0


def layout_of_plan(plan: Plan) -> Layout:
    """Return the layout with the axis sizes of ``plan``, and with its order of axes.

    The order puts ``dp`` outermost if ``plan.outer`` is set.
    """
    axes = {
        axis: int(getattr(plan, axis)) for axis in ("pp", "dp", "shard", "cp", "tp")
    }
    order = "dp pp shard cp tp" if plan.outer else ""
    used = " ".join(axis for axis in order.split() if axes[axis] > 1)
    return Layout(**axes, **({"order": used} if used else {}))


def flows_of(layout: Layout, per_node: int, seconds: dict[str, float]) -> list[Flows]:
    """Return the transfers between nodes along every axis of ``layout`` whose ranks lie on several nodes.

    ``per_node``: ranks of a node. ``seconds``: by axis, the time of its transfers in a step over a link of 1 GB/s.
    """
    places = rank_table(layout) // per_node
    nodes = layout.world // per_node
    flows = []
    for axis, each in seconds.items():
        size = layout.size(axis)
        if size < 2 or not each:
            continue
        rings = np.moveaxis(places, AXES.index(axis), -1).reshape(-1, size)
        ends = np.stack([rings, np.roll(rings, -1, 1)], -1)
        if axis in CHAINS:
            ends = ends[:, :-1]
        counts = np.zeros((nodes, nodes))
        np.add.at(counts, (ends[..., 0].ravel(), ends[..., 1].ravel()), 1)
        np.fill_diagonal(counts, 0)
        if counts.any():
            flows.append(Flows(axis, counts, each))
    return flows


def flow_seconds(
    flows: Sequence[Flows], links: NDArray[np.float64], nodes: NDArray[np.int64]
) -> dict[str, float]:
    """Return the seconds of communication of each axis, by its name, if place ``i`` is on node ``nodes[i]``.

    ``links``: bandwidth in GB/s between every two nodes, ``[nodes, nodes]``. Transfers of an axis over one link
    share its bandwidth. The slowest link decides the axis's time. ``flows``: transfers along every axis.
    """
    speed = links[np.ix_(nodes, nodes)]
    return {
        flow.axis: flow.seconds * float((flow.counts / speed).max()) for flow in flows
    }


def map_nodes(
    flows: Sequence[Flows], links: NDArray[np.float64], seed: int = 0
) -> NodeMapping:
    """Return the assignment of nodes to places with which communication takes least time.

    If no assignment is faster than the usual one, node ``i`` gets place ``i``.

    ``flows``: transfers along every axis; the times of the axes add up. ``links``: bandwidth in GB/s from each node to
    each other, ``[nodes, nodes]``. ``seed``: seed of the simulated annealing, which is used if there are more than
    :data:`EXACT` nodes.
    """
    own = np.arange(len(links))
    links = np.where(np.eye(len(links), dtype=bool), np.inf, links)

    def total(nodes: NDArray[np.int64]) -> float:
        return sum(flow_seconds(flows, links, nodes).values())

    usual = total(own)
    exact = len(links) <= EXACT
    if not flows or len(links) < 2:
        return NodeMapping(tuple(own.tolist()), usual, usual, True)
    if exact:
        best = min((np.array(order) for order in permutations(own.tolist())), key=total)
    else:
        best = _annealed(total, flows, links, seed)
    mapped = total(best)
    if mapped >= usual * (1 - 1e-9):
        best, mapped = own, usual
    return NodeMapping(tuple(best.tolist()), usual, mapped, exact)


def _annealed(
    total: Callable[[NDArray[np.int64]], float],
    flows: Sequence[Flows],
    links: NDArray[np.float64],
    seed: int,
) -> NDArray[np.int64]:
    """Return the best order that annealing meets, which swaps two nodes, or turns or moves a stretch of nodes.

    What guides it is the mean over transfers beside ``total``, because the slowest link alone says nothing about orders
    that leave it as it is.
    """
    draw = np.random.default_rng(seed)
    shares = [
        flow.seconds * flow.counts / np.count_nonzero(flow.counts) for flow in flows
    ]

    def guide(nodes: NDArray[np.int64], seconds: float) -> float:
        speed = links[np.ix_(nodes, nodes)]
        return seconds + sum(float((share / speed).sum()) for share in shares)

    here = np.arange(len(links))
    best, least = here, total(here)
    now = warm = guide(here, least)
    for step in range(SWAPS):
        low, high = sorted(draw.choice(len(here), 2, replace=False))
        trial = here.copy()
        move = draw.integers(3)
        if move == 0:
            trial[[low, high]] = trial[[high, low]]
        elif move == 1:
            trial[low : high + 1] = trial[low : high + 1][::-1]
        else:
            trial[low : high + 1] = np.roll(trial[low : high + 1], 1)
        seconds = total(trial)
        guided = guide(trial, seconds)
        heat = WARM * warm * (1 - step / SWAPS) ** 3 / len(here) + 1e-12
        if guided <= now or draw.random() < exp((now - guided) / heat):
            here, now = trial, guided
        if seconds < least:
            best, least = trial, seconds
    return best


@dataclass(frozen=True)
class MappedFinal:
    """A simulated layout, and the best assignment of nodes to it over measured links.

    ``final``: the layout. ``mapping``: the assignment, with the seconds of communication between nodes.
    """

    final: Final
    mapping: NodeMapping

    @cached_property
    def line(self) -> str:
        """Line for the user with the best order of nodes, and the seconds of communication in this order and in the
        usual one.
        """
        how = "of all orders" if self.mapping.exact else "by annealing"
        if not self.mapping.saved:
            return "nodes   in their own order: no other is faster"
        order = " ".join(map(str, self.mapping.nodes))
        return (
            f"nodes   {order} ({how}): {self.mapping.mapped:.3g} s between nodes, "
            f"{self.mapping.usual:.3g} in their own order"
        )


def checked_links(links: Sequence[Sequence[float]], nodes: int) -> NDArray[np.float64]:
    """Check ``links``, the bandwidths from node to node in GB/s, and return those of the first ``nodes`` nodes,
    ``[nodes, nodes]``.

    Raises :class:`UsageError` unless ``links`` is a square table with at least ``nodes`` rows, whose numbers between
    different nodes are above zero.
    """
    rows = {len(row) for row in links}
    if rows != {len(links)} or len(links) < nodes:
        raise UsageError(
            f"links of the cluster file are {len(links)} rows of {', '.join(map(str, sorted(rows)))}; a square "
            f"table of GB/s with a row for each of {nodes} nodes is needed"
        )
    table = np.array(links, dtype=float)[:nodes, :nodes]
    apart = table[~np.eye(nodes, dtype=bool)]
    if not np.isfinite(apart).all() or (apart <= 0).any():
        raise UsageError(
            "links of the cluster file must be GB/s above zero between any two nodes"
        )
    return table


def with_links(
    final: Final, links: Sequence[Sequence[float]], per_node: int
) -> MappedFinal:
    """Find the best assignment of nodes to the layout ``final`` over measured links.

    ``links``: measured bandwidth in GB/s between every two nodes. ``per_node``: ranks of a node. The planner's formulas
    give each axis's time over links of equal speed. Here that time is scaled up by how much slower the axis's slowest
    link is.
    """
    layout = layout_of_plan(final.plan)
    nodes = max(1, layout.world // per_node)
    table = checked_links(links, nodes)
    if nodes < 2 or layout.world % per_node:
        return MappedFinal(final, NodeMapping(tuple(range(nodes)), 0.0, 0.0, True))
    even = float(final.machine.network) / 1e9 * per_node
    known = {
        "pp": float(final.cost.pp),
        "cp": float(final.cost.cp),
        "tp": float(final.cost.tp),
    }
    axis = "shard" if layout.shard > 1 else "dp"
    known[axis] = float(final.cost.dp)
    flows = []
    for flow in flows_of(layout, per_node, {name: 1.0 for name in known}):
        usual = float(flow.counts.max()) / even
        flows.append(flow._replace(seconds=known[flow.axis] / usual))
    mapping = map_nodes(flows, table)
    speed = np.where(np.eye(nodes, dtype=bool), np.inf, table)
    taken = flow_seconds(flows, speed, np.array(mapping.nodes))
    changed = {
        ("dp" if name == axis else name): seconds for name, seconds in taken.items()
    }
    cost: Cost = replace(final.cost, **changed)
    return MappedFinal(replace(final, cost=cost), mapping)
