"""Answers that move between engines with their cache blocks: text, bytes, roles, drain, balance."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cluster.inprocess import (
    Cluster,
    InThread,
    alone,
    asked,
    build,
    until,
    written_by,
)
from weft.cluster.answer_moves import AnswerMoves
from weft.cluster.balance import BalancingMove, MovableAnswer, balancing_move
from weft.cluster.cluster_messages import EngineAbout
from weft.cluster.dispatch_policy import EngineView
from weft.cluster.engine_link import EarlyEvents, EngineLink
from weft.cluster.flight import Flight
from weft.cluster.mover import AnswerMove
from weft.errors import WeftError
from weft.generate.backend import AnswerRequest, TokenEvent
from weft.generate.engine import Engine
from weft.generate.sampling import GREEDY, Sampling
from weft.net.wire import Head

#: Bytes of the keys and values of a token: layers, key heads, their width, float32.
TOKEN = 2 * 2 * 2 * 8 * 4


def link_of(cluster: Cluster, engine: InThread) -> EngineLink:
    return cluster.router.links[engine.member.about.name]


def move_one(cluster: Cluster, draw: Random) -> None:
    """Move a drawn answer to a drawn other engine."""
    router = cluster.router
    with router._lock:
        flights = [
            flight
            for flight in router._flights.values()
            if flight.engine and not flight.target
        ]
        if flights:
            flight = draw.choice(sorted(flights, key=lambda f: f.number))
            others = sorted({*router.links} - {flight.engine})
            if not others:  # all others are cut off
                return
            router.moves.move(
                flight, router.links[draw.choice(others)], after_first=False
            )


@pytest.mark.soak
def test_moved_again_and_again_the_text_stays() -> None:
    draw = Random(1)
    requests = [
        asked([draw.randrange(97) for _ in range(draw.randrange(1, 30))], 60,
              GREEDY if i % 2 else Sampling(1.0, seed=i), top=1 if i == 2 else None)
        for i in range(4)
    ]  # fmt: skip
    plain = [alone(request)[0].written for request in requests]
    with Cluster(3, slow=0.01, router={"balances": False}) as cluster:

        def seen(event: TokenEvent) -> None:
            if event.token is not None and draw.random() < 0.3:
                move_one(cluster, draw)

        assert asyncio.run(written_by(cluster.router, requests, seen)) == plain
        counts = cluster.router.counts()
        assert counts["answers_moved"] > 10 and not counts["answers_continued"]
        until(lambda: all(engine.empty() for engine in cluster.engines))
        assert not any(link.incoming for link in cluster.router.links.values())


@pytest.mark.soak  # it measures time
def test_a_move_is_told_while_the_engine_that_is_left_computes_on() -> None:
    """What the other engine writes waits for it, and must not wait for a step of the first one."""
    with Cluster(2, slow=0.002, router={"balances": False}) as cluster:
        first, second = cluster.engines
        requests = [asked([5, 6, i], 400) for i in range(2)]
        times: dict[str, float] = {}

        def seen(event: TokenEvent) -> None:
            if times or event.number or event.token is None:
                return
            times["asked"] = time.monotonic()
            step = first.engine.step
            first.engine.step = lambda: (time.sleep(0.5), step())[1]  # type: ignore[method-assign]
            with cluster.router._lock:
                flight = next(
                    f for f in cluster.router._flights.values() if f.engine == "e0"
                )
                cluster.router.moves.move(flight, cluster.router.links["e1"], after_first=False)  # fmt: skip
            mover = threading.Thread(target=follow)
            mover.start()

        def follow() -> None:
            before = len(second.engine.scheduler.running)
            until(lambda: len(second.engine.scheduler.running) > before)
            times["there"] = time.monotonic()
            until(lambda: cluster.router.moves.moved)
            times["told"] = time.monotonic()
            first.engine.step = lambda: type(first.engine).step(first.engine)  # type: ignore[method-assign]

        assert asyncio.run(written_by(cluster.router, requests, seen)) == [
            one.written for request in requests for one in alone(request)
        ]
        until(lambda: "told" in times)
        assert times["told"] - times["there"] < 0.25


@pytest.mark.slow(3)
@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_moved_and_killed_the_text_stays(case: int) -> None:
    """Engines are cut off while answers move between them."""
    draw = Random(case)
    requests = [
        asked([draw.randrange(97) for _ in range(12)], 50, Sampling(case % 2, seed=i))
        for i in range(4)
    ]
    plain = [alone(request)[0].written for request in requests]
    with Cluster(3, slow=0.01, router={"balances": False}) as cluster:

        def seen(event: TokenEvent) -> None:
            if draw.random() < 0.2:
                move_one(cluster, draw)
            if draw.random() < 0.03:
                draw.choice(cluster.engines).cut()

        assert asyncio.run(written_by(cluster.router, requests, seen)) == plain
        until(lambda: all(engine.empty() for engine in cluster.engines))


def test_bytes_of_a_move_are_those_of_the_formula() -> None:
    request = asked(list(range(50)), 80)
    with Cluster(2, slow=0.01, router={"balances": False}) as cluster:

        async def main() -> None:
            async with cluster.router.answers([request]) as answers:
                for _ in range(10):
                    await answers.next()
                source = answers.generations[0].engine
                move_one(cluster, Random(0))
                while not cluster.router.moves.moved:
                    await answers.next()
                (flight,) = answers.generations
                assert flight.engine != source
                target = cluster.engines[int(flight.engine[1:])]
                (generation,) = target.member.thread.tells
                assert generation.hits == 0

        asyncio.run(main())
        bytes_ = cluster.router.counts()["moved_bytes"]
        assert bytes_ % TOKEN == 0 and 59 <= bytes_ // TOKEN < 130


def with_roles(cluster: Cluster, *roles: str, rows: int = 0) -> None:
    for i, role in enumerate(roles):
        about = {"role": role, "rows": rows}
        cluster.engines.append(cluster.add(f"{role}-{i}", about=about))
    until(lambda: len(cluster.router.links) == len(roles))


def watched(link: EngineLink) -> list[Head]:
    """The messages to an engine from now on which submit or move an answer."""
    orders, put = list[Head](), link.outbox.put

    def noting(head: Head, *payload: Any) -> None:
        if head["kind"] in ("submit", "move"):
            orders.append(head)
        put(head, *payload)

    link.outbox.put = noting  # type: ignore[method-assign]
    return orders


def usages(cluster: Cluster) -> list[int]:
    """The used blocks that engines tell with their tokens from now on."""
    told, take = list[int](), cluster.router._take_tokens

    def noting(link: EngineLink, head: Head) -> None:
        take(link, head)
        if usage := head.get("usage"):
            told.append(usage[0])
            assert link.cache.usage >= usage[0]  # and what was sent since

    cluster.router._take_tokens = noting  # type: ignore[method-assign]
    return told


@pytest.mark.parametrize("budget", [512, 8])
def test_roles_compute_prompts_here_and_write_there(budget: int) -> None:
    """With a small budget the prompts are computed in chunks, whose blocks travel meanwhile."""
    requests = [
        asked([i + 1] * (20 + 9 * i), 12, Sampling(i % 2, seed=i)) for i in range(4)
    ]
    plain = [alone(request)[0].written for request in requests]
    with Cluster(0, budget=budget, slow=0.01) as cluster:
        with_roles(cluster, "prefill", "decode")
        prefill, decode = cluster.engines
        orders, told = watched(link_of(cluster, prefill)), usages(cluster)
        assert asyncio.run(written_by(cluster.router, requests)) == plain
        # an engine takes no step with a prompt before it knows where its answer goes on
        assert [(head["kind"], len(head["moves"])) for head in orders] == [
            ("submit", 1)
        ] * 4
        assert max(told) >= 4 * 3  # blocks of four tokens, of four answers
        counts = cluster.router.counts()
        assert counts["answers_moved"] == 4 and not counts["answers_continued"]
        # the prompt's engine writes the first token, and another one if blocks are still on their way
        assert decode.member.thread.load().tokens >= 4 * 10
        tokens = counts["moved_bytes"] / TOKEN
        prompts = sum(len(request.ids) for request in requests)
        assert prompts <= tokens <= prompts + 4
        # a single token stays where its prompt is
        assert asyncio.run(written_by(cluster.router, [asked([5, 6], 1)]))
        assert cluster.router.counts()["answers_moved"] == 4
        decode.kill()
        cluster.engines.remove(decode)
        assert asyncio.run(written_by(cluster.router, requests[:1])) == plain[:1]
        until(prefill.empty)


def test_several_answers_move_with_their_scores() -> None:
    request = asked([7] * 21, 10, Sampling(1.0, seed=3), answers=3, top=1, scored=True)
    plain = alone(request)
    with Cluster(0, slow=0.005) as cluster:
        with_roles(cluster, "prefill", "decode", "decode")

        async def main() -> None:
            async with cluster.router.answers([request]) as answers:
                left = 3
                while left:
                    left -= bool((await answers.next()).finished)
                for flight, generation in zip(answers.generations, plain, strict=True):
                    assert flight.tokens == generation.written
                    assert len(flight.prompt_scores) == len(generation.prompt_scores)
                    assert len(flight.log_probabilities) == len(flight.tokens)

        asyncio.run(main())


def test_a_drained_engine_hands_its_answers_on() -> None:
    requests = [asked([i] * 10, 60) for i in range(4)]
    plain = [alone(request)[0].written for request in requests]
    with Cluster(2, slow=0.01) as cluster:
        drained: list[str] = []

        def seen(event: TokenEvent) -> None:
            if not drained and event.token is not None:
                drained.append("e0")
                cluster.engines[0].member.drain()

        assert asyncio.run(written_by(cluster.router, requests, seen)) == plain
        until(lambda: not cluster.engines[0].thread.is_alive())
        counts = cluster.router.counts()
        assert counts["answers_moved"] == 2 and not counts["answers_continued"]


def view(name: str, usage: float, answers: int) -> EngineView:
    return EngineView(name, 100, usage, answers, 0, 4)


def test_balance_moves_the_least_urgent_and_shortest() -> None:
    full, free = view("a", 98, 4), view("b", 10, 1)
    answers = {
        "a": [MovableAnswer(1, 30, 0), MovableAnswer(2, 20, 0), MovableAnswer(3, 40, 5), MovableAnswer(4, 8, -1)],
        "b": [MovableAnswer(9, 10, 0)],
    }  # fmt: skip
    assert balancing_move([full, free], answers) == BalancingMove(3, "b")
    assert balancing_move([full, view("b", 90, 1)], answers) is None
    assert balancing_move([view("a", 40, 4), free], answers) is None
    assert balancing_move([full], answers) is None


@pytest.mark.soak
def test_an_engine_without_memory_gives_answers_away() -> None:
    """Six long answers at an engine whose memory holds two of them; another engine joins."""
    requests = [asked([i] * 30, 45) for i in range(6)]
    plain = [alone(request)[0].written for request in requests]
    with Cluster(1, slow=0.01, tokens=200) as cluster:
        joined = []

        def seen(event: TokenEvent) -> None:
            if not joined:
                joined.append(cluster.add("late", tokens=2000))
                cluster.engines += joined

        assert asyncio.run(written_by(cluster.router, requests, seen)) == plain
        assert cluster.router.counts()["answers_moved"] >= 1


def test_grammars_and_waiting_answers_move() -> None:
    pytest.importorskip("llguidance")
    from weft.data.tokenizer import load_tokenizer
    from weft.generate.grammar import Grammars

    def grammars() -> Grammars:
        return Grammars(load_tokenizer("bytes"), 257)

    grammar = grammars().compile("regex", "[ab]{40}c")
    requests: list[AnswerRequest] = [
        asked([i + 60], 60, Sampling(1.0, seed=i), grammar=grammar) for i in range(3)
    ]
    plain = [alone(request, 257)[0].written for request in requests]
    draw = Random(2)
    with Cluster(
        2, slow=0.01, limit=1, vocab=257, grammars=grammars, router={"balances": False}
    ) as cluster:

        def seen(event: TokenEvent) -> None:
            if draw.random() < 0.3:
                move_one(cluster, draw)

        assert asyncio.run(written_by(cluster.router, requests, seen)) == plain
        assert cluster.router.counts()["answers_moved"] >= 3


def test_a_mover_lets_go_of_an_answer_that_has_ended() -> None:
    """No step may follow in which what it waits for could come; and nobody wants it back."""
    engine = Engine(build(), size=4)
    thread = SimpleNamespace(engine=engine, tells={}, seconds=0.0)

    def begun(after_first: bool) -> AnswerMove:
        (one,) = engine.submit([5, 6, 7], 8)
        move = AnswerMove(thread, one, print, after_first)  # type: ignore[arg-type]
        engine.step()
        return move

    move = begun(after_first=True)
    assert move._next_frame() is None  # layers are still to be sent
    engine.cancel(move.generation)
    with pytest.raises(WeftError, match="has ended"):
        move._next_frame()
    gone = begun(after_first=False)
    while not gone._left:
        assert gone._next_frame() is not None
    gone.generation.finished = "stop"  # cancelled on its way, and refused there
    gone._stay()
    assert not thread.tells and not engine.scheduler.waiting


def test_an_answer_that_has_stayed_goes_on_elsewhere_once_another_has_ended_there() -> None:  # fmt: skip
    """An engine that writes takes one answer at a time; the others stay where their prompts were read, until it can."""
    requests = [asked([i + 1] * 10, tokens) for i, tokens in enumerate((6, 40, 40))]
    plain = [alone(request)[0].written for request in requests]
    with Cluster(0, slow=0.01) as cluster:
        with_roles(cluster, "prefill", "decode", rows=1)
        prefill, decode = cluster.engines
        link, there = link_of(cluster, decode), list[int]()

        def seen(event: TokenEvent) -> None:
            there.append(len(link.flights) + len(link.incoming))

        assert asyncio.run(written_by(cluster.router, requests, seen)) == plain
        assert {*there} == {0, 1} and not link.full
        # the first, and the second from the first one's end on; the third may come to it, too
        assert 2 <= cluster.router.counts()["answers_moved"] <= 3
        until(lambda: prefill.empty() and decode.empty())


def test_no_more_answers_are_ordered_to_move_than_caches_have_room_for() -> None:
    """Of five that stay, three blocks each, two go on where eight of ten blocks are free; others when these have not
    come.
    """
    orders = list[Head]()
    links = dict[str, EngineLink]()
    moves = AnswerMoves(links, {}, count(10), lambda: [*links.values()], lambda link: None)  # fmt: skip
    for role in ("prefill", "decode"):
        about = EngineAbout(role, "", "", "", 97, 32, 40, 4, 64, True, {}, role=role)
        outbox: Any = SimpleNamespace(put=lambda head, *_: orders.append(head))
        links[role] = EngineLink(about, outbox)
    reading, writing = links.values()
    writing.cache.note_beat(2, 0)
    for number in range(5):
        flight = Flight(number, asked([number] * 10), 0, "", engine="prefill")
        reading.flights[number] = flight
    for _ in range(2):
        moves.relieve()
        assert [(head["kind"], head["answer"]) for head in orders] == [("move", 0), ("move", 1)]  # fmt: skip
    assert writing.spare == 2
    moves.forget(reading.flights.pop(0))
    moves.relieve()
    assert [head.get("answer") for head in orders] == [0, 1, None, 2]
    # an answer that has come is counted before the engine's next message has it
    spare, moves.flights[1] = writing.spare, reading.flights[1]
    moves.end(reading, {"answer": 1, "why": "", "stall": 0, "payload": 0})
    assert len(writing.flights) == 1 and writing.spare == spare
    free = writing.ledger().free
    writing.incoming[99] = EarlyEvents(blocks=3)
    assert writing.ledger().free == max(0, free - 3) < free
    writing.cache.note_beat(10, 0)
    assert writing.spare == 0
