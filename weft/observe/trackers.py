"""Where the records of a run go besides its own file: TensorBoard, Weights & Biases, MLflow, or a plugin's.

A tracker never stops a run: the first time that it fails the run says so, and goes on without it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

from weft.registry import find

Values = dict[str, Any]


class Tracker(Protocol):
    """Takes the records of one run, on its first rank."""

    def record(self, kind: str, step: int, values: Values) -> None:
        """One record of ``kind`` (``run``, ``train``, ``validation``, ``event``, ...) after ``step`` finished steps.

        ``run`` comes first, and again when the run is resumed; it supersedes what was recorded after its step.
        """

    def close(self) -> None:
        """Nothing comes after this."""


class TensorBoard:
    """Events in the run's folder."""

    def __init__(self, run: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._run, self._writer_class = run, SummaryWriter
        self._writer: Any = None

    def record(self, kind: str, step: int, values: Values) -> None:
        if self._writer is None:
            # What a crashed attempt wrote after this step disappears from TensorBoard too.
            purge = step + 1 if kind == "run" and step else None
            self._writer = self._writer_class(str(self._run), purge_step=purge)
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(f"{kind}/{name}", value, step)
            else:
                self._writer.add_text(
                    f"{kind}/{name}",
                    f"```\n{json.dumps(value, indent=2, default=str)}\n```",
                    step,
                )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB:
    """A run of Weights & Biases, as its own ``WANDB_*`` variables say (``WANDB_MODE=offline`` sends nothing)."""

    def __init__(self, run: Path) -> None:
        import wandb

        self._tracked = wandb.init(
            project="weft", name=run.name, dir=str(run), id=remembered(run, "wandb", lambda: token_hex(4)),
            resume="allow", settings=wandb.Settings(silent=True),
        )  # fmt: skip
        # A run that is resumed comes by some steps again, which its own count of steps would not take.
        self._tracked.define_metric("step")
        self._tracked.define_metric("*", step_metric="step")

    def record(self, kind: str, step: int, values: Values) -> None:
        if kind == "run":
            self._tracked.config.update(
                json.loads(json.dumps(values, default=str)), allow_val_change=True
            )
        shown = {
            f"{kind}/{name}": value
            for name, value in values.items()
            if isinstance(value, (int, float, str))
        }
        self._tracked.log({"step": step, **shown})

    def close(self) -> None:
        self._tracked.finish()


class MLflow:
    """A run of the experiment ``weft``, at ``MLFLOW_TRACKING_URI`` (default: the run's folder ``mlruns``)."""

    def __init__(self, run: Path) -> None:
        import mlflow

        # The database that MLflow would rather have needs much more than what the records do.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = (
            os.environ.get("MLFLOW_TRACKING_URI")
            or (run.absolute() / "mlruns").as_uri()
        )
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name("weft")
        experiment = (
            known.experiment_id if known else self._client.create_experiment("weft")
        )
        self._id = remembered(
            run,
            "mlflow",
            lambda: self._client.create_run(experiment, run_name=run.name).info.run_id,
        )

    def record(self, kind: str, step: int, values: Values) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = {n: v for n, v in values.items() if isinstance(v, (int, float))}
        self._client.log_batch(
            self._id,
            metrics=[Metric(f"{kind}/{n}", v, now, step) for n, v in numbers.items()],
        )
        for name, value in values.items():
            if name not in numbers and value is not None:
                text = (
                    value if isinstance(value, str) else json.dumps(value, default=str)
                )
                self._client.set_tag(self._id, f"{kind}.{name}", text[:5000])

    def close(self) -> None:
        self._client.set_terminated(self._id)


#: By name, what makes a tracker for a run folder; the names are those of the packages that they need.
TRACKERS: dict[str, Callable[[Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


def make_tracker(name: str, run: Path) -> Tracker:
    """The tracker of this name, Weft's or a plugin's. Raises :class:`ImportError` if its package is not installed."""
    tracker: Tracker = (
        TRACKERS[name](run)
        if name in TRACKERS
        else find("tracker", name).implementation(run)
    )
    return tracker


def remembered(run: Path, name: str, make: Callable[[], str]) -> str:
    """The result of the first call of ``make`` for this run and tracker. It is kept in the run's folder, so that a
    resumed run continues under the same id."""
    path = run / "trackers.json"
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    if name not in known:
        known[name] = make()
        path.write_text(json.dumps(known))
    return known[name]
