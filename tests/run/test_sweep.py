"""``weft train --sweep``: a run for every combination, one table, one page; what is done is not done again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import recipe, write_corpus
from weft.cli.train import train_command
from weft.errors import UsageError, WeftError
from weft.observe.run_metrics import read_metrics
from weft.run import sweep
from weft.run.sweep import split_values, trials_of
from weft.train.training import Outcome

RECIPE = """\
[model]
layers = 1
embed = 16
heads = 2
[data]
kind = "jsonl"
path = "{corpus}"
seq_len = 19
validation = 0.2
cache = "{folder}/cache"
[layout]
[train]
steps = 3
batch = 4
[optimizer]
warmup = 0
[validation]
every = 1
[observe]
split_every = 0
trackers = []
"""
ASKED = ["optimizer.lr=1e-4,1e-2", "train.batch=4,2"]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(RECIPE.format(corpus=write_corpus(tmp_path), folder=tmp_path))
    return file


def names(folder: Path) -> list[str]:
    return sorted(place.name for place in folder.iterdir() if place.is_dir())


def interrupting(at: int) -> Callable[..., Outcome]:
    """As ``start``, but the run of this number is asked to stop after a step."""
    real, count = sweep.start, 0

    def start(recipe: Any, out: Any, resume: Any) -> Outcome:
        nonlocal count
        count += 1
        if count != at:
            return real(recipe, out, resume)
        short = recipe.model_copy(
            update={"train": recipe.train.model_copy(update={"steps": 1})}
        )
        return replace(real(short, out, resume), interrupted=2)

    return start


@pytest.mark.slow(8)
def test_a_sweep_and_what_is_left_of_it(
    written: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with mock.patch.object(sweep, "start", interrupting(3)):
        assert train_command(written, sweep=ASKED) == 128 + 2
    said, folder = capsys.readouterr().out, tmp_path / "runs/small-sweep"
    assert "stopped by SIGINT; the same command goes on with what is not done" in said
    assert names(folder) == ["lr=1e-2,batch=4", "lr=1e-4,batch=2", "lr=1e-4,batch=4"]
    assert json.loads((folder / "sweep.json").read_text())["done"].keys() == {
        "lr=1e-4,batch=4",
        "lr=1e-4,batch=2",
    }
    before = [
        (folder / name / "metrics.jsonl").read_bytes()
        for name in ("lr=1e-4,batch=4", "lr=1e-4,batch=2")
    ]
    assert train_command(written, sweep=ASKED) == 0
    said = capsys.readouterr().out
    # the third goes on from its checkpoint
    assert said.count("done before") == 2 and "at step 1" in said
    assert before == [
        (folder / name / "metrics.jsonl").read_bytes()
        for name in ("lr=1e-4,batch=4", "lr=1e-4,batch=2")
    ]
    lines = said.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("optimizer.lr\t"))
    assert lines[head].split("\t") == [
        "optimizer.lr", "train.batch", "steps", "loss", "validation", "at step", "tokens/s", "run",
    ]  # fmt: skip
    rows = [line.split("\t") for line in lines[head + 1 : head + 5]]
    assert {(row[0], row[1]) for row in rows} == {
        (lr, batch) for lr in ("1e-4", "1e-2") for batch in ("4", "2")
    }
    assert all(row[2] == "3" for row in rows)
    lowest = [float(row[4]) for row in rows]
    assert lowest == sorted(lowest) and rows[0][0] == "1e-2"
    for row in rows:
        records = read_metrics(Path(row[-1]))
        assert float(row[4]) == pytest.approx(
            min(r["loss"] for r in records["validation"] if r["step"]), abs=1e-4
        )
        assert records["run"][-1]["recipe"]["train"]["batch"] == int(row[1])
    assert lines[head + 5] == "report      runs/small-sweep/report.html"
    assert all(name in (folder / "report.html").read_text() for name in names(folder))


def test_results_of_another_recipe_are_not_shown(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {"sweep": ["optimizer.lr=1e-3"], "out": tmp_path / "out"}
    assert train_command(written, **asked) == 0
    with pytest.raises(
        UsageError,
        match=r"lr=1e-3 was trained with another recipe.*choose another --out",
    ):
        train_command(written, overrides=["train.seed=5"], **asked)
    capsys.readouterr()
    # it just goes on
    assert (
        train_command(written, overrides=["train.steps=4", "observe.every=2"], **asked)
        == 0
    )
    assert re.search(r"^1e-3\t4\t", capsys.readouterr().out, re.M)


def test_addresses_that_differ_behind_a_query_are_different_runs(
    tmp_path: Path,
) -> None:
    """Neither names of folders nor lines show what may be secret, and yet no result is taken for another's."""
    said = list[str]()
    with (
        mock.patch.object(sweep, "start", return_value=mock.Mock(interrupted=0)),
        mock.patch.object(sweep, "committed_checkpoints", return_value=[1]),
    ):
        for order in ("ab", "ba"):
            paths = [f"https://me:word@h/{'x' * 90}?split={split}" for split in order]
            trials = trials_of([f"data.path={','.join(paths)}"], tmp_path)
            asked = [recipe("", data__sources=({"kind": "text", "path": path},)) for path in paths]  # fmt: skip
            sweep.run_sweep([*zip(trials, asked, strict=True)], tmp_path, said.append)
        assert trials[1].overrides == [f"data.path={paths[1]}"]
        assert ["done before" in line for line in said] == [False, False, True, True]
        sweep.run_sweep([(trials[0], asked[1])], tmp_path, said.append)
    assert "done before" not in said[-1]
    assert len(set(said[:2])) == len({trial.folder for trial in trials}) == 2
    assert not any("me:" in line or "split=" in line for line in said), said


def test_a_run_that_fails_does_not_stop_the_others(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(
        sweep,
        "start",
        mock.Mock(side_effect=[WeftError("no such luck"), KeyboardInterrupt]),
    ):
        assert (
            train_command(written, sweep=["train.seed=1,2,3"], out=tmp_path / "three")
            == 128 + 2
        )
    said = capsys.readouterr().out
    assert (
        "run 1 of 3 has failed: no such luck" in said
        and "run 2 of 3: train.seed=2" in said
    )
    assert "run 3" not in said and re.search(
        r"^1\t0\t-\t-\t-\t-\tno such luck$", said, re.M
    )


def test_mistakes_are_found_before_anything_runs(written: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"sweep": ["train.batch"]}, "not of the form"), ({"sweep": ["train.batch=4,,2"]}, "not of the form"),
        ({"sweep": ["train.batch=4,4"]}, "has 4 twice"), ({"sweep": ["train.batch=4", "train.batch=2"]}, "there twice"),
        ({"sweep": ["train.batch=4,none"]}, "train.batch"), ({"sweep": ["train.bach=4"]}, "did you mean 'batch'"),
        ({"sweep": ASKED, "resume": "auto"}, "leave out --resume"),
        ({"sweep": ASKED, "out": tmp_path / "full"}, "choose another --out"),
        ({"sweep": ["train.seed=" + ",".join(map(str, range(1001)))]}, "1,000 is the most"),
    ]  # fmt: skip
    with mock.patch.object(sweep, "start") as started:
        for how, why in wrong:
            with pytest.raises(UsageError, match=re.escape(why)):
                train_command(written, **{"out": tmp_path / "new"} | how)
        started.assert_not_called()
    assert not (tmp_path / "new").exists()


VALUES = st.sampled_from(
    [
        "1",
        "1e-4",
        "true",
        '"a,b"',
        "[1, 2]",
        "{x = [1, 2], y = 'a,]'}",
        "auto",
        "cosine",
        "../up",
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    lists=st.lists(
        st.lists(VALUES, min_size=1, max_size=4, unique=True), min_size=1, max_size=3
    )
)
def test_every_combination_is_there_once(lists: list[list[str]]) -> None:
    keys = [f"section.key{i}" for i in range(len(lists))]
    trials = trials_of(
        [f"{key}={','.join(each)}" for key, each in zip(keys, lists, strict=True)],
        Path("out"),
    )
    assert [split_values(",".join(each)) for each in lists] == lists
    chosen = {tuple(trial.settings.values()) for trial in trials}
    count = 1
    for each in lists:
        count *= len(each)
    assert (
        len(trials) == len(chosen) == count == len({trial.folder for trial in trials})
    )
    assert all(
        trial.folder.parent == Path("out") and list(trial.settings) == keys
        for trial in trials
    )
