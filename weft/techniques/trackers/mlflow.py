"""MLflow as a tracker of runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from weft.observe.trackers import Values, remembered
from weft.registry import register


@register("tracker", "mlflow")
class MLflow:
    """Sends the records of a run (losses and other values by step) to the experiment ``weft`` of the MLflow server at
    ``MLFLOW_TRACKING_URI``. Without this environment variable the records go to the folder ``mlruns`` in ``run``, the
    run's folder.
    """

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
