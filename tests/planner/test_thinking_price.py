"""The cost of reasoning by its formula, its fit to measured steps, and the choice within a budget."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster.test_engine_processes import export_tiny
from weft.cli.plan import plan_command
from weft.cli.think_plan import task_of_word
from weft.errors import UsageError
from weft.planner.thinking_price import (
    SHARES,
    StepRates,
    Thinking,
    ThinkingModel,
    TriedText,
    coverage,
    fit_rates,
    rank_thinking,
    rates_of_device,
    seconds,
    thinking_work,
    tokens_within,
)

SMALL = ThinkingModel("small", 1e9, 2, 20, 20 * 2 * 2 * 1024, 20 * 1024)
LARGE = ThinkingModel("large", 8e9, 2, 32, 32 * 2 * 2 * 512, 32 * 4096)
GPU = rates_of_device(7e14, 3e12)


def test_the_work_is_that_of_the_formula() -> None:
    how = Thinking("small", 3, 2, 1.0)
    keys = 2 * (101 + 102 + 103)
    expected = [1e9 * 6 + 2 * SMALL.queries * keys, 2e9 * 3, SMALL.keys * keys, 0, 60, 0]  # fmt: skip
    assert thinking_work(SMALL, 100, how).tolist() == expected
    sparse = thinking_work(SMALL, 1000, Thinking("small", 1, 1, 0.25))
    # a quarter of the keys, and the means of 16 of them, without values
    assert sparse[2] == 0
    assert sparse[3] == pytest.approx(SMALL.keys * (1001 / 4 + 1001 / 32))
    # texts of a few blocks are read whole
    assert (
        thinking_work(SMALL, 0, Thinking("small", 1, 1, 0.25))[0]
        == 1e9 + 2 * SMALL.queries
    )


def test_rates_are_those_that_were_put_in() -> None:
    rates = StepRates(3e-15, 5e-13, 7e-13, 9e-13, 2e-5, 4e-5)
    settings = [
        (model, prompt, Thinking(model.name, 8, texts, share))
        for model in (SMALL, LARGE) for prompt in (100, 5000)
        for texts in (1, 16) for share in (1.0, 0.25)
    ]  # fmt: skip
    works = [thinking_work(model, prompt, how) for model, prompt, how in settings]
    spent = [seconds(model, rates, prompt, how) for model, prompt, how in settings]
    fitted = fit_rates(works, spent)
    others = (
        (SMALL, 900, Thinking("small", 99, 5, 1.0)),
        (LARGE, 70, Thinking("large", 500, 3, 0.5)),
    )
    for model, prompt, how in others:
        expected = seconds(model, rates, prompt, how)
        assert seconds(model, fitted, prompt, how) == pytest.approx(expected, rel=0.01)
    uneven = [s * (1 + 0.3 * (i % 2)) for i, s in enumerate(spent)]
    assert min(vars(fit_rates(works, uneven)).values()) >= 0


def test_memory_turns_the_choice_of_the_parameters() -> None:
    """Many long texts of the small model read more keys than the large model does: Kinetics' point."""
    small, large = Thinking("small", 60_000, 32, 1.0), Thinking("large", 30_000, 16, 1.0)  # fmt: skip
    assert SMALL.parameters * 60_000 * 32 < LARGE.parameters * 30_000 * 16
    assert seconds(SMALL, GPU, 500, small) > seconds(LARGE, GPU, 500, large)
    sparse = small._replace(share=0.125)
    assert seconds(SMALL, GPU, 500, sparse) < seconds(LARGE, GPU, 500, large)


def test_coverage_is_that_of_all_draws() -> None:
    tried = [
        [
            TriedText(3, True),
            TriedText(9, True),
            TriedText(4, False),
            TriedText(5, False),
        ]
    ]
    for tokens in (4, 20):
        for texts in (1, 2, 3, 4):
            draws = [*combinations(tried[0], texts)]
            hits = [any(t.right and t.tokens <= tokens for t in draw) for draw in draws]
            assert coverage(tried, tokens, texts) == pytest.approx(np.mean(hits))
    assert coverage(tried, 20, 8) == pytest.approx(1 - 0.5**8)
    assert coverage([*tried, [TriedText(3, False)]], 4, 1) == pytest.approx(0.125)


def test_the_best_within_a_budget() -> None:
    """The large model where one of its texts is affordable; many of the small one's where none is."""
    some = [[TriedText(900, i % 4 == 0) for i in range(8)]] * 4
    most = [[TriedText(900, i % 4 != 0) for i in range(8)]] * 4
    trials = {("small", s): some for s in SHARES} | {("large", s): most for s in SHARES}
    poor = rank_thinking([SMALL, LARGE], GPU, 500, 3.0, trials, 2000)[0]
    rich = rank_thinking([SMALL, LARGE], GPU, 500, 20.0, trials, 2000)[0]
    assert poor.how.model == "small" and poor.how.texts > 1 and poor.seconds <= 3
    assert rich.solved == 1 and rich.how.tokens == 900 and rich.seconds <= 20
    assert not rank_thinking([SMALL, LARGE], GPU, 500, 1e-6, trials, 2000)
    room = tokens_within(SMALL, GPU, 500, 4, 1.0, 3.0, 10**6)
    times = [seconds(SMALL, GPU, 500, Thinking("small", room + i, 4, 1.0)) for i in (0, 1)]  # fmt: skip
    assert times[0] <= 3.0 < times[1]


def test_the_command_by_a_data_sheet(capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"think": "30", "cluster": "h100", "answer_tokens": 9000}
    assert plan_command("llama3-8b,llama3-70b", **asked, as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    rooms = {(r["model"], r["share"], r["texts"]): r["tokens"] for r in rows}
    assert rooms["llama3-8b", 1.0, 64] < rooms["llama3-8b", 0.25, 64]
    assert rooms["llama3-70b", 1.0, 1] < rooms["llama3-8b", 1.0, 1] <= 9000
    assert plan_command("llama3-8b", **asked) == 0
    assert "give --task NAME" in capsys.readouterr().out


@pytest.mark.soak
def test_the_command_by_timing_and_trying(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    export_tiny(tmp_path)
    name = str(tmp_path / "tiny")
    assert plan_command(name, think="50", task="addition", answer_tokens=4, as_json=True) == 0  # fmt: skip
    ranked = json.loads(capsys.readouterr().out)
    assert ranked["where"] == "this machine, which was timed"
    assert {row["share"] for row in ranked["rows"]} == {*SHARES}
    assert all(row["seconds"] <= 50 and row["solved"] == 0 for row in ranked["rows"])


@pytest.mark.parametrize(("given", "line"), [
    ({"think": "soon"}, "--think soon is no budget; give seconds for each question, such as 20"),
    ({"think": "0"}, "--think 0 is no budget"), ({"think": "inf"}, "--think inf is no budget"),
    ({"task": "addition"}, "--task is for --think SECONDS; give both, or leave it out"),
    ({"think": "3", "task": "no-such"}, "reward = 'no-such' is not possible"),
    ({"think": "3", "task": "addition:digits"}, "'digits' is no setting; give NAME:key=value"),
    ({"think": "3", "cluster": "h100", "model": "llama3-8b,llama3-8b"}, "names a model twice; give each once"),
])  # fmt: skip
def test_what_cannot_be_asked_is_one_line(given: dict[str, Any], line: str) -> None:
    model = given.pop("model", "llama3-8b")
    with pytest.raises(UsageError, match=line):
        plan_command(model, **given)


def test_settings_of_a_task() -> None:
    question = task_of_word("addition:digits=1").question(0)
    assert len(str(question.prompt)) == len("1+2=")
