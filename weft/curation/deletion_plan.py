"""Plan of deletion: which contained tables are cheaper to make again than to keep.

A table that is deleted is made again, whenever it is asked for, from a table that is kept and contains it. The
cheapest choice is a facility location problem: HiGHS solves it in general, and a dynamic programme on chains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.curation.containment import ContainmentGraph
from weft.errors import UsageError, WeftError

#: Bytes of a gigabyte.
GIGABYTE = 1e9


@dataclass(frozen=True)
class TableCosts:
    """Prices from which the plan follows which tables are kept or deleted. All costs are in one currency, such as
    dollars.

    Attributes:
        ``storage``: cost of storing a gigabyte for a month.
        ``maintenance``: further cost of a gigabyte in a month, for scans, back-ups and privacy rules.
        ``reads``: how often a table is read in a month. A deleted table is rebuilt each time.
        ``compute``: cost of each gigabyte that is read or written to rebuild a table.
        ``bandwidth``: gigabytes per second that are read or written while a table is rebuilt.
        ``latency``: most seconds that rebuilding a table may take.
    """

    storage: float = 0.023
    maintenance: float = 0.0
    reads: float = 0.1
    compute: float = 0.005
    bandwidth: float = 0.2
    latency: float = math.inf


@dataclass(frozen=True)
class DeletionPlan:
    """Tables that are deleted, because other tables contain them, and the monthly cost of this choice.

    Attributes:
        ``sources``: for each deleted table, the table from which it is rebuilt.
        ``cost``: cost of the plan in a month.
        ``cost_of_all``: cost of keeping all tables for a month.
        ``bytes_freed``: bytes of the deleted tables.
    """

    sources: dict[str, str]
    cost: float
    cost_of_all: float
    bytes_freed: int


def plan_deletions(
    graph: ContainmentGraph, costs: TableCosts, only_proved: bool = False
) -> DeletionPlan:
    """Return the plan with the lowest monthly cost for the tables of ``graph``.

    ``only_proved``: use no containment that was checked on a sample of the rows only. Raises :class:`UsageError` if the
    plan needs scipy and it is not installed.
    """
    keep = {
        name: (costs.storage + costs.maintenance) * table.size / GIGABYTE
        for name, table in graph.tables.items()
    }
    rebuild: dict[tuple[str, str], float] = {}
    for edge in graph.edges:
        gigabytes = sum(graph.tables[n].size for n in (edge.table, edge.within)) / GIGABYTE  # fmt: skip
        in_time = gigabytes / costs.bandwidth <= costs.latency
        if in_time and (edge.is_proved or not only_proved):
            rebuild[edge.table, edge.within] = costs.reads * costs.compute * gigabytes
    sources: dict[str, str] = {}
    for names in _components(list(keep), list(rebuild)):
        chain = chain_order(names, list(rebuild))
        if chain is None:
            sources |= cheapest_sources({name: keep[name] for name in names}, rebuild)
        else:
            steps = [rebuild.get(pair, math.inf) for pair in zip(chain[1:], chain, strict=False)]  # fmt: skip
            deleted = cheapest_on_chain([keep[name] for name in chain], steps)
            sources |= {chain[i]: chain[i - 1] for i in deleted}
    return DeletionPlan(
        dict(sorted(sources.items())),
        plan_cost(keep, rebuild, sources),
        sum(keep.values()),
        sum(graph.tables[name].size for name in sources),
    )


def plan_cost(
    keep: Mapping[str, float],
    rebuild: Mapping[tuple[str, str], float],
    sources: Mapping[str, str],
) -> float:
    """Return the monthly cost of a plan: of keeping the tables that stay, and of rebuilding the deleted ones.

    ``keep``: cost of keeping each table. ``rebuild``: cost of rebuilding the first table of a pair from the second.
    ``sources``: for each deleted table, the table from which it is rebuilt.
    """
    kept = sum(cost for name, cost in keep.items() if name not in sources)
    return kept + sum(rebuild[pair] for pair in sources.items())


def _components(
    names: Sequence[str], pairs: Sequence[tuple[str, str]]
) -> list[list[str]]:
    """Return the tables in groups that no pair connects, each sorted."""
    group = {name: {name} for name in names}
    for a, b in pairs:
        if group[a] is not group[b]:
            group[a] |= group[b]
            for name in group[b]:
                group[name] = group[a]
    return [sorted(members) for members in {id(g): g for g in group.values()}.values()]


def chain_order(
    names: Sequence[str], pairs: Sequence[tuple[str, str]]
) -> list[str] | None:
    """Return the tables of a connected component from the largest to the smallest, or None if they do not form a chain.

    In a chain every table is contained in at most one other and contains at most one. ``names``: tables of the
    component. ``pairs``: all pairs of a contained table and a table that contains it, also of other components.
    """
    parents = {a: b for a, b in pairs if a in set(names)}
    of_component = [pair for pair in pairs if pair[0] in parents]
    children = {b: a for a, b in of_component}
    tops = [name for name in names if name not in parents]
    is_chain = len(tops) == 1 and len(of_component) == len(parents) == len(children)
    if not is_chain:
        return None
    chain = tops
    while chain[-1] in children:
        chain.append(children[chain[-1]])
    return chain


def cheapest_on_chain(keep: Sequence[float], rebuild: Sequence[float]) -> list[int]:
    """Return the indices of the tables of a chain that the cheapest plan deletes, by dynamic programming.

    ``keep``: cost of keeping each table. The first table contains all others and is always kept. ``rebuild``: cost of
    rebuilding each table but the first from the one before it; infinite where this is not allowed.
    """
    kept, deleted = keep[0], math.inf
    choices: list[bool] = []
    for own, again in zip(keep[1:], rebuild, strict=True):
        # of the best plan that keeps this table: whether it deletes the one before
        choices.append(deleted < kept)
        kept, deleted = min(kept, deleted) + own, kept + again
    result: list[int] = []
    is_deleted = deleted < kept
    for index in range(len(keep) - 1, 0, -1):
        if is_deleted:
            result.append(index)
            is_deleted = False  # it is made from the one before
        else:
            is_deleted = choices[index - 1]
    return sorted(result)


def cheapest_sources(
    keep: Mapping[str, float], rebuild: Mapping[tuple[str, str], float]
) -> dict[str, str]:
    """Return the cheapest plan, found as a mixed-integer programme by HiGHS: for each deleted table its source.

    ``keep``: cost of keeping each table. ``rebuild``: cost of rebuilding the first table of a pair from the second.
    """
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError:
        raise UsageError(
            "a plan of tables that are no chain needs scipy; pip install scipy, or leave the plan out: --no-plan"
        ) from None
    names = list(keep)
    index = {name: i for i, name in enumerate(names)}
    pairs = [pair for pair in rebuild if pair[0] in index]
    own = np.arange(len(names))
    if not pairs:
        return {}
    target, source = np.array([[index[a], index[b]] for a, b in pairs]).T
    variables = len(names) + np.arange(len(pairs))
    size = len(names) + len(pairs)
    goal = np.array([*keep.values(), *(rebuild[pair] for pair in pairs)])
    # every table is kept or made from exactly one other
    rows = np.append(own, target), np.append(own, variables)
    each = coo_array((np.ones(size), rows), shape=(len(names), size))
    # what others are made from is kept
    ones = np.ones(len(pairs))
    rows = np.tile(variables - len(names), 2), np.append(variables, source)
    only_kept = coo_array((np.append(ones, -ones), rows), shape=(len(pairs), size))
    result = milp(
        goal / (goal.max() or 1),
        integrality=np.append(np.ones(len(names)), np.zeros(len(pairs))),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(each.tocsr(), 1, 1),
            LinearConstraint(only_kept.tocsr(), -np.inf, 0),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        raise WeftError(f"HiGHS has found no plan of deletion: {result.message}")
    is_kept = result.x[: len(names)] > 0.5
    sources: dict[str, str] = {}
    for name in names:
        if is_kept[index[name]]:
            continue
        kept = [b for a, b in pairs if a == name and is_kept[index[b]]]
        sources[name] = min(kept, key=lambda b: (rebuild[name, b], b))
    return sources
