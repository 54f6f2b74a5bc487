"""Dispatch policies: which engine a request goes to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from tests.cluster.inprocess import Cluster, asked, build, until, written_by
from weft.cluster.cluster_messages import EngineAbout, EngineBeat
from weft.cluster.dispatch_policy import (
    DispatchRequest,
    EngineView,
    dispatch_policy,
    freest,
    lightest,
)
from weft.cluster.engine_link import EarlyEvents, EngineLink
from weft.cluster.flight import Flight
from weft.errors import UsageError
from weft.generate.backend import EngineLoad
from weft.generate.engine import Engine
from weft.generate.sampling import GREEDY
from weft.registry import declared

if TYPE_CHECKING:
    from weft.cluster.outbox import Outbox


def view(name: str, usage: float, answers: int = 1, known: int = 0) -> EngineView:
    return EngineView(name, 100, usage, answers, known, 4)


def test_load_is_free_memory_for_each_answer() -> None:
    request = DispatchRequest(10, "", 0)
    assert freest([view("a", 50, 5), view("b", 50, 4)], request) == "b"
    assert freest([view("a", 10, 5), view("b", 80, 4)], request) == "a"
    # a queue that exceeds the memory
    assert freest([view("a", 180, 9), view("b", 120, 9)], request) == "b"
    assert freest([view("b", 0, 0), view("a", 0, 0)], request) == "a"


def test_a_moved_answer_goes_where_a_step_has_least_to_do() -> None:
    request = DispatchRequest(10, "", 0)
    assert lightest([view("a", 50, 4), view("b", 50, 3)], request) == "b"
    # keys that every step reads count as much as answers: by memory per answer it would be b
    crowd = [view("a", 5, 4), view("b", 20, 3)]
    assert freest(crowd, request) == "b" and lightest(crowd, request) == "a"
    assert lightest([view("b", 0, 0), view("a", 0, 0)], request) == "a"


def test_a_known_prefix_is_worth_its_blocks() -> None:
    choose = dispatch_policy("cached-prefix")
    request = DispatchRequest(40, "", 0)
    assert choose([view("a", 10), view("b", 15, known=36)], request) == "b"
    assert choose([view("a", 10), view("b", 25, known=36)], request) == "a"
    assert choose([view("b", 9), view("a", 9)], request) == "a"
    # at a cache engine, it makes a crowded engine less worth: 36 tokens cost 2.25 blocks there, 9 blocks elsewhere
    both = [view("a", 10)._replace(kept=36), view("b", 15, known=36)._replace(kept=36)]
    assert choose(both, request) == "a"
    near = [both[0], both[1]._replace(usage=12)]
    assert choose(near, request) == "b"


def test_a_session_stays_and_a_new_engine_moves_only_what_it_gets() -> None:
    choose = dispatch_policy("session")
    engines = [view(f"e{i}", i) for i in range(4)]

    def chosen(count: int) -> list[str]:
        return [
            choose(engines[:count], DispatchRequest(1, str(i), 0)) for i in range(400)
        ]

    before, after = chosen(3), chosen(4)
    assert {a for a, b in zip(after, before, strict=True) if a != b} == {"e3"}
    assert all(60 < after.count(f"e{i}") < 140 for i in range(4))
    assert choose(engines, DispatchRequest(1, "", 0)) == "e0"


def test_a_view_counts_what_has_left_since_a_sign_of_life_and_what_is_on_its_way() -> None:  # fmt: skip
    about = EngineAbout("a", "1", "0", "", 31, 8, 400, 4, 8, True, {})
    link = EngineLink(about, cast("Outbox", None))
    request = asked([1] * 10, 4)
    flight = link.flights[7] = Flight(7, request, 0, "")
    link.note_beat(EngineBeat(EngineLoad(1, 0, 0, 5, 100), 0, 0))
    assert (link.view(request).usage, link.view(request).answers) == (5, 1)
    flight.tokens = [1] * 3
    link.let_go(flight)
    link.let_go(flight)  # it is no longer there
    assert (link.view(request).usage, link.view(request).answers) == (1, 0)
    link.incoming[8] = EarlyEvents()
    assert link.view(request).answers == 1
    link.note_beat(EngineBeat(EngineLoad(1, 0, 0, 3, 100), 0, 0))
    assert link.view(request).usage == 3


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--dispatch cannot be .sessions.; .*session"):
        dispatch_policy("sessions")
    policies = {"balanced", "cached-prefix", "session"}
    assert {t.name for t in declared("dispatch-policy")} == policies


def test_requests_with_a_prefix_go_where_it_is() -> None:
    prefixes = [[i] * 40 for i in range(1, 5)]
    with Cluster(2, dispatch_policy("cached-prefix")) as cluster:

        async def main() -> list[int]:
            for prefix in prefixes:
                await written_by(cluster.router, [asked(prefix, 4)])
                until(
                    lambda: all(not e.engine.scheduler.running for e in cluster.engines)
                )
            hits = []
            for prefix in prefixes * 2:
                async with cluster.router.answers([asked([*prefix, 9], 4)]) as answers:
                    while not (await answers.next()).finished:
                        pass
                    hits.append(answers.generations[0].hits)
            return hits

        assert asyncio.run(main()) == [40] * 8


def test_the_router_knows_the_work_of_its_engines() -> None:
    """Requests that are under way are the work of their engine, and none is left once they have ended or are gone."""
    with Cluster(2, dispatch_policy("balanced")) as cluster:
        times = cluster.router.times

        async def main() -> None:
            async with cluster.router.answers([asked([i], 50) for i in range(1, 7)]):
                assert [len(link.flights) for link in cluster.router.links.values()] == [3, 3]  # fmt: skip
                assert all(times.work(name) == 3.0 for name in times.engines)
            await written_by(cluster.router, [asked([1] * 6, 8)])

        asyncio.run(main())
        assert sum(times.work(name) for name in times.engines) < 4.0
        assert times.tokens.mean("") == (6, 8)
        assert any(each.measured for each in times.engines.values())


def test_a_session_goes_to_its_engine() -> None:
    with Cluster(3, dispatch_policy("session")) as cluster:

        async def engine_of(session: str) -> str:
            async with cluster.router.answers([asked([1], 2)], session) as answers:
                return answers.generations[0].engine

        async def main() -> None:
            for session in ("a", "b", "c", "d"):
                first = await engine_of(session)
                assert first == await engine_of(session) != ""

        asyncio.run(main())


def test_waiting_requests_count_as_memory() -> None:
    """What has been sent to an engine counts at once, before the engine's next sign of life."""
    with Cluster(2) as cluster:

        async def main() -> set[int]:
            async with cluster.router.answers([asked([1] * 20, 50)] * 8):
                return {len(link.flights) for link in cluster.router.links.values()}

        assert asyncio.run(main()) == {4}


def test_urgent_requests_begin_first_and_lose_their_blocks_last() -> None:
    engine = Engine(build(), 64, limit=1, size=4)
    later, urgent = (
        engine.submit([1, 2], 5, GREEDY, priority=priority)[0] for priority in (0, -1)
    )
    plain = engine.submit([1, 2], 5, GREEDY, priority=1)[0]
    order = []
    while not (later.finished and urgent.finished and plain.finished):
        order += [written.request for written in engine.step() if written.finished]
    assert order == [urgent, later, plain]
    tight = Engine(build(), 32, size=4)
    low = tight.submit([1] * 8, 16, GREEDY, priority=1)[0]
    tight.step()
    high = tight.submit([2] * 8, 16, GREEDY, priority=-1)[0]
    while not high.finished:
        tight.step()
    assert tight.scheduler.preemptions and not low.finished
