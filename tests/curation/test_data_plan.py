"""``weft data plan``: runs that are read, budgets, what is said, and one-line errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.curation.test_repetition_law import PLANTED, planted_runs
from weft.cli.data import app
from weft.curation.data_plan import Interval, budget_samples, plan_data, wear_text
from weft.curation.measured_runs import MeasuredRuns, pool_sizes, read_measured
from weft.curation.repetition_fit import fit_repetition_law
from weft.curation.repetition_law import PoolUtility
from weft.errors import WeftError

RUNS = planted_runs(PLANTED, 0.005, 3)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "runs.csv"
    lines = [f"{r.pool},{r.samples},{r.epochs},{r.loss}" for r in RUNS if r.epochs <= 4]
    file.write_text("\n".join(["pool,tokens,epochs,loss", *lines]) + "\n")
    return file


def plan(*words: Any) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def test_command_prints_choices_and_reason(table: Path):
    shown = plan(table, "--tokens", "3e4")
    assert shown.exit_code == 0, shown.output
    assert "clean\t1\t0.37" in shown.stdout
    assert "why: noisy teaches less per sample" in shown.stdout
    assert "note:" not in shown.stdout


def test_json_has_the_planted_law_in_its_intervals(table: Path):
    said = json.loads(plan(table, "--tokens", "9e4", "--json").stdout)
    assert said["choices"][0]["pools"] == ["clean"]
    assert said["choices"][0]["epochs"] == pytest.approx(3)
    loss = said["choices"][0]["loss"]
    assert loss["low"] < PLANTED.loss(["clean"], 9e4) < loss["high"]
    good = said["utilities"][0]
    assert good["exponent"]["low"] < -0.25 < good["exponent"]["high"]
    assert good["half_life"]["low"] < 3 < good["half_life"]["high"]


def test_long_budget_takes_more_pools_and_says_what_is_far():
    close = {
        "clean": PoolUtility(-0.25, 1.5, 30000.0),
        "noisy": PoolUtility(-0.24, 1.5, 30000.0),
    }
    runs = planted_runs(replace(PLANTED, pools=close), 0.001, 0)
    fitted = fit_repetition_law(runs, resamples=10)
    alone = plan_data(fitted, 3e4, tuple(runs))
    assert alone.choices[0].pools == ("clean",)
    scarce = plan_data(fitted, 3e6, tuple(runs))
    assert scarce.choices[0].pools == ("clean", "noisy")
    assert "without noisy the other data would be read 100 times" in scarce.reason
    far = "50 epochs are far beyond the 16 of the longest run"
    assert any(note.startswith(far) for note in scarce.notes)


def test_wear_that_no_run_shows_has_no_number():
    assert wear_text(Interval(3.0, 2.5, 1000.0)) == "3 (2.5 to none seen)"
    assert wear_text(Interval(999.0, 700.0, 1000.0)) == "none seen"


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"tokens": 5e6}, 5e6),
        ({"flops": 6e12, "parameters": 1e6}, 1e6),
        ({"flops": 7e12}, 1e6),
        ({"steps": 100, "step_tokens": 10}, 1000),
        ({"steps": 100}, 51200),
    ],
)
def test_budgets(given: dict[str, float], tokens: float):
    measured = MeasuredRuns((), flops_per_token=7e6, step_tokens=512)
    keys = ("tokens", "flops", "steps", "parameters", "step_tokens")
    assert budget_samples(measured, *(given.get(key) for key in keys)) == tokens


def recorded(
    folder: Path, epochs: float, loss: float | None, sources: int = 1, size: int = 1000
) -> Path:
    """A run's folder as ``weft train`` leaves it."""
    recipe = {
        "data": {
            "sources": [{"path": f"data/pool{i}.txt"} for i in range(sources)],
            "seq_len": 64,
        },
        "train": {"batch": 8},
    }
    records: list[dict[str, Any]] = [
        {"kind": "run", "step": 0, "recipe": recipe, "epoch_tokens": size, "flops_per_token": 6e5},
        {"kind": "train", "step": 9, "tokens": size * epochs, "loss": 2.0},
        {"kind": "validation", "step": 9, "loss": loss},
    ]  # fmt: skip
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    return folder


def test_folders_of_runs_are_read(tmp_path: Path):
    first = recorded(tmp_path / "first", 2, 2.5)
    second = recorded(tmp_path / "second", 1.5, 2.75, sources=2)
    read = read_measured([str(first), f"mixed={second}"])
    assert [(r.pool, r.samples, r.epochs, r.loss) for r in read.runs] == [
        ("pool0", 2000, 2, 2.5),
        ("mixed", 1500, 1.5, 2.75),
    ]
    assert (read.flops_per_token, read.step_tokens) == (6e5, 512)


def test_what_cannot_be_read_is_said_in_a_line(tmp_path: Path):
    table = tmp_path / "bad.csv"
    cases = [
        ("pool,tokens,loss\na,1,2\n", "bad.csv:2: 'epochs' is missing"),
        ("pool,tokens,epochs,loss\na,many,1,2\n", "tokens is 'many'"),
        ("pool,tokens,epochs,loss\na,1,1\n", "3 cells under the 4 names"),
    ]
    for text, said in cases:
        table.write_text(text)
        with pytest.raises(WeftError, match=said):
            read_measured([str(table)])
    with pytest.raises(WeftError, match="neither a table"):
        read_measured([str(tmp_path / "absent.csv")])
    with pytest.raises(WeftError, match="has 2 sources; give the name"):
        read_measured([str(recorded(tmp_path / "two", 1, 2.0, sources=2))])
    with pytest.raises(WeftError, match="no loss on held-out data"):
        read_measured([str(recorded(tmp_path / "blind", 1, None))])
    for text in ("clean", "clean=-3", "clean=inf", "=4"):
        with pytest.raises(WeftError, match="POOL=TOKENS"):
            pool_sizes([text])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give one budget"),
        (["--tokens", "5", "--steps", "5"], "give one budget"),
        (["--flops", "1e9"], "--flops needs --parameters"),
        (["--steps", "5"], "--steps needs --step-tokens"),
        (["--tokens", "1e5", "--size", "dirty=5"], "no run of pool 'dirty'"),
    ],
)
def test_budget_that_does_not_say_tokens_is_refused(
    table: Path, words: list[str], said: str
):
    ended = plan(table, *words)
    assert isinstance(ended.exception, WeftError) and said in str(ended.exception)
    assert "\n" not in str(ended.exception)
