"""Rings of ranks by measured links: the best of all, and what the ladder of actions does when one slows."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from weft.layout.layout import Layout
from weft.observe.rank_delays import Digest, StepTimes, Verdict, slow_computers
from weft.resilience.slow_ranks import SlowRanks
from weft.resilience.traffic import (
    FASTER,
    ordered_view,
    planned_order,
    slower_times,
    slowest_link,
)
from weft.resilience.views import Lost, Member, View

MEMBERS = [Member(10 + rank, "", rank, "", 0, 0.0) for rank in range(4)]


@dataclass
class Watch:
    """What a judge of delays says."""

    verdicts: list[Verdict]
    matrix: np.ndarray | None = None
    digests: list[Any] = field(default_factory=list)
    shares: dict[int, float] = field(default_factory=dict)


def links(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    matrix = rng.uniform(1, 9, (count, count)) ** 2
    np.fill_diagonal(matrix, np.nan)
    return matrix


def slow_link(a: int, b: int, count: int = 4) -> np.ndarray:
    matrix = np.ones((count, count))
    np.fill_diagonal(matrix, np.nan)
    matrix[a, b] = 20.0
    return matrix


@pytest.mark.parametrize("seed", [*range(4), 8, 17, 22, 31])
def test_the_ring_is_the_best_of_all(seed: int) -> None:
    """Where links of all speeds are mixed: an order is returned just if one pays, and it is the best."""
    matrix = links(4 + seed % 3, seed)
    times = slower_times(matrix)
    rest = range(1, len(times))
    least = min(slowest_link(times, (0, *ring)) for ring in permutations(rest))
    ring = planned_order(matrix, Layout(dp=len(times)))
    present = slowest_link(times, range(len(times)))
    assert (ring is not None) == (present >= FASTER * least)
    assert ring is None or slowest_link(times, ring) == pytest.approx(least)
    assert ring is None or sorted(ring) == list(range(len(times)))


def test_a_slow_link_is_between_no_neighbours() -> None:
    layout = Layout(dp=4)
    order = planned_order(slow_link(1, 2), layout)
    assert order is not None
    apart = abs(order.index(1) - order.index(2))
    assert apart == 2
    # it is already so, or nothing can be won, or ranks form several rings
    assert planned_order(slow_link(0, 2), layout) is None
    assert planned_order(np.ones((4, 4)), layout) is None
    assert planned_order(slow_link(1, 2), Layout(dp=2, tp=2)) is None
    many = planned_order(slow_link(1, 2, 14), Layout(dp=14))
    assert many is not None and abs(many.index(1) - many.index(2)) not in (1, 13)


def test_a_view_in_another_order() -> None:
    facts = tuple({"of": member.number} for member in MEMBERS[:3])
    before = View(1, (MEMBERS[2], MEMBERS[3], *MEMBERS[:2]), ({},) * 4, (), {})
    gone = (Lost(MEMBERS[3], 3, "is gone"),)
    view = ordered_view(View(2, tuple(MEMBERS[:3]), facts, gone, {}), [12, 10], before)
    assert [member.number for member in view.members] == [12, 10, 11]
    assert [fact["of"] for fact in view.facts] == [12, 10, 11]
    assert view.lost[0].rank == 1


def acted(actions: str, *judgements: Watch, layout: Layout | None = None) -> Any:
    """What happens after these judgements: the state, and who was asked to leave."""
    slow, removed = SlowRanks(actions), list[int]()
    for watch in judgements:
        slow.act(watch, MEMBERS, layout or Layout(dp=4), removed.append)
    return slow, removed


def computer(factor: float) -> Watch:
    return Watch([Verdict("computer", (2,), factor, "")])


def test_the_ladder_gives_less_work_then_none() -> None:
    slow, removed = acted("ladder", computer(3.0))
    assert not slow.rebalance and not removed, "one judgement is no proof"
    slow, removed = acted("ladder", computer(5.0), computer(5.0))
    assert slow.rebalance and slow.factors == {12: 5.0} and not removed
    # which helped, or did not
    more = [computer(3.0)] * 1
    slow, removed = acted("ladder", *(computer(3.0) for _ in range(4)), *more)
    assert not removed
    slow, removed = acted("ladder", *(computer(5.0) for _ in range(3)))
    assert removed == [12]
    # the others' rungs: only the first, only the last
    assert acted("rebalance", *(computer(5.0) for _ in range(4)))[1] == []
    assert 12 in acted("leave-out", computer(2.0), computer(2.0))[1]
    slow, removed = acted("say", computer(9.0), computer(9.0))
    assert not slow.rebalance and not removed


def test_a_rank_that_is_too_slow_for_a_sample_has_no_more_to_do() -> None:
    """Nothing is measured of it then; the ladder goes on without it, the other actions leave it without work."""

    def idle() -> Watch:
        return Watch([], shares={2: 0.0})

    for actions, leaves in (("ladder", [12]), ("rebalance", [])):
        slow, removed = acted(actions, computer(10.0), computer(10.0), idle())
        assert slow.factors == {12: 10.0} and removed == leaves
    digests = [
        Digest(rank, "", dict.fromkeys(range(20), StepTimes(1.0, 0.0, 0.0)), "", 0.0)
        for rank in range(3)
    ]
    assert slow_computers(digests, {}, {0: 1.0, 1: 1.0, 2: 0.0}) == []


@pytest.mark.parametrize("kind", ["sender", "receiver", "network"])
def test_a_rank_with_a_slow_network_is_left_out(kind: str) -> None:
    def judged(factor: float) -> Watch:
        return Watch([Verdict(kind, (1,), factor, "")])

    assert acted("ladder", judged(9.0))[1] == []
    assert acted("ladder", judged(9.0), judged(9.0))[1] == [11]
    assert acted("leave-out", judged(9.0), judged(9.0))[1] == [11]
    assert acted("rebalance", judged(9.0), judged(9.0))[1] == []
    assert acted("ladder", judged(1.5), judged(1.5))[1] == []


def test_a_slow_link_numbers_the_ranks_anew() -> None:
    def judged() -> Watch:
        return Watch([Verdict("link", (1, 2), 20.0, "")], slow_link(1, 2))

    for actions in ("ladder", "rebalance"):
        slow, removed = acted(actions, judged(), judged())
        assert slow.rebalance and not removed
        assert sorted(slow.order) == [10, 11, 12, 13]
        assert abs(slow.order.index(11) - slow.order.index(12)) == 2
    assert acted("say", judged(), judged())[0].order == []
    assert acted("ladder", judged())[0].order == []


def test_a_slow_stage_is_a_computer_of_the_ladder_too() -> None:
    slow, removed = acted("ladder", computer(3), computer(3), layout=Layout(pp=4))
    assert slow.layout_for(Layout(pp=4), MEMBERS).stage_speeds == (1, 1, 1 / 3, 1)
    assert not removed
