"""The record of a run survives crashes and resumes."""

from __future__ import annotations

import builtins
import errno
import json
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.measured import eventually
from weft.errors import WeftError
from weft.observe.run_metrics import FILE, Metrics, read_metrics
from weft.plugins import register
from weft.recipe import Observe


def test_records_come_back(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "run")
    metrics.log("run", 0, recipe={"name": "x"}, layout="tp=2")
    metrics.log("train", 1, loss=2.5, lr=math.nan, nested={"inf": [math.inf]})
    # Readable while the run still has the file open.
    records = read_metrics(tmp_path / "run")
    assert records["run"][0]["recipe"] == {"name": "x"}
    assert records["train"][0] | {"time": 0} == {
        "kind": "train", "step": 1, "time": 0, "loss": 2.5, "lr": None, "nested": {"inf": [None]}
    }  # fmt: skip
    metrics.close()
    for line in (tmp_path / "run" / FILE).read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_resume_supersedes_what_came_after(tmp_path: Path) -> None:
    for begin, end, loss in ((0, 7, 1.0), (4, 6, 2.0)):
        metrics = Metrics(tmp_path, ["tensorboard"])
        metrics.log("run", begin)
        metrics.log("event", begin, message="a")
        metrics.log("event", begin, message="b")
        for step in range(begin + 1, end + 1):
            metrics.log("train", step, loss=loss)
        metrics.close()
    records = read_metrics(tmp_path)
    assert [(r["step"], r["loss"]) for r in records["train"]] == [
        (s, 1.0 if s <= 4 else 2.0) for s in range(1, 7)
    ]
    assert [r["step"] for r in records["run"]] == [0, 4] and len(records["event"]) == 4


@pytest.mark.parametrize(
    "torn", ['{"kind": "tra', '{"kind": "train", "step": 3, "loss": 1.0}']
)
def test_torn_last_line_is_dropped(tmp_path: Path, torn: str) -> None:
    with_two = Metrics(tmp_path)
    with_two.log("train", 1, loss=1.0)
    with_two.log("train", 2, loss=1.0)
    with_two.close()
    with (tmp_path / FILE).open("a") as file:
        file.write(torn)
    assert [r["step"] for r in read_metrics(tmp_path)["train"]] == [1, 2]
    again = Metrics(tmp_path)
    again.log("train", 3, loss=0.5)
    again.close()
    assert [r["loss"] for r in read_metrics(tmp_path)["train"]] == [1.0, 1.0, 0.5]


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(
        '{"kind": "train", "step": 1}\nrubbish\n{"kind": "train", "step": 2}\n'
    )
    with pytest.raises(WeftError, match="line 2 is damaged"):
        read_metrics(tmp_path)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    metrics = Metrics(None)
    metrics.log("train", 1, loss=1.0)
    metrics.close()
    assert not list(tmp_path.iterdir())


def test_tensorboard_forgets_what_a_resume_supersedes(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begin, end, loss in ((0, 7, 1.0), (4, 6, 2.0)):
        metrics = Metrics(tmp_path, ["tensorboard"])
        metrics.log("run", begin, layout="tp=2", recipe={"name": "x"})
        for step in range(begin + 1, end + 1):
            metrics.log("train", step, loss=loss, mfu=None)
        metrics.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (s, 1.0 if s <= 4 else 2.0) for s in range(1, 7)
    ]


def test_a_tracker_that_is_missing_or_fails_is_told_once(tmp_path: Path) -> None:
    real, heard = builtins.__import__, list[str]()

    def without(name: str, *args: object, **kwargs: object) -> object:
        if "tensorboard" in name:
            raise ImportError(name)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    with mock.patch("builtins.__import__", without):
        metrics = Metrics(tmp_path, ["tensorboard", "failing"], warn=heard.append)
    metrics.log("train", 1, loss=1.0)
    metrics.log("train", 2, loss=1.0)
    metrics.close()
    assert (
        len(heard) == 2
        and heard[0]
        == "no more records go to tensorboard (pip install 'weft[tensorboard]'); the run goes on"
        and "ValueError: no" in heard[1]
    )
    assert len(read_metrics(tmp_path)["train"]) == 2


@pytest.mark.parametrize("installed", [True, False])
def test_tensorboard_is_the_default_where_it_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has not asked for TensorBoard hears nothing of it; who names it is told what is missing (above)."""
    monkeypatch.setattr(
        "weft.recipe.observe.find_spec", lambda name: object() if installed else None
    )
    assert Observe().trackers == (("tensorboard",) if installed else ())
    assert Observe(trackers=("tensorboard",)).trackers == ("tensorboard",)


@register("tracker", "failing")
class Failing:
    """A tracker that takes nothing."""

    def __init__(self, run: Path) -> None:
        pass

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        raise ValueError("no")

    def close(self) -> None:
        raise AssertionError("a tracker that has failed is not heard of again")


def resumed_run(tmp_path: Path, tracker: str) -> None:
    for begin, end in ((0, 4), (2, 5)):
        metrics = Metrics(tmp_path / "run", [tracker], warn=pytest.fail)
        metrics.log("run", begin, layout="tp=2", recipe={"name": "x"})
        for step in range(begin + 1, end + 1):
            metrics.log("train", step, loss=float(step), mfu=None)
        metrics.log("saved", end, rank=0)
        metrics.close()


@pytest.mark.soak
def test_mlflow_goes_on_with_the_same_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    resumed_run(tmp_path, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "run" / "mlruns").as_uri())
    runs = client.search_runs([client.get_experiment_by_name("weft").experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"] and runs[0].data.tags[
        "run.layout"
    ] == "tp=2"
    seen = client.get_metric_history(runs[0].info.run_id, "train/loss")
    assert [(m.step, m.value) for m in seen] == [
        (s, float(s)) for s in (1, 2, 3, 4, 3, 4, 5)
    ]


@pytest.mark.slow
def test_wandb_offline_takes_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["weft", "--data", "https://me:word@h/x?sig=1"])
    resumed_run(tmp_path, "wandb")
    assert sys.argv[2] == "https://me:word@h/x?sig=1"
    found = list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    ids = {path.stem.removeprefix("run-") for path in found}
    assert len(found) == 2 and len(ids) == 1
    # Another process writes these, which may not have come to it yet.
    eventually(lambda: all(b"train/loss" in path.read_bytes() for path in found))
    for path in (tmp_path / "run").rglob("*"):  # W&B records the command
        assert not path.is_file() or b"me:word" not in path.read_bytes(), path


def test_a_full_disk_is_told_once_and_costs_no_record(tmp_path: Path) -> None:
    """Records that cannot be written, wholly or at all, wait for better times; the run goes on."""
    heard: list[str] = []
    metrics = Metrics(tmp_path, warn=heard.append)
    metrics.log("train", 1, loss=1.0)
    real = metrics._file

    class Full:
        room = 10

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done, self.room = real.write(data[: self.room]), 0
            return done

        truncate, close = staticmethod(real.truncate), staticmethod(real.close)

    metrics._file = Full()
    for step in (2, 3, 4):
        metrics.log("train", step, loss=1.0)
    assert heard == [
        f"cannot write {tmp_path / FILE}: No space left on device; make room on its disk; the run goes on"
    ]
    assert [r["step"] for r in read_metrics(tmp_path)["train"]] == [1]
    metrics._file = real
    metrics.log("train", 5, loss=1.0)
    metrics.close()
    assert [r["step"] for r in read_metrics(tmp_path)["train"]] == [
        1,
        2,
        3,
        4,
        5,
    ] and len(heard) == 1


def test_a_full_disk_ends_events_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    metrics = Metrics(tmp_path, ["tensorboard"], warn=heard.append)
    metrics.log("train", 1, loss=1.0)
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(metrics._trackers["tensorboard"]._writer, "add_scalar", full)  # type: ignore[attr-defined]
    for step in (2, 3):
        metrics.log("train", step, loss=1.0)
    metrics.close()
    assert len(heard) == 1 and heard[0].startswith(
        "no more records go to tensorboard (OSError: "
    )
    assert "No space left on device" in heard[0]
    assert full.call_count == 1 and [
        r["step"] for r in read_metrics(tmp_path)["train"]
    ] == [1, 2, 3]
