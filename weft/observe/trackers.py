"""Trackers: who gets the records of a run besides its own file (``weft/techniques/trackers/``, or a plugin's).

A tracker never stops a run: the first time that it fails the run says so, and goes on without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Values = dict[str, Any]


class Tracker(Protocol):
    """Receives the records of one run, on rank 0."""

    def record(self, kind: str, step: int, values: Values) -> None:
        """One record of ``kind`` (``run``, ``train``, ``validation``, ``event``, ...) after ``step`` finished steps.

        ``run`` comes first, and again when the run is resumed; it supersedes what was recorded after its step.
        """

    def close(self) -> None:
        """End the record; no call follows."""


def remembered(run: Path, name: str, make: Callable[[], str]) -> str:
    """Return the result of the first call of ``make`` for this run and tracker, which the run's folder keeps.

    So a run that is resumed goes on under the same id.
    """
    path = run / "trackers.json"
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    if name not in known:
        known[name] = make()
        path.write_text(json.dumps(known))
    return known[name]
