"""The search for a placement: against all placements played, and its reasons against what the curve says."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.serve.running import build as with_bytes
from weft.cli.serving_plan import start_lines
from weft.generate.scheduler import ScheduledStep
from weft.generate.step_work import work_of
from weft.models.hugging_face import export
from weft.serve.block_link import BlockLink
from weft.serve.load_simulation import TimedRequest
from weft.serve.placement_search import (
    ENOUGH,
    EngineGroup,
    EngineLayout,
    EnginePlacement,
    PlacementSearch,
    PlacementWatch,
    ServiceLimits,
)


def curve(speed: float) -> Callable[[ScheduledStep], float]:
    """A long prompt makes everybody wait; a token takes hardly longer with others than alone."""

    def seconds(step: ScheduledStep) -> float:
        _, tokens, texts, *_ = work_of(step)
        return (0.01 + 0.0005 * tokens + 0.0001 * texts) / speed

    return seconds


ONE, TWO = EngineLayout("", 1, curve(1), 20_000), EngineLayout("tp=2", 2, curve(1.7), 50_000)  # fmt: skip
LINK = BlockLink(0.001, 1e9, 1000.0)


def load(rate: float, prompt: int, tokens: int, count: int = 60) -> list[TimedRequest]:
    draw, time, requests = random.Random(7), 0.0, []
    for _ in range(count):
        time += draw.expovariate(rate)
        text = [draw.randrange(1000) for _ in range(round(prompt * draw.uniform(0.5, 1.5)))]  # fmt: skip
        requests.append(
            TimedRequest(time, text, round(tokens * draw.uniform(0.5, 1.5)))
        )
    return requests


def search(devices: int, ttft: float, tpot: float, link: BlockLink | None = LINK) -> PlacementSearch:  # fmt: skip
    return PlacementSearch([ONE, TWO], devices, ServiceLimits(ttft, tpot), link)


@pytest.mark.slow(4)
def test_the_first_is_the_best_of_all_that_there_are() -> None:
    """All placements of up to 4 devices are played; none serves enough with fewer devices, or serves more."""
    finding, coming = search(4, 0.8, 0.025), load(2.5, 500, 30)
    best = finding.search(coming)[0]
    every = [
        EnginePlacement(EngineGroup(n, each))
        for each, most in ((ONE, 4), (TWO, 2))
        for n in range(1, most + 1)
    ]
    every += [
        EnginePlacement(None, EngineGroup(p, a), EngineGroup(d, b))
        for a, b in product((ONE, TWO), repeat=2)
        for p, d in product(range(1, 4), repeat=2)
        if p * a.devices + d * b.devices <= 4
    ]
    played = [finding.play(placement, coming) for placement in every]
    enough = [each for each in played if each.share >= ENOUGH]
    assert best.share >= ENOUGH and enough
    assert best.placement.devices == min(each.placement.devices for each in enough)
    assert best.goodput >= max(
        each.goodput for each in enough if each.placement.devices <= best.placement.devices
    )  # fmt: skip


def test_long_prompts_beside_a_tight_time_per_token_part_the_roles() -> None:
    """Mixed engines make those that write wait for prompts; the link is what it takes."""
    coming = load(1.5, 800, 40)
    apart = search(3, 1.5, 0.02).search(coming)
    assert apart[0].placement.prefill is not None and apart[0].share >= ENOUGH
    mixed = search(3, 1.5, 0.02, None).search(coming)
    assert all(each.placement.mixed for each in mixed)
    assert mixed[0].goodput < 0.95 * apart[0].goodput


@pytest.mark.parametrize(("ttft", "tpot", "devices", "cache", "said"), [
    (0.01, 1, 4, 20_000, "a prompt of 488 tokens takes 0.254 s, more than --ttft"),
    (1, 0.001, 4, 20_000, "a token takes 0.0106 s without others, more than --tpot"),
    (1, 1, 4, 100, "its cache holds 100 tokens; a request has "),
    (1, 1, 1, 20_000, "the load keeps so many engines busy; there are 1 devices"),
])  # fmt: skip
def test_what_cannot_serve_is_not_played(
    ttft: float, tpot: float, devices: int, cache: int, said: str
) -> None:
    layout = ONE._replace(cache=cache)
    finding = PlacementSearch([layout], devices, ServiceLimits(ttft, tpot))
    (placed,) = finding.search(load(8, 500, 30))[-1:]
    assert placed.reason.startswith(said) and not placed.figures


@pytest.mark.slow(4)
def test_another_placement_is_said_when_the_load_has_drifted_and_not_before() -> None:
    finding = search(3, 1.5, 0.02)
    light, heavy = load(0.2, 100, 20, 20), load(1.5, 800, 40, 40)
    watch = PlacementWatch(finding, EnginePlacement(EngineGroup(3, ONE)), margin=0.05)
    assert [watch.look(light) for _ in range(2)] == [None, None]
    # one window is not enough, and a quiet one in between begins anew
    assert [watch.look(each) for each in (heavy, light, heavy)] == [None, None, None]
    chosen = watch.look(heavy)
    assert chosen is not None and chosen.prefill is not None
    assert watch.current is chosen and watch.look(heavy) is None


@pytest.mark.parametrize("timed", [False, True])
def test_the_command(command: Command, tmp_path: Path, timed: bool) -> None:
    """Priced by the planner, and with a checkpoint that is timed here; the lines start what is best."""
    words = ["plan", "llama3-8b", "--serve", "--cluster", "h100", "--gpus", "1"]
    if timed:
        model = with_bytes().float()
        state = {name: value.detach() for name, value in model.state_dict().items()}
        export(state, model.shape, tmp_path / "m")
        words = [
            "plan",
            tmp_path / "m",
            "--serve",
            "--gpus",
            "2",
            "--ttft",
            "60",
            "--tpot",
            "60",
        ]
    words += ["--prompt-tokens", "24", "--answer-tokens", "3", "--rate", "5"]
    words += ["--shared-tokens", "32", "--beginnings", "3", "--cache-memory"]
    code, _, error = command(*words, "1e-9", "--json")
    assert code == 2 and " GB; give more --cache-memory" in error
    code, out, error = command(*words, "1", "--json")
    assert code == 0, error
    plan = json.loads(out)
    # which is worth nothing here
    assert {each["caches"] for each in plan["placements"]} == {0, 1}
    assert plan["placements"][0]["engines"] == {"any": {"engines": 1, "layout": ""}}
    assert plan["placements"][0]["share"] == pytest.approx(1)
    assert plan["start"] == [f"weft serve --checkpoint {words[1]} --engines 1"]


def test_what_no_device_holds_is_one_line(command: Command) -> None:
    code, _, error = command(
        "plan", "llama3-70b", "--serve", "--cluster", "h100", "--gpus", "1"
    )
    assert code == 2 and "the weights of llama3-70b do not fit on 1 devices" in error


def test_the_lines_that_start_roles() -> None:
    apart = EnginePlacement(None, EngineGroup(1, ONE), EngineGroup(2, ONE))
    assert start_lines("m", apart)[2:4] == [
        "engines = 3",
        "roles = { prefill = 1, decode = 2 }",
    ]
    cut = EnginePlacement(None, EngineGroup(1, TWO), EngineGroup(2, ONE))
    assert start_lines("m", cut)[-2:] == [
        "weft engine --checkpoint m --join HOST:8100 --role prefill --layout tp=2    # 1 of these",
        "weft engine --checkpoint m --join HOST:8100 --role decode    # 2 of these",
    ]
