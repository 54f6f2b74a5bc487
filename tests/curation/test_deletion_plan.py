"""Plans of deletion: HiGHS and the dynamic programme equal a search through all plans, and nothing is lost."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.curation.containment import ContainmentEdge, ContainmentGraph
from weft.curation.deletion_plan import (
    TableCosts,
    chain_order,
    cheapest_on_chain,
    cheapest_sources,
    plan_cost,
    plan_deletions,
)
from weft.curation.table_footers import LakeTable

COST = st.integers(0, 40).map(lambda n: n / 4)


def search_all(keep: dict[str, float], rebuild: dict[tuple[str, str], float]) -> float:
    """The cost of the cheapest plan, of all that keep some tables and make each other one from a kept one."""
    best = math.inf
    names = list(keep)
    for choice in product([True, False], repeat=len(names)):
        kept = {name for name, is_kept in zip(names, choice, strict=True) if is_kept}
        cost = sum(keep[name] for name in kept)
        for name in keep.keys() - kept:
            cost += min((c for (a, b), c in rebuild.items() if a == name and b in kept), default=math.inf)  # fmt: skip
        best = min(best, cost)
    return best


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
    names = list("abcdef")[: draw(st.integers(1, 6))]
    pairs = [(a, b) for a in names for b in names if a != b]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return {name: draw(COST) for name in names}, {pair: draw(COST) for pair in chosen}


@given(graphs())
@settings(max_examples=40, deadline=None)
def test_highs_equals_a_search_through_all_plans(
    drawn: tuple[dict[str, float], dict[tuple[str, str], float]],
) -> None:
    keep, rebuild = drawn
    sources = cheapest_sources(keep, rebuild)
    assert not sources.keys() & set(sources.values()), "made from what is deleted"
    assert plan_cost(keep, rebuild, sources) == pytest.approx(search_all(keep, rebuild))


@given(st.lists(st.tuples(COST, COST | st.just(math.inf)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_chains_equal_highs(drawn: list[tuple[float, float]]) -> None:
    keep = {f"t{i}": own for i, (own, _) in enumerate(drawn)}
    names = list(keep)
    steps = [again for _, again in drawn[1:]]
    rebuild = {(names[i + 1], names[i]): c for i, c in enumerate(steps) if c < math.inf}
    deleted = cheapest_on_chain([*keep.values()], steps)
    sources = {names[i]: names[i - 1] for i in deleted}
    assert not sources.keys() & set(sources.values())
    cost = plan_cost(keep, rebuild, sources)
    assert cost == pytest.approx(plan_cost(keep, rebuild, cheapest_sources(keep, rebuild)))  # fmt: skip
    assert cost == pytest.approx(search_all(keep, rebuild))


def test_what_a_chain_is() -> None:
    assert chain_order(["c", "a", "b"], [("a", "b"), ("b", "c"), ("x", "y")]) == ["c", "b", "a"]  # fmt: skip
    assert chain_order(["a"], []) == ["a"]
    assert chain_order(["a", "b"], [("a", "b"), ("b", "a")]) is None
    assert chain_order(["a", "b", "c"], [("a", "c"), ("b", "c")]) is None
    assert chain_order(["a", "b", "c"], [("a", "b"), ("a", "c"), ("b", "c")]) is None


def lake(sizes: dict[str, int], *pairs: tuple[str, str], proved: bool = True) -> ContainmentGraph:  # fmt: skip
    tables = {
        name: LakeTable(name, (Path(name),), 10, int(gigabytes * 1e9), {}, {}, 100)
        for name, gigabytes in sizes.items()
    }
    edges = [ContainmentEdge(a, b, 10, proved) for a, b in pairs]
    return ContainmentGraph(tables, edges, {})


def test_prices_decide() -> None:
    graph = lake(
        {"all": 100, "part": 50, "twin": 100},
        ("part", "all"),
        ("part", "twin"),
        ("all", "twin"),
        ("twin", "all"),
    )
    plan = plan_deletions(graph, TableCosts(reads=0))
    assert len(plan.sources) == 2 and plan.cost == pytest.approx(2.3)
    assert plan.cost_of_all == pytest.approx(5.75) and plan.bytes_freed == 150e9
    # keeping costs 0.023 of a gigabyte, making again 0.005 x 3 gigabytes for each of the part's
    assert "part" in plan_deletions(graph, TableCosts(reads=1.5)).sources
    assert "part" not in plan_deletions(graph, TableCosts(reads=1.6)).sources
    # 150 gigabytes at 0.2 a second are 750 seconds
    assert "part" in plan_deletions(graph, TableCosts(reads=0, latency=750)).sources
    assert plan_deletions(graph, TableCosts(reads=0, latency=749)).sources == {}


def test_components_are_planned_apart() -> None:
    graph = lake(
        {"a": 1, "b": 2, "c": 1, "d": 2, "e": 3, "f": 9},
        ("a", "b"),
        ("c", "d"),
        ("d", "e"),
        ("c", "e"),
    )
    plan = plan_deletions(graph, TableCosts(reads=0))
    assert plan.sources == {"a": "b", "c": "e", "d": "e"}


def test_only_what_is_proved() -> None:
    graph = lake({"a": 1, "b": 2}, ("a", "b"), proved=False)
    assert plan_deletions(graph, TableCosts(reads=0)).sources == {"a": "b"}
    assert not plan_deletions(graph, TableCosts(reads=0), only_proved=True).sources
