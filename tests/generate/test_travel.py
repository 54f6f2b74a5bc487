"""Requests that move between engines while they are written."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from travel import Arrival, Departure

from tests.generate.test_many import HOW, PROMPTS, build
from weft.errors import UsageError, WeftError
from weft.generate.engine import Engine
from weft.generate.lookup import Lookup
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY, Sampling
from weft.models.transformer import Transformer

NEW = 40


def alone(model: Transformer, prompt: list[int], how: Sampling) -> Generation:
    """What one request gets that stays where it is."""
    engine = Engine(model)
    (one,) = engine.submit(prompt, NEW, how, top=2)
    engine.run()
    return one


def move(
    source: Engine, target: Engine, request: Generation, between: int = 1
) -> tuple[Generation, list[int]]:
    """The request where it then is, and the lengths of all messages; the source goes on between them."""
    departure, arrival, lengths = Departure(source, request), Arrival(target), []
    while (message := departure.round()) is not None:
        lengths.append(len(message))
        assert arrival.take(message) is None
        for _ in range(between):
            source.step()
            target.step()
        if request.finished:
            arrival.drop()
            return request, lengths
    try:
        message = departure.leave()
    except WeftError:
        arrival.drop()
        raise
    found = arrival.take(message)
    assert found is not None
    return found, [*lengths, len(message)]


@cache
def written_alone(kind: str) -> list[Generation]:
    """What each prompt gets by itself."""
    model = build(kind, torch.float64)
    return [alone(model, p, how) for p, how in zip(PROMPTS, HOW, strict=True)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("settings", [{}, {"drafter": True}, {"tokens": 400}], ids=str)
@pytest.mark.parametrize(
    "kind", ["softmax", "windows", "experts", "latent", "retention", "hybrid"]
)
def test_tokens_are_the_same_wherever_they_are_written(
    kind: str, settings: dict[str, Any]
) -> None:
    """Three engines; every request moves at random moments, beside others that stay, and in small caches."""
    model, drawn, expected = (
        build(kind, torch.float64),
        random.Random(0),
        written_alone(kind),
    )
    if settings.get("drafter"):
        settings = {"drafter": Lookup(least=1)}
    engines = [Engine(model, size=4, budget=11, **settings) for _ in range(3)]
    where = {i: 0 for i in range(len(PROMPTS))}
    found = [
        engines[0].submit(p, NEW, how, top=2)[0]
        for p, how in zip(PROMPTS, HOW, strict=True)
    ]
    moves = 0
    for _ in range(200):
        for engine in engines:
            engine.step()
        number = drawn.randrange(len(found))
        one = found[number]
        if one.runs and not one.finished and drawn.random() < 0.7:
            to = drawn.choice([i for i in range(3) if i != where[number]])
            try:
                moved, _ = move(
                    engines[where[number]], engines[to], one, drawn.randrange(3)
                )
            except (
                WeftError
            ) as error:  # a small cache; or it was preempted meanwhile, and stays
                assert "no room" in str(error) or "does not run any more" in str(error)
                assert settings.get("tokens")
                continue
            if moved is not one:
                found[number], where[number], moves = moved, to, moves + 1
    for engine in engines:
        engine.run()
    assert moves > 5
    for one, single in zip(found, expected, strict=True):
        assert one.written == single.written and one.finished == single.finished
        assert [p for p, _ in one.log_probabilities] == pytest.approx(
            [p for p, _ in single.log_probabilities], abs=1e-10
        )
    assert not any(engine.scheduler.pool.owners for engine in engines)


@pytest.mark.slow
def test_it_stops_for_one_block_at_most_whatever_its_length() -> None:
    """The last message beside those of the rounds, for texts of 100 to 1,600 tokens."""
    model, last, whole = build("softmax", torch.float32), [], []
    for length in (100, 400, 1600):
        source, target = Engine(model, size=16), Engine(model, size=16)
        (one,) = source.submit([i % 31 for i in range(length)], 60, Sampling(seed=1))
        source.step()
        source.step()
        if length > 512:
            for _ in range(4):
                source.step()
        moved, lengths = move(source, target, one, 3)
        target.run()
        assert moved.written == alone_of(model, length)
        last.append(lengths[-1])
        whole.append(sum(lengths))
    block = sum(
        p.store[:, 0].nbytes for p in target.reader.pages if p.store is not None
    )
    state = 12 * 2**10  # tokens and the stream of random numbers, as text
    assert all(
        size < block + state + 8 * n
        for size, n in zip(last, (100, 400, 1600), strict=True)
    )
    assert whole[2] > 10 * whole[0]


def alone_of(model: Any, length: int) -> list[int]:
    engine = Engine(model)
    (one,) = engine.submit([i % 31 for i in range(length)], 60, Sampling(seed=1))
    engine.run()
    return one.written


def test_what_is_refused_at_last_goes_on_where_it_was() -> None:
    model = build("softmax", torch.float64)
    for how in (GREEDY, Sampling(0.9, seed=4)):
        source, target = Engine(model, size=4), Engine(model, size=4, limit=1)
        (one,) = source.submit(PROMPTS[1], NEW, how, top=2)
        (other,) = target.submit(PROMPTS[2], NEW, GREEDY)
        for engine in (source, source, source, target):
            engine.step()
        departure, arrival = Departure(source, one), Arrival(target)
        while (message := departure.round()) is not None:
            arrival.take(message)
        with pytest.raises(WeftError, match="no room for the request here"):
            arrival.take(departure.leave())
        departure.stay()
        source.run()
        target.run()
        assert one.written == alone(model, PROMPTS[1], how).written
        assert other.written == alone(model, PROMPTS[2], GREEDY).written
        assert not source.scheduler.pool.owners and not target.scheduler.pool.owners


def test_what_does_not_arrive_stays() -> None:
    model = build("softmax", torch.float32)
    source, target = Engine(model, size=4), Engine(model, size=4, tokens=12)
    (one,) = source.submit(PROMPTS[1], NEW, GREEDY)
    source.step()
    departure, arrival = Departure(source, one), Arrival(target)
    message = departure.round()
    assert message is not None
    with pytest.raises(WeftError, match="no room for the request here"):
        arrival.take(message)
    roomy = Arrival(Engine(model, size=4))
    with pytest.raises(WeftError, match="damaged"):
        roomy.take(message[:-7])
    with pytest.raises(WeftError, match="damaged"):
        roomy.take(b"nonsense")
    with pytest.raises(WeftError, match="do not go on where 0 blocks of 8 end"):
        Arrival(Engine(model, size=8)).take(message)
    other = Engine(build("latent", torch.float32), size=4)
    other.probe()
    with pytest.raises(WeftError, match="not of this model"):
        Arrival(other).take(message)
    assert not other.scheduler.pool.owners and not roomy.engine.scheduler.pool.owners
    source.run()
    assert one.written == alone(model, PROMPTS[1], GREEDY).written
    assert departure.round() is None
    with pytest.raises(WeftError, match="it stays"):
        departure.leave()
    family = source.submit(PROMPTS[1], NEW, GREEDY, n=2)
    with pytest.raises(UsageError, match="let it end where it is"):
        Departure(source, family[0])
    adapted = Generation([1, 2], 4, adapter="a")
    with pytest.raises(UsageError, match="let it end where it is"):
        Departure(source, adapted)
