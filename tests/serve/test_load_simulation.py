"""The simulator against engines."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.generate.test_many import build
from weft.generate.block_pool import BlockPool
from weft.generate.engine import Engine
from weft.generate.policies import exact_fill, policy_of
from weft.generate.request import Request
from weft.generate.scheduler import ScheduledStep, Scheduler
from weft.generate.step_curve import FIT, Curve, StepWatch
from weft.generate.step_work import work_of
from weft.serve.load_simulation import (
    TimedRequest,
    measure_load,
    play_load,
    simulate_load,
)


def load(seed: int, rate: float, count: int = 30) -> list[TimedRequest]:
    drawn, time, found = random.Random(seed), 0.0, []
    for _ in range(count):
        time += drawn.expovariate(rate)
        prompt = [drawn.randrange(31) for _ in range(drawn.choice([3, 20, 60]))]
        found.append(TimedRequest(time, prompt, drawn.choice([1, 5, 25])))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [
    {}, {"policy": policy_of("chunked:7"), "budget": 20},
    {"policy": policy_of("prompts-first"), "tokens": 160, "limit": 4},
], ids=["roomy", "chunks", "small"])  # fmt: skip
def test_it_plans_every_step_as_the_engine_does(settings: dict[str, object]) -> None:
    """With a clock that counts work: latencies are the same to the last bit, preemption and waiting included."""
    engine = Engine(build("softmax", torch.float32), size=4, **settings)  # type: ignore[arg-type]
    arrivals = load(1, 0.004)
    real: list[list[float]] = []
    taken = play_engine(engine, arrivals, real)
    own: list[list[float]] = []

    def curve(step: ScheduledStep) -> float:
        own.append(work_of(step))
        return sum(own[-1])

    pool = engine.scheduler.pool
    scheduler = Scheduler(
        BlockPool(pool.blocks, 4),
        engine.scheduler.budget,
        engine.scheduler.limit,
        engine.scheduler.policy,
    )
    found = simulate_load(scheduler, arrivals, curve)
    assert own == real and len(own) > 40
    assert [one.times for one in found] == [one.times for one in taken]
    assert [one.written for one in found] == [each.tokens for each in arrivals]


def play_engine(engine: Engine, arrivals: list[TimedRequest], real: list[list[float]]):  # type: ignore[no-untyped-def]
    """Latencies of an engine whose clock counts the work of its steps."""
    numbers, plan = {}, engine.scheduler.plan

    def planning(depth: int = 1) -> ScheduledStep:
        step = plan(depth)
        real.append(work_of(step))
        return step

    engine.scheduler.plan = planning  # type: ignore[method-assign]

    def add(i: int) -> None:
        numbers[engine.submit(arrivals[i].prompt, arrivals[i].tokens)[0]] = i

    def step() -> tuple[float, list[int]]:
        written = engine.step()
        return sum(real[-1]), [numbers[one.request] for one in written]

    return play_load(arrivals, add, step)


def test_a_curve_finds_what_a_step_is_made_of() -> None:
    """Times of 0.01 s and 0.001 s a token, with noise of 5 %, and of what else there is nothing."""
    drawn, samples = random.Random(0), list[tuple[list[float], float]]()
    arrivals = [
        TimedRequest(0.5 * i, [i % 31] * drawn.randrange(1, 90), 60) for i in range(60)
    ]

    def timed(step: ScheduledStep) -> float:
        work = work_of(step)
        samples.append((work, (0.01 + 0.001 * work[1]) * drawn.uniform(0.95, 1.05)))
        return samples[-1][1]

    simulate_load(Scheduler(BlockPool(1000, 4), 40, 8, exact_fill), arrivals, timed)
    assert len(samples) > 400
    curve = Curve(samples)
    for work, _ in samples[::10]:
        assert float(curve.rates @ work) == pytest.approx(
            0.01 + 0.001 * work[1], rel=0.05
        )


def test_samples_are_of_the_steps_that_were_timed() -> None:
    engine = Engine(build("softmax", torch.float32), size=4)
    arrivals = load(3, 50.0, 10)
    found, samples = measure_load(engine, arrivals)
    assert [one.written for one in found] == [each.tokens for each in arrivals]
    assert all(one.times[0] > one.began and one.end == one.times[-1] for one in found)
    assert all(seconds > 0 and work[0] == 1 for work, seconds in samples)
    assert sum(work[3] for work, _ in samples) == sum(a.tokens for a in arrivals)
    assert "planning" not in engine.scheduler.plan.__qualname__


def test_rates_of_an_engine_that_serves_are_those_of_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fit that fails leaves the rates as they were."""
    watch = StepWatch()
    for tokens in range(1, FIT + 1):
        assert watch.rates == ()
        watch.begin(ScheduledStep({Request([0] * tokens, tokens): tokens}, []))
        watch.end(0.01 + 0.002 * tokens)
        watch.end(99.0)  # of no step
    rates = watch.rates
    step = ScheduledStep({Request([0] * 20, 20): 20}, [])
    assert np.dot(rates, work_of(step)) == pytest.approx(0.05, rel=0.05)

    def failing(samples: object) -> None:
        raise np.linalg.LinAlgError("no convergence")

    monkeypatch.setattr("weft.generate.step_curve.Curve", failing)
    watch._again = 0.0
    assert watch.rates == rates
