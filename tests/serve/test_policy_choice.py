"""``weft bench policies``: what is compared is what would be served."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import Command
from tests.generate.test_many import build
from tests.serve.running import build as with_bytes
from weft.cli.bench import _show_candidates
from weft.data.tokenizer import load_tokenizer
from weft.generate.engine import Engine
from weft.generate.policies import compared_policies, policy_of
from weft.generate.step_curve import Curve
from weft.generate.step_work import work_of
from weft.models.hugging_face import export
from weft.serve.load_requests import LoadRequest
from weft.serve.load_simulation import TimedRequest, play_load
from weft.serve.policy_choice import (
    BUDGETS,
    SHARE,
    Candidate,
    compare_policies,
    highest_rate,
    play_candidate,
    split_load,
)


def engines(policy: str, budget: int) -> Engine:
    return Engine(
        build("softmax", torch.float32), 4096, budget, 8, policy_of(policy), size=4
    )


def arrivals(count: int = 30) -> list[TimedRequest]:
    drawn, time, found = random.Random(4), 0.0, []
    for _ in range(count):
        found.append(
            TimedRequest(
                time, [drawn.randrange(31) for _ in range(drawn.choice([3, 60]))], 12
            )
        )
        time += drawn.expovariate(2.0)
    return found


def counted(fixed: float, token: float) -> Curve:
    """A machine whose steps take so many seconds, and so many for each of their tokens."""
    works = [[1.0, tokens, 1, 1, 1, 1] for tokens in (1, 2, 5, 9)]
    return Curve([(work, fixed + token * work[1]) for work in works])


@pytest.mark.soak
def test_the_best_is_what_real_engines_say_on_the_same_machine() -> None:
    """Engines that really write, on a clock that counts the same work, have the gaps that the simulation says."""
    curve = counted(0.02, 0.005)
    limits = {"itl": 100.0}
    found = compare_policies(engines, arrivals(), curve, [99], limits)
    goodputs = [one.figures["request_goodput"] for one in found]
    assert (
        goodputs == sorted(goodputs, reverse=True) and goodputs[0] > 1.1 * goodputs[-1]
    )
    assert found[0].policy == "chunked:32" or found[0].budget == BUDGETS[0], (
        "a whole prompt of 60 tokens takes 0.32 s"
    )
    for one in (found[0], found[-1]):
        engine = engines(one.policy, one.budget)
        assert one.figures["p99_itl_ms"] == pytest.approx(
            np.percentile(real_gaps(engine, curve), 99), rel=1e-6
        )


def real_gaps(engine: Engine, curve: Curve) -> list[float]:
    """Milliseconds between tokens of an engine that computes, with the time of its steps from ``curve``."""
    load, numbers, planned, plan = arrivals(), {}, [], engine.scheduler.plan

    def planning(depth: int = 1):  # type: ignore[no-untyped-def]
        step = plan(depth)
        planned.append(float(curve.rates @ work_of(step)))
        return step

    engine.scheduler.plan = planning  # type: ignore[method-assign]

    def add(i: int) -> None:
        numbers[engine.submit(load[i].prompt, load[i].tokens)[0]] = i

    def step() -> tuple[float, list[int]]:
        written = engine.step()
        return planned[-1], [numbers[one.request] for one in written]

    return [
        1000 * gap for one in play_load(load, add, step) for gap in one.seconds["itl"]
    ]


def test_so_many_requests_meet_the_limits_and_not_more() -> None:
    curve, load, limits = counted(0.02, 0.001), arrivals(), {"ttft": 400.0}
    best = Candidate("exact-fill", 128, {})
    most = highest_rate(engines, best, load, curve, limits)

    def share(rate: float) -> float:
        coming = [
            one._replace(time=one.time / load[-1].time * len(load) / rate)
            for one in load
        ]
        figures = play_candidate(
            engines, best.policy, best.budget, coming, curve, (), limits
        ).figures
        return figures["request_goodput"] * figures["duration"] / len(load)

    assert most > 0.1 and share(most) >= SHARE > share(1.06 * most)
    assert highest_rate(engines, best, load, curve, {"ttft": 1.0}) == 0, (
        "no step is so short"
    )
    assert highest_rate(engines, best, load, curve, {"ttft": 1e6}) == float("inf")


def test_the_first_requests_are_timed_and_the_others_compared() -> None:
    asked = [LoadRequest("ab", 3), LoadRequest([5], 4), LoadRequest("c", 5)]
    few, load = split_load(asked, [1.0, 0.5, 2.0], lambda: load_tokenizer("bytes"), 1)
    assert few == [TimedRequest(-0.5, list(load_tokenizer("bytes").encode("ab")), 3)]
    assert load == [
        TimedRequest(0.0, [5], 4),
        TimedRequest(2.0, list(load_tokenizer("bytes").encode("c")), 5),
    ]


def test_long_times_are_shown_without_powers_of_ten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = {"output_throughput": 8.78712, "mean_ttft_ms": 104_517.3}
    _show_candidates([Candidate("exact-fill", 128, figures)], 99)
    assert capsys.readouterr().out.splitlines()[1] == "exact-fill\t128\t8.787\t104,517"


def test_the_command(command: Command, tmp_path: Path) -> None:
    model = with_bytes().float()
    export(
        {name: value.detach() for name, value in model.state_dict().items()},
        model.shape,
        tmp_path / "m",
    )
    words = ["bench", "policies", "--checkpoint", tmp_path / "m", "--num-prompts", "12", "--random-input-len", "9",
             "--random-output-len", "4", "--request-rate", "50", "--timed", "3"]  # fmt: skip
    code, out, error = command(*words, "--goodput", "ttft:60000", "--json")
    assert code == 0, error
    found = json.loads(out)
    assert {one["policy"] for one in found["candidates"]} <= set(
        compared_policies()
    ) and found["most_requests_per_second"] is None
    assert all(
        one["completed"] == 12 and one["total_output_tokens"] == 48
        for one in found["candidates"]
    )
    code, out, error = command(*words)
    assert code == 0 and f"weft serve --checkpoint {tmp_path / 'm'} --policy" in out
    code, out, error = command(*words, "--goodput", "x:1")
    assert code == 2 and "knows no x" in error
