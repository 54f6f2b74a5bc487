"""Trackers: receivers of a run's records besides its own file (``weft/techniques/trackers/``, or a plugin's).

A tracker never stops a run: after its first failure the run reports it, and goes on without the tracker.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Values = dict[str, Any]


class Tracker(Protocol):
    """Receiver of the records of one run, on rank 0, such as TensorBoard or a service."""

    def record(self, kind: str, step: int, values: Values) -> None:
        """Receive one record, with the fields ``values``, after ``step`` finished steps.

        ``kind``: ``run``, ``train``, ``validation``, ``event`` or another kind of record. The first record is of kind
        ``run``, and another one comes each time when the run is resumed. The steps after its ``step`` are then trained
        again, so that earlier records of these steps no longer count.
        """

    def close(self) -> None:
        """End the tracker's run, at the end of the training run. No other call follows."""


def remembered(run: Path, name: str, make: Callable[[], str]) -> str:
    """Return the result of the first call of ``make`` for this run and the tracker ``name``.

    The result, such as the tracker's id of the run, is stored in the run's folder, so that a resumed run continues
    under the same id.
    """
    path = run / "trackers.json"
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    if name not in known:
        known[name] = make()
        path.write_text(json.dumps(known))
    return known[name]
