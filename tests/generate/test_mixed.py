"""Everything at once: random engines and requests, each of which gets what it gets alone."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.generate.test_adapters import TARGETS, merged, write
from tests.generate.test_many import PROMPTS, build
from weft.checkpoint.convert.peft import read_adapter
from weft.errors import WeftError
from weft.generate.beam_search import Search
from weft.generate.engine import Engine
from weft.generate.lookup import Lookup
from weft.generate.migration import Arrival, Departure
from weft.generate.policies import exact_fill, policy_of
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY, Sampling
from weft.models.row_adapters import HostAdapter
from weft.models.transformer import Transformer

KINDS = ("softmax", "windows", "experts", "latent", "retention", "hybrid")
HOWS = (GREEDY, Sampling(0.9, seed=3), Sampling(0.8, top_p=0.9, frequency=0.4, seed=8))


@cache
def known(
    kind: str, folder: str
) -> tuple[Transformer, dict[str, HostAdapter], dict[str, Transformer]]:
    """A model, adapters for it, and the model with each of them merged."""
    model = build(kind, torch.float64)
    targets = tuple(
        name
        for name in TARGETS
        if kind in ("softmax", "windows", "hybrid", "retention") or name == "wo"
    )
    adapters = {
        f"a{i}": read_adapter(
            write(Path(folder) / kind / f"a{i}", model, rank, i, targets), model
        )
        for i, rank in enumerate((2, 4))
    }
    return (
        model,
        adapters,
        {n: merged(build(kind, torch.float64), a) for n, a in adapters.items()}
        | {"": model},
    )


@cache
def alone(
    kind: str, folder: str, adapter: str, prompt: int, how: int, count: int
) -> list[int]:
    engine = Engine(known(kind, folder)[2][adapter])
    (one,) = engine.submit(PROMPTS[prompt], count, HOWS[how])
    engine.run()
    return one.written


def made(drawn: random.Random, kind: str, folder: str) -> Engine:
    size = drawn.choice([1, 3, 4, 16])
    settings: dict[str, Any] = {
        "size": size, "budget": drawn.choice([2, 7, 16, 200]), "limit": drawn.choice([2, 3, 8, 64]),
        "policy": drawn.choice([exact_fill, policy_of("prompts-first"), policy_of("chunked:4")]),
        "tokens": drawn.choice([None, 1500, 800]),
        "drafter": drawn.choice([None, Lookup(least=1), Lookup(least=1, width=2, shared=500)]),
    }  # fmt: skip
    engine = Engine(known(kind, folder)[0], **settings)
    for name, adapter in known(kind, folder)[1].items():
        engine.add_adapter(name, adapter)
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("adapters"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(240))
def test_whatever_happens_beside_it(seed: int, folder: str) -> None:
    """Joining, siblings, adapters, guesses, small caches, cancels, moves to another engine, and a beam search."""
    drawn, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    engine, other = made(drawn, kind, folder), made(drawn, kind, folder)
    live: list[tuple[Generation, Engine, list[int]]] = []
    gone: list[Generation] = []
    for _ in range(60):
        event = drawn.random()
        if event < 0.25:
            prompt, how, adapter = (
                drawn.randrange(len(PROMPTS)),
                drawn.randrange(3),
                drawn.choice(["", "", "a0", "a1"]),
            )
            n, count = drawn.choice([1, 1, 3]), drawn.randint(1, 14)
            ones = engine.submit(
                PROMPTS[prompt], count, HOWS[how], n=n, adapter=adapter
            )
            expected = alone(kind, folder, adapter, prompt, how, 14)[:count]
            live += [
                (one, engine, expected) for one in (ones if how == 0 else ones[:1])
            ]
        elif event < 0.3 and live:
            one, where, _ = drawn.choice(live)
            where.cancel(one)
            gone.append(one)
        elif (
            event < 0.4
            and live
            and engine.scheduler.pool.size == other.scheduler.pool.size
        ):
            at = drawn.randrange(len(live))
            one, where, expected = live[at]
            if where is engine and one.runs and not one.finished:
                live[at] = moved(one, engine, other), other, expected
        engine.step()
        other.step()
    if drawn.random() < 0.3:
        found = Search(engine, PROMPTS[3], 6, 3).run()
        expected_beams = Search(Engine(known(kind, folder)[0]), PROMPTS[3], 6, 3).run()
        assert [one.ids for one in found] == [one.ids for one in expected_beams]
    engine.run()
    other.run()
    for one, _, expected in live:
        if one not in gone:
            assert one.written == expected, (kind, one.adapter)
        else:
            assert one.written == expected[: len(one.written)]
    for each in (engine, other):
        pool = each.scheduler.pool
        assert not pool.owners and pool.free == pool.blocks and not each.scheduler.due


def moved(one: Generation, engine: Engine, other: Engine) -> Generation:
    """The request where it is then: there, or still here if there was no room or it lost its blocks."""
    departure, arrival = Departure(engine, one), Arrival(other)
    try:
        while (frame := departure.round()) is not None:
            arrival.take(frame)
        roomy = (
            other.scheduler.pool.free > 4
            and len(other.scheduler.running) < other.scheduler.limit
        )
        if not roomy:
            raise WeftError("no room")
        moved_one = arrival.take(departure.leave())
        assert moved_one is not None
        return moved_one
    except WeftError:
        arrival.drop()
        return one
