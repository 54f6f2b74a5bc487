"""Dispatch by workload, with the faults that the paper's published code has."""

from __future__ import annotations

import pytest

from weft.cluster.dispatch_policy import DispatchRequest, EngineView
from weft.cluster.engine_times import ClusterTimes
from weft.techniques.dispatch_policies.balanced import ByWorkload

ASKED = DispatchRequest(10, "", 0)


def view(name: str, seconds: float, work: float, answers: int = 0) -> EngineView:
    return EngineView(name, 100, 0, answers, 0, 16, seconds, work)


def test_without_work_the_fastest_is_chosen_and_not_the_first() -> None:
    assert ByWorkload(0.2)([view("a", 2, 0), view("b", 1, 0)], ASKED) == "b"


@pytest.mark.parametrize(("weight", "chosen"), [(0.0, "slow"), (0.9, "fast")])
def test_speed_counts_by_its_weight(weight: float, chosen: str) -> None:
    engines = [view("fast", 1.0, 6.0), view("slow", 2.0, 4.0)]
    assert ByWorkload(weight)(engines, ASKED) == chosen


def test_of_equals_the_one_with_the_fewest_answers_is_chosen() -> None:
    assert ByWorkload(0.0)([view("a", 1, 3, 2), view("b", 1, 3, 1)], ASKED) == "b"


def test_work_falls_when_requests_end() -> None:
    """In the reference's queue it only grows."""
    times = ClusterTimes(["a", "b"])
    times.begin("a", 1, "x", 10, 0.0)
    times.begin("a", 2, "x", 10, 0.0)
    assert (times.work("a"), times.work("b")) == (2.0, 0.0)
    for second in (1.0, 2.0, 3.0):
        times.token("a", 1, second)
    times.end("a", 1)
    assert times.work("a") == 1.0
    times.end("a", 2, whole=False)
    times.end("a", 2)
    assert times.work("a") == 0.0
    assert times.tokens.mean("x") == (10, 3)
    # alone at its beginning: a tenth of a second for each prompt token, then a token per second
    assert times.seconds("a", "x") == pytest.approx(10 * 0.1 + 3 * 1.0)
    # the other has measured nothing and is taken to be as fast
    assert times.seconds("b", "x") == times.seconds("a", "x")


def test_a_prompt_that_waited_for_others_is_not_measured() -> None:
    times = ClusterTimes(["a"])
    times.begin("a", 1, "x", 10, 0.0)
    times.begin("a", 2, "x", 10, 0.0)
    times.token("a", 2, 50.0)
    times.end("a", 2)
    assert not times.engines["a"].prompt_second.count


def test_engines_join_and_leave() -> None:
    times = ClusterTimes(["a"])
    times.add_engine("b")
    times.begin("b", 1, "x", 10, 0.0)
    times.remove_engine("b")
    times.end("b", 1)
    assert [*times.engines] == ["a"]
