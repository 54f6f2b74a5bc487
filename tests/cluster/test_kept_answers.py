"""A router that is killed and started again: engines go on with answers that have a key, and hand them over."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.cluster.inprocess import Cluster, InThread, alone, asked, until, written_by
from weft.cluster.kept_answers import kept_key
from weft.generate.backend import AnswerRequest, TokenEvent
from weft.generate.request import Written
from weft.generate.sampling import Sampling
from weft.serve.api_server import seed_for_key

KEY = "chosen by the client"


@contextmanager
def held_back(cluster: Cluster, steps: float) -> Iterator[None]:
    """Let each engine write so many tokens of a text until the context ends, however late others get their core."""
    over = threading.Event()

    def hold(engine: InThread) -> None:
        step, taken = engine.engine.step, 0

        def held() -> list[Written]:
            nonlocal taken
            if taken >= steps and not over.is_set():
                time.sleep(0.005)
                return []
            written = step()
            taken += bool(written)
            return written

        engine.engine.step = held  # type: ignore[method-assign]

    for engine in cluster.engines:
        hold(engine)
    try:
        yield
    finally:
        over.set()


async def leave_router(
    cluster: Cluster,
    requests: list[AnswerRequest],
    key: str,
    events: int,
    meanwhile: Callable[[], None] = lambda: None,
    steps: float = 8,
) -> None:
    """Ask for answers, and have the router die after so many ``events`` and what happens ``meanwhile``; no text gets
    more tokens than ``steps`` before that.
    """
    with held_back(cluster, steps):
        async with cluster.router.answers(requests, key=key) as answers:
            for _ in range(events):
                await answers.next()
            meanwhile()
            old, names = cluster.router, {*cluster.router.links}
            await asyncio.to_thread(cluster.restart)
            until(lambda: {*cluster.router.links} == names)
            answers.router = old


def writing(cluster: Cluster) -> int:
    return sum(len(engine.member.thread.tells) for engine in cluster.engines)


@pytest.mark.parametrize("scored", [False, True])
def test_answers_go_on_while_the_router_is_gone(scored: bool) -> None:
    requests = [
        asked([5, 6, 7], 40),
        asked([9], 30, Sampling(1.0, seed=4), answers=2, top=2 if scored else None,
              scored=scored),
    ]  # fmt: skip
    plain = [each for request in requests for each in alone(request)]
    with Cluster(2, slow=0.01) as cluster:

        async def main() -> None:
            await leave_router(cluster, requests, KEY, 12)
            links = cluster.router.links.values()
            until(lambda: sum(len(link.kept) for link in links) == 3)
            async with cluster.router.answers(requests, key=KEY) as answers:
                first = await answers.next()
                assert first.token == plain[first.number].written[0]
                left = len(plain)
                while left:
                    left -= bool((await answers.next()).finished)
                for flight, generation in zip(answers.generations, plain, strict=True):
                    assert flight.tokens == generation.written
                    assert len(flight.log_probabilities) == len(
                        generation.log_probabilities
                    )
                    assert len(flight.prompt_scores) == len(generation.prompt_scores)

        asyncio.run(main())
        # nothing was computed again
        tokens = sum(each.member.thread.load().tokens for each in cluster.engines)
        assert tokens == sum(len(generation.written) for generation in plain)
        until(lambda: all(engine.empty() for engine in cluster.engines))
        assert not writing(cluster)


def test_an_answer_that_ended_meanwhile_is_handed_over_whole() -> None:
    request = asked([1, 2], 10)
    plain = alone(request)[0].written
    with Cluster(1, slow=0.05) as cluster:
        kept = cluster.engines[0].member.kept
        asyncio.run(leave_router(cluster, [request], KEY, 2))
        until(lambda: kept.keys and not writing(cluster))
        events: list[TokenEvent] = []
        again = written_by(cluster.router, [request], events.append, KEY)
        assert asyncio.run(again) == [plain]
        assert events[-1].finished == "length" and not kept.keys


@pytest.mark.soak
def test_only_who_asks_the_same_with_the_same_key_gets_it() -> None:
    request = asked([1, 2], 300, Sampling(1.0, seed=1))
    key = kept_key("k", request)
    others = [
        request._replace(how=Sampling(1.0, seed=2)),
        request._replace(ids=[1, 3]),
        request._replace(tenant="another"),
        request._replace(most=301),
        request._replace(top=1),
    ]
    assert len({key, kept_key("l", request), *(kept_key("k", r) for r in others)}) == 7
    assert kept_key("k", request._replace(written=[4])) == key
    assert (
        seed_for_key("k", "") == seed_for_key("k", "") != seed_for_key("k", "another")
    )
    with Cluster(1, slow=0.005) as cluster:
        (engine,) = cluster.engines
        asyncio.run(leave_router(cluster, [request], "", 2))
        until(engine.empty)  # nobody could ask for it
        asyncio.run(leave_router(cluster, [request], KEY, 2))
        assert engine.member.kept.keys
        # a router that is there has it go on elsewhere, and nothing is kept twice
        engine.cut()
        until(lambda: not engine.member.kept.keys and engine.empty())


def test_what_nobody_asks_for_makes_room_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long, short = [asked([i], 500) for i in range(3)], [asked([9], 5)]
    plain = alone(short[0])[0].written
    with Cluster(1, slow=0.002, most=3) as cluster:
        (engine,) = cluster.engines
        asyncio.run(leave_router(cluster, long, KEY, 3))
        until(lambda: len(engine.member.kept.keys) == 3)
        assert asyncio.run(written_by(cluster.router, short)) == [plain]
        assert len(engine.member.kept.keys) == 2
        monkeypatch.setattr("weft.cluster.kept_answers.KEEP_S", 0.0)
        until(engine.empty)


def test_an_answer_that_has_moved_is_kept_where_it_is() -> None:
    request = asked([3, 4], 60)
    plain = alone(request)[0].written
    with Cluster(2, slow=0.01, router={"balances": False}) as cluster:

        def move() -> None:
            router = cluster.router
            (flight,) = router._flights.values()
            (other,) = {*router.links} - {flight.engine}
            with router._lock:
                router.moves.move(flight, router.links[other], after_first=False)
            until(lambda: router.moves.moved)

        # a move may need steps
        asyncio.run(leave_router(cluster, [request], KEY, 3, move, math.inf))
        links = cluster.router.links.values()
        until(lambda: sum(len(link.kept) for link in links) == 1)
        assert asyncio.run(written_by(cluster.router, [request], key=KEY)) == [plain]
        tokens = sum(each.member.thread.load().tokens for each in cluster.engines)
        assert tokens == len(plain)
