"""Runs of one's own as rows, and the model refitted to them within its bounds."""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calibrate import main as calibrate
from rows import read_rows

from weft.observe.measured import FILE, append, row_of_run
from weft.planner.cost import step_time
from weft.planner.engine_constants import ENGINES, stack
from weft.planner.fit import measurement_columns
from weft.planner.own import own_runs, read_own
from weft.recipe import build_recipe

TREE: dict[str, Any] = {
    "name": "mine",
    "model": {"layers": 16, "embed": 2048, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 8192, "vocab": 32000},
    "data": {"seq_len": 2048}, "train": {"batch": 32, "micro_batch": 2, "dtype": "bfloat16"},
}  # fmt: skip


def run_of(
    folder: Path, layout: dict[str, int], seconds: float, steps: int = 12
) -> Path:
    """A run folder with the record of so many steps."""
    folder.mkdir(parents=True)
    recipe = build_recipe(TREE | {"layout": layout})
    world = recipe.layout.world
    records: list[dict[str, Any]] = [
        {"kind": "run", "step": 0, "recipe": recipe.model_dump(mode="json"), "parameters": 1.1e9,
         "device": f"{world} x NVIDIA H100 80GB HBM3",
         "started": f"2026-01-01T00:00:{len(list(folder.parent.iterdir())):02}"},
    ]  # fmt: skip
    for step in range(1, steps + 1):
        slow = 5 * seconds if step <= 2 else seconds
        records.append(
            {
                "kind": "train",
                "step": step,
                "step_s": slow,
                "memory_gib": 40.0,
                "loss": 1.0,
            }
        )
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in records)
    )
    return folder


LAYOUTS: list[dict[str, int]] = [
    {"shard": 8},
    {"shard": 4, "tp": 2},
    {"shard": 2, "tp": 4},
    {"tp": 8},
]


def test_a_run_is_a_row_that_the_planner_reads(tmp_path: Path) -> None:
    for i, layout in enumerate(
        [{"dp": 2, "shard": 4}, {"pp": 4, "dp": 2}, {"cp": 2, "tp": 4}]
    ):
        path = append(run_of(tmp_path / f"run-{i}", layout, 0.5 + i))
    assert path == tmp_path / FILE and len(list(csv.DictReader(path.open()))) == 3
    rows = read_own(path)
    # the first steps do not count
    assert [row.seconds for row in rows] == [0.5, 1.5, 2.5]
    assert (rows, []) == read_rows(path), "the reader of published rows sees the same"
    assert {(row.family, row.device, row.framework) for row in rows} == {
        ("weft", "H100-80GB", "weft")
    }
    first, second, third = (row.plan for row in rows)
    assert (first.dp, first.shard, first.zero, first.micro_batch) == (2, 4, 3, 2)
    assert (second.pp, second.dp, second.zero) == (4, 2, 0) and (
        third.cp,
        third.tp,
    ) == (2, 4)
    assert rows[0].gib == 40 and rows[0].plan.bits == 16


@pytest.mark.parametrize("change", [{"adapter": {}}, {"train": {"freeze": ["embedding.*"]}},
                                    {"optimizer": {"estimate": "zeroth-order"}}, {"experts": 4}])  # fmt: skip
def test_runs_that_train_a_part_or_experts_say_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.setitem(TREE, "train", TREE["train"] | change.pop("train", {}))
    recipe = change.pop("optimizer", {})
    monkeypatch.setitem(TREE, "optimizer", recipe)
    for name, value in change.items():
        monkeypatch.setitem(TREE["model"], name, value)
    assert row_of_run(run_of(tmp_path / "run", {"shard": 8}, 0.5)) is None


def test_short_runs_and_other_layers_say_nothing(tmp_path: Path) -> None:
    assert row_of_run(run_of(tmp_path / "short", {"shard": 8}, 1.0, steps=6)) is None
    linear = run_of(tmp_path / "linear", {"shard": 8}, 1.0)
    text = (
        (linear / "metrics.jsonl")
        .read_text()
        .replace('"mixer": "softmax"', '"mixer": "linear"')
    )
    (linear / "metrics.jsonl").write_text(text)
    assert append(linear) is None and not (tmp_path / FILE).exists()


@pytest.mark.parametrize("count", [1, 4])
def test_the_model_moves_towards_what_was_measured_and_not_beyond(
    tmp_path: Path, count: int
) -> None:
    """Runs that are twice as slow as the presets say."""
    for i, layout in enumerate(LAYOUTS[:count]):
        append(run_of(tmp_path / f"draft-{i}", layout, 1.0))
    rows, _ = read_rows(tmp_path / FILE)
    shape, machine, plan, engine = measurement_columns(rows)
    preset = step_time(shape, machine, plan, engine).total
    (tmp_path / FILE).unlink()
    for i, layout in enumerate(LAYOUTS[:count]):
        append(run_of(tmp_path / f"run-{i}", layout, 2 * float(preset[i])))
    own = own_runs(tmp_path / FILE, "H100-80GB")
    assert own is not None and f"{count} run" in own.message
    fitted = step_time(shape, machine, plan, stack([own.engine] * count)).total
    moved = fitted / preset
    assert (
        moved.mean() > (1.15 if count == 1 else 1.4)
        and (moved > 1.1).all()
        and (moved < 2.05).all()
    )
    assert (
        own_runs(tmp_path / FILE, "A100-80GB") is None
        and own_runs(tmp_path / "no.csv", "H100-80GB") is None
    )


def test_a_plan_says_what_it_was_calibrated_with(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    words = (
        "plan",
        "llama3.2-1b",
        "--cluster",
        "h100",
        "--gpus",
        8,
        "--batch",
        64,
        "--seq",
        2048,
        "--json",
    )
    plain = json.loads(command(*words)[1])
    assert "presets" in plain["calibration"]
    for i, layout in enumerate(LAYOUTS):
        append(run_of(tmp_path / f"runs/run-{i}", layout, 10.0))
    found = json.loads(command(*words)[1])
    assert "calibrated to 4 runs of yours on H100-80GB" in found["calibration"]
    assert found["layouts"][0]["seconds"] > 1.3 * plain["layouts"][0]["seconds"]
    other = json.loads(command(*words, "--engine", "megatron")[1])
    assert "presets" in other["calibration"]
    monkeypatch.setattr(
        sys, "argv", ["calibrate.py", f"runs/{FILE}", "--out", "factors.json"]
    )
    calibrate()
    capsys.readouterr()
    told = json.loads(command(*words, "--calibration", "factors.json")[1])
    assert "factors.json" in told["calibration"]
    assert told["layouts"][0]["seconds"] > 1.3 * plain["layouts"][0]["seconds"]
    code, _, why = command(*words, "--calibration", "missing.json")
    assert code != 0 and "missing.json" in why
    assert ENGINES["weft"].matmul == 1.0  # presets are not touched
