"""The records of a run: ``metrics.jsonl`` in its folder, and the same numbers for trackers."""

import errno
import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import UsageError, WeftError, why_unwritten
from weft.observe.trackers import Tracker
from weft.registry import find

FILE = "metrics.jsonl"

#: Bytes of records that wait for a disk that is full.
KEPT = 16 << 20

Record = dict[str, Any]
#: By kind.
Records = dict[str, list[Record]]

#: Kinds that are history: every record counts.
HISTORY = ("run", "event")
#: Kinds of which a step has several records: of each rank, and of each place that is saved to. Of all others the latest
#: record per step counts.
MANY = ("saved", "loaded")


class Metrics:
    """Appends records to ``run/metrics.jsonl``, one flushed line each, and passes them on to trackers.

    ``run``: the run's folder; None, on ranks other than the first, if nothing is to be written. ``trackers``: names of
    the trackers, such as "tensorboard".

    Opening an existing file continues it; an incomplete last line after a crash is removed. A record of kind ``run`` at
    step ``s`` marks a start of the run, after which earlier records of steps beyond ``s`` no longer count. NaN and
    infinity are written as ``null``.

    If the disk is full or fails, ``warn`` is called once and the run goes on. Records that could not be written are
    kept, up to :data:`KEPT` bytes, and written before the next record.
    """

    def __init__(
        self,
        run: Path | None,
        trackers: Sequence[str] = (),
        warn: Callable[[str], None] = print,
    ) -> None:
        self._run, self.warn = run, warn
        self._unwritten = b""
        self._trackers: dict[str, Tracker] = {}
        if run is not None:
            try:
                run.mkdir(parents=True, exist_ok=True)
                self._file = (run / FILE).open("a+b", buffering=0)
                self._file.seek(0)
                self._end = self._file.read().rfind(b"\n") + 1
                self._file.truncate(self._end)
            except OSError as error:
                raise WeftError(
                    f"cannot write {run / FILE}: {why_unwritten(error, 'choose another folder (--out)')}"
                ) from None
            for name in trackers:
                try:
                    self._trackers[name] = find("tracker", name).implementation(run)
                except Exception as error:
                    self._without(name, error)

    def log(self, kind: str, step: int, **values: Any) -> None:
        """Append a record of ``kind`` with the fields ``values``, after ``step`` finished steps."""
        if self._run is None:
            return
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
        finite = json.loads(
            json.dumps(record, default=str), parse_constant=lambda name: None
        )
        self._append(json.dumps(finite).encode() + b"\n")
        if kind not in MANY:  # trackers would draw one line through all ranks
            self._track(kind, step, values)

    def forget(self, step: int) -> None:
        """Remove the records of steps after ``step``, because these steps are about to be repeated."""
        if self._run is None:
            return
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        kept = [
            line
            for line in lines
            if (r := json.loads(line))["kind"] in HISTORY or r["step"] <= step
        ]
        if len(kept) < len(lines):
            draft = self._run / f".{FILE}"
            draft.write_bytes(b"".join(kept))
            draft.replace(self._run / FILE)
            self._file.close()
            self._file = (self._run / FILE).open("a+b", buffering=0)
            self._end = self._file.seek(0, os.SEEK_END)

    def _append(self, line: bytes) -> None:
        waiting = self._unwritten + line
        try:
            written = self._file.write(waiting) or 0
            if written < len(waiting):
                self._file.truncate(self._end)  # no half of a record
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._end, self._unwritten = self._end + written, b""
        except OSError as error:
            if not self._unwritten:
                where = self._run / FILE  # type: ignore[operator]
                self.warn(
                    f"cannot write {where}: {why_unwritten(error)}; the run goes on"
                )
            self._unwritten = waiting if len(waiting) <= KEPT else self._unwritten

    def _track(self, kind: str, step: int, values: Record) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.record(kind, step, values)
            except (
                Exception
            ) as error:  # whatever a tracker's package raises, the run goes on
                del self._trackers[name]
                self._without(name, error)

    def _without(self, name: str, error: Exception) -> None:
        hint = f"{type(error).__name__}: {error}"
        if isinstance(error, ImportError):
            # Weft's own trackers are extras of their names.
            hint = f"install the package {error.name or name!r}"
            if find("tracker", name).module.startswith("weft."):
                hint = f"pip install 'weft[{name}]'"
        self.warn(f"no more records go to {name} ({hint}); the run goes on")

    def close(self) -> None:
        """Flush and close the file, and end the trackers."""
        if self._run is not None:
            if self._unwritten:
                self._append(b"")
            self._file.close()
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                self._without(name, error)


@dataclass(frozen=True)
class RecordedRun:
    """A run that has been read from its folder.

    ``name``: name of the run. ``records``: its records by kind.
    """

    name: str
    records: Records

    @property
    def head(self) -> Record:
        """The run's last record of kind ``run``, which each start and resume writes: recipe, layout and machine."""
        return self.records.get("run", [{}])[-1]

    @property
    def recipe(self) -> Record:
        return self.head.get("recipe") or {}


def resume_hint(folder: Path, run: RecordedRun | None = None) -> str:
    """Return words for the user that say how the run in ``folder`` is continued: with its recipe, if the run does not
    keep it. ``run``: the run, if it has been read; None: read it.
    """
    if run is None:
        try:
            run = RecordedRun(folder.name, read_metrics(folder))
        except (WeftError, OSError):
            run = RecordedRun(folder.name, {})
    recipe = "" if run.head.get("given") else "RECIPE "
    return f"continue with: weft train {recipe}--resume {shlex.quote(str(folder))}"


def read_metrics(run: Path) -> Records:
    """Read the records of the run in the folder ``run`` by kind, in the order of steps.

    An incomplete last line is ignored.
    """
    path = run / FILE
    if (
        not path.is_file()
        or not (text := path.read_text(encoding="utf-8", errors="replace")).strip()
    ):
        raise WeftError(
            f"{run} holds no {FILE} with records; give the folder of a run that was started"
        )
    history: Records = {}
    series: dict[str, dict[tuple[int, int], Record]] = {}
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            record = json.loads(line)
            kind, step = record["kind"], int(record["step"])
        except (ValueError, KeyError, TypeError):
            raise WeftError(
                f"{path} line {number} is damaged; remove that line to read the rest"
            ) from None
        if kind in HISTORY:
            history.setdefault(kind, []).append(record)
        else:
            series.setdefault(kind, {})[step, number if kind in MANY else 0] = record
        if kind == "run":
            series = {
                k: {key: r for key, r in rows.items() if key[0] <= step}
                for k, rows in series.items()
            }
    return history | {
        kind: [rows[key] for key in sorted(rows)]
        for kind, rows in series.items()
        if rows
    }


def metric_by_step(run: Path, metric: str) -> dict[int, float]:
    """Return the values of ``metric``, such as ``validation.loss`` (kind and field of a record), by step.

    ``run``: a run's folder, or a folder inside it.
    """
    kind, _, field = metric.partition(".")
    folder = next((p for p in (run, run.parent) if (p / FILE).is_file()), None)
    if folder is None:
        raise UsageError(
            f"--best needs the metrics of the run, and there is no {FILE} in {run}; give the run's folder"
        )
    records = read_metrics(folder).get(kind, [])
    scores = {
        r["step"]: float(value)
        for r in records
        if isinstance(value := r.get(field or "loss"), int | float)
    }
    if not scores:
        raise UsageError(
            f"--best {metric}: the run has no such metric; validation.loss and train.loss are usual"
        )
    return scores
