"""A router over engines: the tokens of one request alone, whatever engines come and go."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from tests.cluster import inprocess
from tests.cluster.inprocess import (
    MODEL,
    SECRET,
    Cluster,
    alone,
    asked,
    build,
    until,
    written_by,
)
from weft.cluster.engine_router import EngineRouter
from weft.cluster.flight import Flight, fail_future
from weft.cluster.other_router import router_endpoint
from weft.cluster.router_model import RouterModel
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError, WeftError
from weft.generate.backend import (
    Busy,
    NoEngine,
    SearchRequest,
    ServerEnding,
    TokenEvent,
)
from weft.generate.beam_search import LENGTH_PENALTY, Search
from weft.generate.best_answer import text_score
from weft.generate.embedding import embed
from weft.generate.engine import Engine
from weft.generate.request import Written
from weft.generate.sampling import GREEDY, Sampling
from weft.layout.mesh import Mesh
from weft.net.endpoint import Endpoint
from weft.net.sockets import listen
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.serve.gate import gate_rules
from weft.serve.server import Server

Scores = Sequence[tuple[float, dict[int, float]]]


def close(scores: Scores, plain: Scores) -> None:
    """Of other batches, whose sums differ in their last bits."""
    assert len(scores) == len(plain)
    for (chosen, likeliest), (other, others) in zip(scores, plain, strict=True):
        assert chosen == pytest.approx(other, abs=1e-4)
        assert likeliest == pytest.approx(others, abs=1e-4)


def stuck() -> list[Written]:
    """The step of an engine that comes to nothing."""
    time.sleep(0.01)
    return []


def test_answers_are_those_of_one_engine() -> None:
    requests = [
        asked([3, 1, 4, 1, 5], 10),
        asked([2, 7], 8, Sampling(1.0, seed=5), answers=3, top=2),
        asked([1] * 30, 5, scored=True, top=0),
    ]
    plain = [generation for request in requests for generation in alone(request)]
    with Cluster(2) as cluster:

        async def main() -> None:
            async with cluster.router.answers(requests) as answers:
                left = len(answers.generations)
                while left:
                    left -= bool((await answers.next()).finished)
            for flight, generation in zip(answers.generations, plain, strict=True):
                assert flight.tokens == generation.written
                close(flight.log_probabilities, generation.log_probabilities)
                close(flight.prompt_scores, generation.prompt_scores)
                assert flight.score == pytest.approx(generation.score, abs=1e-4)

        asyncio.run(main())
        assert all(link.cache.submitted for link in cluster.router.links.values())
        until(lambda: all(engine.empty() for engine in cluster.engines))


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    "cases", [(0, 1), pytest.param(range(2, 6), marks=pytest.mark.soak)]
)
def test_killed_at_any_token_the_text_goes_on(cases: Sequence[int]) -> None:
    """Engines are killed one after the other at drawn tokens, greedy and sampled, and new ones join."""
    for case in cases:
        draw = Random(case)
        how = GREEDY if case % 2 else Sampling(1.0, seed=case)
        requests = [
            asked([draw.randrange(97) for _ in range(draw.randrange(1, 20))], 14, how)
            for _ in range(4)
        ]
        plain = [alone(request)[0].written for request in requests]
        with Cluster(2, slow=0.02) as cluster:
            left = draw.sample(range(1, 45), 3)

            def seen(
                event: TokenEvent, cluster: Cluster = cluster, left: Any = left
            ) -> None:
                left[:] = [events - 1 for events in left]
                busy = [name for name, link in cluster.router.links.items() if link.flights]  # fmt: skip
                due = [events for events in left if events <= 0]
                killed = next((e for e in cluster.engines if e.member.about.name in busy), None)  # fmt: skip
                # at the moment of an answer's end, or of a move, none may be busy
                if due and killed is not None:
                    left.remove(due[0])
                    cluster.engines.append(cluster.add(f"new{len(cluster.said)}"))
                    cluster.engines.remove(killed)
                    killed.kill()

            assert asyncio.run(written_by(cluster.router, requests, seen)) == plain
            assert cluster.router.continued


@pytest.mark.slow(3)
def test_frozen_is_noticed_within_two_seconds_and_joins_anew() -> None:
    request = asked([5, 6, 7], 100)
    plain = alone(request)[0].written
    with Cluster(1, slow=0.005) as cluster:
        frozen, times, thaw = cluster.engines[0], list[float](), threading.Event()

        def seen(event: TokenEvent) -> None:
            nonlocal thaw
            times.append(time.monotonic())
            if len(times) == 20:
                cluster.engines.append(cluster.add("e1"))
                until(lambda: len(cluster.router.links) == 2)
                thaw = frozen.freeze()

        written = asyncio.run(written_by(cluster.router, [request], seen))
        assert written == [plain]
        shared = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        assert max(b - a for a, b in pairwise(times[20:])) < 2.0 * shared
        assert any("no sign of life for 1.5 s" in line for line in cluster.said)
        thaw.set()
        until(lambda: len(cluster.router.links) == 2)
        given_up = "it was given up: no sign of life"
        until(lambda: any(given_up in line for line in frozen.said))
        until(lambda: all(engine.empty() for engine in cluster.engines))


@pytest.mark.soak
def test_an_engine_whose_rank_is_stopped_says_so_and_joins_anew_with_it() -> None:
    request = asked([5, 6, 7], 60)
    plain = alone(request)[0].written
    silent = "its rank 1 has given no sign of life for 1.3 s"
    with Cluster(1, slow=0.01) as cluster:
        halted, tokens, thaw = cluster.engines[0], 0, threading.Event()

        def seen(event: TokenEvent) -> None:
            nonlocal tokens
            tokens += 1
            if tokens == 10:  # a step that waits for the rank
                cluster.engines.append(cluster.add("e1"))
                until(lambda: len(cluster.router.links) == 2)
                step = halted.engine.step
                halted.engine.step = lambda: (thaw.wait(30), step())[1]  # type: ignore[method-assign]
                halted.engine.silence = lambda: "" if thaw.is_set() else silent  # type: ignore[method-assign]

        written = asyncio.run(written_by(cluster.router, [request], seen))
        assert written == [plain]
        assert f"engine e0 is given up: {silent}; 1 answers go on elsewhere" in cluster.said  # fmt: skip
        time.sleep(0.4)
        assert [*cluster.router.links] == ["e1"]  # it waits for its rank
        thaw.set()
        until(lambda: len(cluster.router.links) == 2)
        until(lambda: all(engine.empty() for engine in cluster.engines))
        turn = asyncio.run(written_by(cluster.router, [request, request, request]))
        assert turn == [plain] * 3


def test_a_cut_engine_keeps_its_blocks_and_joins_anew() -> None:
    request = asked(list(range(40)), 30)
    plain = alone(request)[0].written
    with Cluster(1, slow=0.005) as cluster:
        events = 0

        def seen(event: TokenEvent) -> None:
            nonlocal events
            events += 1
            if events == 10:
                cluster.router.let_go.update(cluster.router.links)
                cluster.engines[0].cut()

        async def main() -> None:
            assert await written_by(cluster.router, [request], seen) == [plain]
            # an engine that is there again has not been asked to end
            assert not cluster.router.let_go
            async with cluster.router.answers([request]) as answers:
                await answers.next()
                assert answers.generations[0].hits >= 36

        asyncio.run(main())
        assert cluster.router.continued == 1


def test_who_may_not_join_is_told_why() -> None:
    with Cluster(1) as cluster:
        wrong = {
            "its model has other weights": {"fingerprint": "another"},
            "it runs Weft 9.9": {"version": "9.9"},
            "an engine named 'e0' has joined already": {"name": "e0"},
        }
        for said, about in wrong.items():
            engine = cluster.add("x", about=about)
            until(lambda engine=engine: engine.error)
            assert said in str(engine.error)
            until(lambda said=said: any(said in line for line in cluster.said))
            engine.close()
        cluster.router.model = replace(MODEL, adapters={"a": "of the router"})
        other = cluster.add("x", about={"adapters": {"a": "another"}})
        until(lambda: other.error)
        assert "its adapter 'a' has other weights than the router's" in str(other.error)
        other.close()
        stranger = cluster.add("stranger", secret="no secret")
        until(lambda: stranger.error)
        assert "it has another secret" in str(stranger.error)
        until(lambda: any("from 127.0.0.1 is refused" in line for line in cluster.said))
        stranger.close()
        assert [*cluster.router.links] == ["e0"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("nonsense", [
    {"kind": "tokens"},
    {"kind": "tokens", "tokens": [[0]], "begun": [], "failures": []},
    {"kind": "beat", "load": [1]},
    {"kind": "moved", "answer": []},
    {"kind": "kept", "keys": None},
    {},
])  # fmt: skip
def test_an_engine_that_says_nonsense_is_given_up(nonsense: dict[str, Any]) -> None:
    request = asked([5, 6, 7], 30)
    plain = alone(request)[0].written
    with Cluster(2, slow=0.005) as cluster:
        events = 0

        def seen(event: TokenEvent) -> None:
            nonlocal events
            events += 1
            if events == 5:
                links = cluster.router.links
                engine = max(cluster.engines, key=lambda e: len(links[e.member.about.name].flights))  # fmt: skip
                engine.member._current.outbox.put(nonsense)  # type: ignore[union-attr]

        assert asyncio.run(written_by(cluster.router, [request], seen)) == [plain]
        until(
            lambda: any(
                "a message that cannot be read" in line for line in cluster.said
            )
        )
        until(lambda: len(cluster.router.links) == 2)


def test_drained_engines_end_and_nothing_new_comes_to_them() -> None:
    request, long = asked([1, 2, 3], 6), asked([9, 8], 120)
    plain, whole = alone(request)[0].written, alone(long)[0].written
    with Cluster(2, slow=0.005) as cluster:
        first, second = cluster.engines

        async def main() -> None:
            async with cluster.router.answers([long]) as answers:
                await answers.next()
                for link in cluster.router.links.values():  # no block can travel
                    link.about = link.about._replace(port=1)
                (at,) = [
                    engine
                    for engine in cluster.engines
                    if cluster.router.links[engine.member.about.name].flights
                ]
                at.member.drain()
                until(lambda: at.member.about.name in draining(cluster))
                for _ in range(4):
                    assert await written_by(cluster.router, [request]) == [plain]
                assert at.thread.is_alive()
                at.member.drain(move=True)
                until(lambda: not at.thread.is_alive())
                until(at.empty)  # its engine's thread cancels after it has left
                assert at.error is None
                while not (await answers.next()).finished:
                    pass
                assert answers.generations[0].tokens == whole

        asyncio.run(main())
        assert first.thread.is_alive() != second.thread.is_alive()
        assert any(line.endswith("has left") for line in cluster.said)


def draining(cluster: Cluster) -> list[str]:
    return [name for name, link in cluster.router.links.items() if link.draining]


def test_without_engines_requests_are_refused_until_an_engine_joins() -> None:
    request = asked([1, 2, 3], 60)
    plain = alone(request)[0].written
    with Cluster(1, slow=0.005) as cluster:

        async def main() -> None:
            async with cluster.router.answers([request]) as answers:
                for _ in range(10):
                    await answers.next()
                cluster.engines.pop().kill()
                until(lambda: not cluster.router.links)
                assert isinstance(cluster.router.failure, NoEngine)
                with pytest.raises(NoEngine):
                    await written_by(cluster.router, [request])
                cluster.engines.append(cluster.add("later"))
                while not (await asyncio.wait_for(answers.next(), 20)).finished:
                    pass
                assert answers.generations[0].tokens == plain
            assert await written_by(cluster.router, [request]) == [plain]

        asyncio.run(main())


def test_an_answer_does_not_wait_for_ever() -> None:
    with Cluster(1, patience=0.3, slow=0.005) as cluster:

        async def main() -> None:
            async with cluster.router.answers([asked([1], 500)]) as answers:
                await answers.next()
                cluster.engines.pop().kill()
                with pytest.raises(NoEngine, match=r"for 0\.3 s"):
                    while True:
                        await asyncio.wait_for(answers.next(), 20)

        asyncio.run(main())


class Leaving(Future[None]):
    """The future of a client that leaves as soon as somebody has looked whether it waits."""

    def done(self) -> bool:
        waited = not super().done()
        self.cancel()
        return not waited


def test_a_client_that_leaves_as_its_answer_is_taken_ends_no_engine() -> None:
    for late in (False, True):
        flight = Flight(0, asked([1], 5), 0, "", accepted=Leaving())
        if late:
            flight.accepted.cancel()
        flight.note_accepted()
        fail_future(flight.accepted, NoEngine("none"))


def test_a_request_that_ends_every_engine_ends_itself() -> None:
    with Cluster(4) as cluster:
        for engine in cluster.engines:
            plain = engine.engine.step

            def step(plain: Any = plain, engine: Any = engine) -> Any:
                running = engine.engine.scheduler.waiting
                if any(request.ids[0] == 13 for request in running):
                    raise RuntimeError("poison")
                return plain()

            engine.engine.step = step  # type: ignore[method-assign]
        with pytest.raises(WeftError, match="3 engines were lost in a row"):
            asyncio.run(written_by(cluster.router, [asked([13], 5)]))
        assert len(cluster.router.links) == 1
        until(lambda: sum(engine.error is not None for engine in cluster.engines) == 3)
        assert "the engine has failed: poison" in str(
            next(filter(None, (engine.error for engine in cluster.engines)))
        )
        assert asyncio.run(written_by(cluster.router, [asked([1], 5)]))


def test_answers_that_lose_engines_by_accident_do_not_end_together() -> None:
    """Three engines are lost in a row before any of eight answers has a token: one of them at most is blamed."""
    requests = [asked([i + 1, 7], 6) for i in range(8)]
    plain = [alone(request)[0].written for request in requests]
    with Cluster(1) as cluster:
        cluster.engines[0].engine.step = stuck  # type: ignore[method-assign]

        async def main() -> list[Any]:
            texts = [
                asyncio.create_task(written_by(cluster.router, [request]))
                for request in requests
            ]
            for i in range(3):
                last = cluster.engines[-1]
                while not len(cluster.router.links):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.3)
                cluster.engines.append(cluster.add(f"next{i}"))
                if i < 2:
                    cluster.engines[-1].engine.step = stuck  # type: ignore[method-assign]
                await asyncio.to_thread(last.kill)
            return await asyncio.gather(*texts, return_exceptions=True)

        texts = asyncio.run(main())
        ended = [text for text in texts if isinstance(text, WeftError)]
        assert len(ended) <= 1
        for text, expected in zip(texts, plain, strict=True):
            assert text in ended or text == [expected]


@pytest.mark.parametrize("hung", [0.0, 2.0])
def test_cut_links_speak_against_no_answer(hung: float) -> None:
    """An engine is cut off again and again before a first token. An answer is blamed only if the engine says that it
    was busy with something that let none of its threads run.
    """
    request = asked([5, 7], 6)
    plain = alone(request)[0].written
    with Cluster(1) as cluster:
        (engine,) = cluster.engines
        step, goes_on = engine.engine.step, threading.Event()
        engine.engine.step = lambda: step() if goes_on.is_set() else stuck()  # type: ignore[method-assign]

        async def main() -> list[list[int]]:
            text, cut = asyncio.create_task(written_by(cluster.router, [request])), None
            for _ in range(7):
                while engine.member._current in (None, cut) or not any(
                    link.flights for link in cluster.router.links.values()
                ):
                    if text.done():
                        return await text
                    await asyncio.sleep(0.005)
                (link,) = cluster.router.links.values()
                engine.member._pulse.note(hung, hung)
                cut = engine.member._current
                engine.cut()
                until(lambda link=link: link not in cluster.router.links.values())
            goes_on.set()
            return await text

        if hung:
            with pytest.raises(WeftError, match="5 engines were lost in a row"):
                asyncio.run(main())
        else:
            assert asyncio.run(main()) == [plain]


def test_a_request_that_makes_engines_say_nonsense_ends() -> None:
    with Cluster(1) as cluster:
        (engine,) = cluster.engines

        def step() -> list[Written]:
            if current := engine.member._current:
                current.outbox.put({"kind": "tokens"})
            return stuck()

        engine.engine.step = step  # type: ignore[method-assign]
        with pytest.raises(WeftError, match="3 engines were lost in a row"):
            asyncio.run(written_by(cluster.router, [asked([13], 5)]))


def test_an_engine_that_hears_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the router says is on its way for ever, while all that the engine says comes."""
    for module in ("engine_router", "engine_member"):
        monkeypatch.setattr(f"weft.cluster.{module}.BEAT_S", 0.05)
    request = asked([5, 6, 7], 40)
    plain = alone(request)[0].written
    with Cluster(2, slow=0.02) as cluster:
        deaf, current = threading.Event(), cluster.engines[0].member._current
        assert current is not None
        connection = current.outbox.connection
        receive = connection.receive
        connection.receive = lambda **limit: (deaf.wait(60), receive(**limit))[1]  # type: ignore[method-assign]
        while not any("it has heard nothing" in line for line in cluster.said):
            texts = asyncio.run(written_by(cluster.router, [request] * 2))
            assert texts == [plain] * 2
        deaf.set()
        until(lambda: len(cluster.router.links) == 2)


def test_a_router_that_starts_again_gets_its_engines_back() -> None:
    request = asked(list(range(40)), 4)
    with Cluster(2) as cluster:
        before = asyncio.run(written_by(cluster.router, [request] * 2))
        cluster.router.close()
        cluster.endpoint.close()
        cluster.endpoint = Endpoint(*cluster.endpoint.address)
        cluster.router = EngineRouter(
            cluster.endpoint, SECRET, MODEL, cluster.said.append
        )
        until(lambda: len(cluster.router.links) == 2)

        async def main() -> None:
            async with cluster.router.answers([request] * 2) as answers:
                left = 2
                while left:
                    left -= bool((await answers.next()).finished)
                assert [flight.hits for flight in answers.generations] == [36, 36]

        asyncio.run(main())
        assert asyncio.run(written_by(cluster.router, [request] * 2)) == before


def test_a_second_router_is_refused_and_names_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.cluster.other_router.ANSWER_S", 0.3)
    with Cluster(1, router={"name": "weft serve of tiny, process 7"}) as cluster:
        host, port = cluster.endpoint.address

        def second(secret: str) -> Endpoint:
            return router_endpoint(lambda: Endpoint(host, port), (host, port), secret)

        first = r"another router serves .* \(weft serve of tiny, process 7\); end it"
        with pytest.raises(UsageError, match=first):
            second(SECRET)
        with pytest.raises(
            UsageError, match="a router with another secret or another program"
        ):
            second("another")
        assert [*cluster.router.links] == ["e0"]  # which has not noticed
        with listen(host) as other:
            address = other.getsockname()
            with pytest.raises(
                UsageError, match=r"has not answered for 0\.3 s; end it"
            ):
                router_endpoint(lambda: Endpoint(*address), address, SECRET)


@pytest.mark.parametrize("host", ["203.0.113.9", "nohost.invalid"])
def test_an_address_of_no_host_here_is_refused_with_a_remedy(host: str) -> None:
    """Nobody is asked who serves there: that would be another host's router."""
    remedy = r"set cluster\.listen to an address of this host, or to 0\.0\.0\.0:81"
    with pytest.raises(UsageError, match=f"cannot listen at .*; {remedy}") as error:
        router_endpoint(lambda: Endpoint(host, 81), (host, 81), SECRET)
    assert "while attempting" not in str(error.value)


def test_a_proxy_before_a_router_that_is_gone_is_no_stranger() -> None:
    """A tunnel or proxy takes connections while the router behind it starts, and ends them without a word."""
    with Cluster(1) as cluster:
        host, port = cluster.endpoint.address
        cluster.router.close()
        cluster.endpoint.close()
        with listen(host, port) as proxy:
            for _ in range(5):
                proxy.accept()[0].close()
        cluster.endpoint = Endpoint(host, port)
        cluster.router = EngineRouter(
            cluster.endpoint, SECRET, MODEL, cluster.said.append
        )
        until(lambda: cluster.router.links)
        assert cluster.engines[0].error is None


def test_too_much_is_refused_and_what_nobody_wants_is_cancelled() -> None:
    with Cluster(1, most=3, tokens=256) as cluster:
        until(cluster.router._able)

        async def main() -> None:
            async with cluster.router.answers([asked([1], 100)] * 3):
                with pytest.raises(Busy):
                    await written_by(cluster.router, [asked([1], 5)])
            until(cluster.engines[0].empty)
            with pytest.raises(UsageError, match="do not fit into a cache of 256"):
                await written_by(cluster.router, [asked([1], 500)])
            with pytest.raises(UsageError, match="the most is 3"):
                await written_by(cluster.router, [asked([1], 5, answers=4)])
            with pytest.raises(UsageError, match="below the model's 97"):
                await written_by(cluster.router, [asked([400], 5)])
            with pytest.raises(NoEngine, match="no engine has the adapter 'a'"):
                await written_by(cluster.router, [asked([1], 5, adapter="a")])
            async with cluster.router.answers([asked([1], 200)]) as answers:
                await answers.next()
                assert cluster.router.cut_answers() == 1
                with pytest.raises(ServerEnding):
                    while True:
                        await answers.next()
            with pytest.raises(ServerEnding):
                await written_by(cluster.router, [asked([1], 5)])

        asyncio.run(main())
        until(cluster.engines[0].empty)


def test_a_reward_model_scores_at_any_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape(
        vocab=257, layers=1, embed=32, heads=4, ffn=48, init_std=0.5, output="score"
    )
    judge = parallelize(shape, Mesh.single(), Train(seed=2))[0]
    expected = RouterModel("the model", 257, 32, {}, scores=True)
    monkeypatch.setattr(inprocess, "MODEL", expected)
    ids = [72, 105]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = replace(load_tokenizer("bytes"), chat_template=template)
    with Cluster(2, model=judge, vocab=257) as cluster:

        async def main() -> None:
            assert await cluster.router.score(ids) == text_score(judge, ids)
            with pytest.raises(UsageError):
                await cluster.router.score([1000])
            cluster.engines[0].cut()
            assert await cluster.router.score(ids) == text_score(judge, ids)

        asyncio.run(main())
        server = Server(cluster.router, tokenizer, "judge")
        rules = gate_rules("127.0.0.1")
        with TestClient(server.app(rules), base_url="http://127.0.0.1:8000") as client:
            said = [{"role": "user", "content": "Hi"}]
            reply = client.post("/v1/score", json={"messages": said})
            assert reply.json()["score"] == text_score(judge, ids)
            refused = client.post("/v1/completions", json={"prompt": "Hi"})
            assert refused.status_code == 400
            assert "scores texts and writes none" in refused.text


def test_searches_and_vectors_go_on_elsewhere() -> None:
    engine = Engine(build(), 4096, size=4)
    search = SearchRequest([1, 2], 30, 3, (), LENGTH_PENALTY)
    best = Search(engine, [1, 2], 30, 3, (), LENGTH_PENALTY).run()
    vector = embed(engine, [1, 2, 3], "mean", 16)
    with Cluster(2, slow=0.01) as cluster:

        async def main() -> None:
            assert torch.equal(
                await cluster.router.embed([1, 2, 3], "mean", 16), vector
            )
            with pytest.raises(UsageError):
                await cluster.router.embed([1000], "mean", None)
            searching = asyncio.ensure_future(cluster.router.search(search))
            while not any(link.calls for link in cluster.router.links.values()):
                await asyncio.sleep(0.001)
            for engine in cluster.engines:
                if cluster.router.links[engine.member.about.name].calls:
                    engine.cut()
            assert [h.ids for h in await searching] == [h.ids for h in best]
            leaving = asyncio.ensure_future(
                cluster.router.search(search._replace(most=2000))
            )
            await asyncio.sleep(0.1)
            leaving.cancel()
            await asyncio.wait([leaving])

        asyncio.run(main())
        until(lambda: all(engine.empty() for engine in cluster.engines))
