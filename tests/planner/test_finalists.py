"""Finalists on the simulator, the reasons that are given, the page, and the policies scored on scenarios."""

import json
import math
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.browser import CHROMIUM, measured
from tests.conftest import Command
from tests.measured import until_true
from weft.errors import UsageError
from weft.parallel.build import check_fits
from weft.planner.cost import Plan, schedule_number
from weft.planner.engine_constants import ENGINES
from weft.planner.explain import best_alternatives, differences, layout_verdict
from weft.planner.finalists import Final, finalists, refine
from weft.planner.layout_search import Pin, SearchResult, pin_text, search
from weft.planner.machine import load_cluster
from weft.planner.page import PlanQuestion, page, timeline
from weft.planner.planned_model import SHAPES, load_model
from weft.planner.planned_recipe import recipe_tree
from weft.recipe import build_recipe

#: Files that want a browser: it starts for them once.
TOGETHER = "browser"


def found_for(
    model: str, gpus: int, batch: int, seq: int = 8192, pins: tuple[str, ...] = ()
) -> SearchResult:
    demands = [Pin.parse(pin) for pin in pins]
    return search(
        SHAPES[model],
        load_cluster("h100", gpus),
        ENGINES["weft"],
        batch,
        seq,
        pins=demands,
    )


def test_a_recipe_that_refuses_nearly_all_is_asked_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line names the reason that most layouts have, and says that not all were asked about."""
    monkeypatch.setattr("weft.planner.layout_search.MOST_REFUSED", 3)
    monkeypatch.setattr("weft.planner.layout_search.MOST_BESIDE", 2)
    asked: list[Plan] = []

    def refusal(plan: Plan, barriers: int = 0) -> str:
        asked.append(plan)
        return "first; mend it" if len(asked) == 1 else "second; mend it"

    searched = replace(found_for("llama3-8b", 32, 64), refusal=refusal)
    said = "of the fastest 3 kinds of the .* layouts that fit, such as .*; most often because second"
    with pytest.raises(UsageError, match=said):
        finalists(searched)
    assert len(asked) == 3
    # whoever else uses the search asks less often, about others
    for users, purpose in enumerate(("first", "first", "second"), 1):
        other = searched.for_purpose(purpose)
        assert other.first_taken(searched.order) is None
        assert len(asked) == 3 + 2 * users
    ends = "for the fastest layouts after 3 refused kinds, for first after 2 refused kinds, for second"
    assert f"searches ended early: {ends}" in searched.unasked_line()


def test_simulation_agrees_with_the_closed_form_where_stages_are_alike() -> None:
    """Without a head (a vocabulary of one) and with layers that divide, 1F1B and interleaving have exact forms."""
    shape = replace(SHAPES["llama3-8b"], vocab=1)
    found = search(
        shape,
        load_cluster("h100", 32),
        ENGINES["weft"],
        64,
        4096,
        pins=[Pin.parse("pp=4")],
    )
    for schedule, virtual in (
        ("1f1b", 1),
        ("interleaved-1f1b", 2),
        ("gpipe", 1),
        ("zb-h1", 1),
    ):
        plan = Plan(
            shard=4,
            tp=2,
            pp=4,
            zero=1,
            schedule=schedule_number(schedule),
            virtual=virtual,
            batch=64,
            seq=4096,
        )
        final = refine(found, plan, 1.0)
        assert final is not None and final.simulation is not None
        alone = replace(final, closed=float(_closed(found, plan)))
        assert alone.seconds == pytest.approx(alone.closed, rel=0.02), schedule


def _closed(found: SearchResult, plan: Plan) -> float:
    from weft.planner.cost import step_time

    return float(step_time(found.shape, found.machine, plan, found.engine).total)


def test_few_simulated_microbatches_stand_for_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = found_for("llama3-70b", 128, 512, pins=("pp=4",))
    for schedule in ("1f1b", "zb-v", "v-half", "gpipe", "dualpipe-v"):
        plan = Plan(
            shard=4,
            tp=8,
            pp=4,
            zero=1,
            schedule=schedule_number(schedule),
            batch=512,
            seq=8192,
        )
        whole = refine(found, plan, 1.0)
        monkeypatch.setattr("weft.planner.finalists.LARGEST", 600)
        part = refine(found, plan, 1.0)
        monkeypatch.undo()
        assert whole and part and part.simulation and whole.simulation
        assert part.simulation.table.microbatches < whole.simulation.table.microbatches
        assert part.seconds == pytest.approx(whole.seconds, rel=0.01), schedule
        assert part.gib == pytest.approx(whole.gib, rel=0.03), schedule


def test_finalists_are_ordered_fit_and_can_be_trained() -> None:
    found = found_for("llama3-8b", 32, 128, pins=("pp>=2",))
    finals = finalists(found, 10, vocabulary=True)
    times = [final.seconds for final in finals]
    assert (
        times == sorted(times)
        and all(final.fits for final in finals)
        and len(finals) >= 5
    )
    assert len({final.plan.schedule for final in finals}) > 2, (
        "schedules without an exact closed form are candidates"
    )
    for final in finals:
        recipe = build_recipe(recipe_tree(final, load_model("llama3-8b")))
        assert recipe.layout.world == 32
        check_fits(recipe.model.model_copy(update={"vocab": 128256}), recipe.layout)


@pytest.mark.slow
def test_the_first_choice_for_405b_is_what_was_run() -> None:
    def took() -> float:
        start = time.process_time()
        found = found_for("llama3-405b", 16384, 2048)
        finals = finalists(found, 10, vocabulary=True)
        are_what_was_run(found, finals)
        return time.process_time() - start

    # 3.5 by itself; here among other tests
    until_true(took, lambda seconds: seconds < 8)


def are_what_was_run(found: SearchResult, finals: list[Final]) -> None:
    # Meta ran tp 8, pp 16 at 38 to 43 % utilisation (2407.21783, table 4).
    assert (
        finals[0].plan.tp in (4, 8)
        and finals[0].plan.pp >= 8
        and 0.35 < finals[0].utilisation < 0.5
    )
    asked = PlanQuestion(
        "llama3-405b", "16,384 x H100", 2048, 8192, "bf16", "weft", "presets", 12
    )
    assert len(page(asked, found, finals, 8)) > 10_000


def test_reasons_name_the_cause() -> None:
    found = found_for("llama3-405b", 16384, 2048)
    first = refine(
        found,
        Plan(shard=64, tp=8, pp=16, cp=2, zero=1, schedule=6, batch=2048, seq=8192),
        1.0,
    )
    wide = refine(
        found,
        Plan(shard=32, tp=16, pp=16, cp=2, zero=1, schedule=6, batch=2048, seq=8192),
        1.0,
    )
    redone = refine(
        found,
        Plan(
            shard=64,
            tp=8,
            pp=16,
            cp=2,
            zero=1,
            schedule=6,
            recompute=2,
            batch=2048,
            seq=8192,
        ),
        1.0,
    )
    assert first and wide and redone
    assert re.match(
        r"tp=16 loses, \+\d+\.\d% time: its all-reduces cross the border of the fast links",
        layout_verdict(first, wide),
    )
    assert "the forward is computed again" in layout_verdict(first, redone)
    assert differences(first, redone) == ["recompute=full"]
    assert " wins, -" in layout_verdict(wide, first)


@pytest.mark.parametrize(
    "model", [pytest.param("llama3-70b", marks=pytest.mark.slow(2)), "llama3-8b"]
)
def test_other_values_are_seen_as_closely(model: str) -> None:
    found = found_for(model, 64, 256)
    finals = finalists(found, 10)
    others = best_alternatives(found, finals)
    assert {other.axis for other in others} >= {
        "tp",
        "pp",
        "cp",
        "micro_batch",
        "recompute",
    }
    for other in others:
        if other.final is None:
            assert other.gib > 60
        else:
            value = getattr(other.final.plan, other.axis)
            assert pin_text(other.axis, value) == other.value
            assert other.final.seconds > 0.97 * finals[0].seconds, (
                "the finalists have missed one"
            )
            value = getattr(other.final.plan, other.axis)
            alike = [
                final.seconds
                for final in finals
                if getattr(final.plan, other.axis) == value
            ]
            assert other.final.seconds <= min(alike, default=math.inf), (
                "a finalist with this value is quicker"
            )


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [
            v for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")
        ]


@pytest.fixture
def weft(command: Command) -> Any:
    return partial(command, "plan")


CASES = [
    ("llama3-8b", "--cluster", "h100", "--gpus", 64, "--batch", 256, "--seq", 8192),
    ("llama3-70b", "--cluster", "h100", "--gpus", 64, "--batch", 256, "--seq", 8192),
    ("mixtral-8x7b", "--cluster", "h200", "--gpus", 32, "--batch", 128, "--seq", 4096),
    (
        Path(__file__).parents[2] / "recipes" / "quickstart.toml",
        "--cluster",
        "cpu",
        "--gpus",
        4,
        "--precision",
        "fp32",
    ),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.soak] * (i == 1)) for i, c in enumerate(CASES)],
)
def test_the_page_is_whole_and_works_offline(
    weft: Any, tmp_path: Path, case: tuple[object, ...]
) -> None:
    path = tmp_path / "plan.html"
    code, out, _ = weft(*case, "--html", path, "--json")
    assert code == 0
    text = path.read_text()
    parser = _Page()
    parser.feed(text)
    assert (
        not parser.outside
        and "{{" not in text
        and not re.search(r"\bnan\b", text.lower())
    )
    for heading in ("The choice", "Layouts, fastest first", "And if you set it otherwise?", "Memory, rank by rank",
                    "Left out", "Where the numbers come from"):  # fmt: skip
        assert heading in text
    first = json.loads(out)["layouts"][0]
    assert first["text"] in text
    assert ("Timeline of the choice" in text) == (first["layout"]["pp"] > 1)
    assert sum(first["time"].values()) == pytest.approx(first["seconds"])
    assert first["gib"] == pytest.approx(max(first["ranks_gib"]))


@pytest.mark.slow(3)
def test_the_caption_gives_the_bubble_of_the_whole_step() -> None:
    """It gave that of the few microbatches that are drawn, three times as much, beside the list's."""
    found = found_for("llama3-405b", 1024, 512, pins=("pp=32",))
    finals = finalists(found, 3)
    first = finals[0]
    assert first.simulation and first.simulation.table.microbatches < int(
        first.plan.microbatches
    )
    text = page(
        PlanQuestion(
            "llama3-405b", "1,024 x H100", 512, 8192, "bf16", "weft", "presets", 12
        ),
        found,
        finals,
        3,
    )
    whole = f"{float(first.cost.bubble) / first.seconds:.1%}"
    assert first.simulation.bubble_rate > 1.5 * float(first.cost.bubble) / first.seconds
    said = re.findall(
        r"bubble (\d[\d.]*%)", text[text.index("Timeline of the choice") :]
    )
    assert said and set(said) == {whole}
    assert (
        f"drawn are the first {first.simulation.table.microbatches} microbatches"
        in text
    )


def test_idle_ranks_are_bubble_of_the_busiest_and_less_to_do_of_the_others() -> None:
    """Llama 70B over 8 stages: 0.6 % bubble beside a simulator's 8.9 %, with no word of the uneven stages between."""
    found = found_for(
        "llama3-70b",
        64,
        256,
        pins=("pp=8", "schedule=1f1b", "moments=device", "activations=device"),
    )
    first = finalists(found, 1)[0]
    run = first.simulation
    assert run is not None and run.table.microbatches == first.plan.microbatches
    note = timeline(first)["note"]
    bubble, less = (
        float(x) / 100
        for x in re.findall(r"bubble ([\d.]+)%.* has ([\d.]+)% less to do", note)[0]
    )
    waits = bubble * first.seconds / run.makespan  # of the time in the pipeline
    assert 1 - (1 - waits) * (1 - less) == pytest.approx(run.bubble_rate, abs=2e-3)
    assert less > 0.04 and float(first.cost.bubble) == pytest.approx(
        run.makespan - max(run.busy)
    )


@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"
)
def test_a_phone_shows_all_of_the_page(weft: Any, tmp_path: Path) -> None:
    """Bars of memory had no width, the timeline was cut."""
    path = tmp_path / "plan.html"
    # V schedules of so many microbatches have too many boxes to be drawn
    weft(*CASES[1], "--pin", "pp>=4", "--pin", "schedule=1f1b", "--html", path)
    box = "d.querySelector('.timeline svg .lane').getBoundingClientRect()"
    found = measured(path, 390, {
        "wide": "d.documentElement.scrollWidth", "left": f"{box}.left", "right": f"{box}.right",
        "tracks": "[...d.querySelectorAll('.stages .track')].map((track) => track.clientWidth)",
    })  # fmt: skip
    assert (
        found["wide"] == 390
        and min(found["tracks"]) > 200
        and found["left"] >= 0
        and 300 < found["right"] <= 390
    )


def test_planning_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['weft', 'plan', 'llama3-8b', '--cluster', 'h100', '--gpus', '16', '--batch', '32', "
        f"'--seq', '8192', '--html', {str(tmp_path / 'p.html')!r}, '--recipe', {str(tmp_path / 'p.toml')!r}]\n"
        "from weft.cli import run_command_line\n"
        "try: run_command_line()\nexcept SystemExit as e: assert not e.code\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "1  " in done.stdout and "margin  presets" in done.stdout


def test_a_cut_that_breaks_a_rule_is_told_with_the_nearest() -> None:
    found = found_for("llama3-8b", 24, 7)
    rules = {rule.rule: rule for rule in found.refused}
    assert {
        "the batch does not divide over the data ranks",
        "tp does not divide the heads",
    } <= rules.keys()
    assert rules["tp does not divide the heads"].fix.startswith("tp=")
    final: Final = finalists(found)[0]
    assert final.plan.data in (1, 7)
