"""Read what small runs on single pools have measured: tables, and folders of ``weft train``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.curation.repetition_fit import PoolRun
from weft.data.files import read_records
from weft.data.reading import reading
from weft.errors import UsageError, WeftError
from weft.observe.run_metrics import RecordedRun, read_metrics
from weft.paths import home_path

#: Names of the column of samples in a table. The law counts in whatever unit that is.
COUNTS = ("tokens", "samples")


@dataclass(frozen=True)
class MeasuredRuns:
    """Small training runs, each on a single pool of data, to which a law of the loss is fitted.

    Attributes:
        ``runs``: the runs.
        ``flops_per_token``: floating-point operations per token in training; None if the runs do not record it, or do
            not agree.
        ``step_tokens``: number of tokens of a step; None in the same cases.
    """

    runs: tuple[PoolRun, ...]
    flops_per_token: float | None = None
    step_tokens: float | None = None


def read_measured(places: Sequence[str]) -> MeasuredRuns:
    """Read the runs at ``places``: tables (CSV, JSON Lines, Parquet ...), or folders of ``weft train``.

    A table has the columns ``pool``, ``tokens`` or ``samples``, ``epochs`` and ``loss``. A folder may be given as
    NAME=FOLDER with the name of the pool. Otherwise the pool is named after the only source of the run. Raises
    :class:`UsageError` or :class:`WeftError`, which names the table or folder that cannot be read.
    """
    runs: list[PoolRun] = []
    costs: set[tuple[float | None, float | None]] = set()
    for place in places:
        name, folder = _named_folder(place)
        if folder is None:
            runs += _table_runs(home_path(place))
            continue
        record = RecordedRun(folder.name, read_metrics(folder))
        runs.append(_recorded_run(record, folder, name))
        costs.add(_costs(record))
    if len(costs) != 1:
        return MeasuredRuns(tuple(runs))
    return MeasuredRuns(tuple(runs), *costs.pop())


def _named_folder(place: str) -> tuple[str, Path | None]:
    """Return the pool's name, if given, and the run's folder; None for a table."""
    whole = home_path(place)
    if whole.is_dir():
        return "", whole
    name, equals, folder = place.partition("=")
    if equals and not whole.exists() and home_path(folder).is_dir():
        return name, home_path(folder)
    if not whole.is_file():
        raise UsageError(
            f"{place} is neither a table of runs nor the folder of a run; check the name"
        )
    return "", None


def _table_runs(file: Path) -> list[PoolRun]:
    with reading(file, "a table of runs"):
        return [
            _table_run(record, f"{file}:{number}")
            for number, record in read_records(file)
        ]


def _table_run(record: Any, place: str) -> PoolRun:
    if not isinstance(record, Mapping):
        raise WeftError(
            f"{place}: a run is an object with pool, tokens, epochs and loss"
        )
    count = next((name for name in COUNTS if record.get(name) is not None), "")
    missing = [
        name for name in ("pool", "epochs", "loss") if record.get(name) is None
    ] + ([] if count else ["tokens"])
    if missing:
        raise WeftError(
            f"{place}: {missing[0]!r} is missing; a table of runs has columns pool, tokens (or samples), epochs, loss"
        )
    numbers = []
    for name in (count, "epochs", "loss"):
        try:
            numbers.append(float(record[name]))
        except (TypeError, ValueError):
            raise WeftError(
                f"{place}: {name} is {record[name]!r}; it should be a number"
            ) from None
    return PoolRun(str(record["pool"]), *numbers)


def _recorded_run(record: RecordedRun, folder: Path, name: str) -> PoolRun:
    sources = (record.recipe.get("data") or {}).get("sources") or []
    if not name and len(sources) != 1:
        raise UsageError(
            f"{folder} has {len(sources)} sources; give the name of its pool as NAME={folder}"
        )
    trained, validated = (
        record.records.get("train", []),
        record.records.get("validation", []),
    )
    if not trained or not validated or validated[-1].get("loss") is None:
        raise WeftError(
            f"{folder} has no loss on held-out data after training; train with data.validation and validation.every"
        )
    tokens = float(trained[-1]["tokens"])
    size = record.head.get("epoch_tokens")
    epochs = tokens / size if size else _asked_epochs(record, folder)
    return PoolRun(
        name or _source_name(sources[0]), tokens, epochs, float(validated[-1]["loss"])
    )


def _asked_epochs(record: RecordedRun, folder: Path) -> float:
    """Return the number of epochs that ended a run of an earlier version of Weft, which did not record their size."""
    epochs = (record.recipe.get("data") or {}).get("epochs")
    if not epochs:
        raise WeftError(
            f"{folder} does not say how large its data is; train again, or put the run into a table"
        )
    return float(epochs)


def _source_name(source: Mapping[str, Any]) -> str:
    path = source.get("path")
    return Path(path).stem if path else str(source.get("kind"))


def _costs(record: RecordedRun) -> tuple[float | None, float | None]:
    """Return flops per token and tokens per step of a run."""
    recipe = record.recipe
    batch = (recipe.get("train") or {}).get("batch")
    seq_len = (recipe.get("data") or {}).get("seq_len")
    flops = record.head.get("flops_per_token")
    step = float(batch * seq_len) if batch and seq_len else None
    return (float(flops) if flops and math.isfinite(flops) else None), step


def pool_sizes(texts: Sequence[str]) -> dict[str, float]:
    """Return the number of tokens by pool from texts such as "clean=2e9".

    Raises :class:`UsageError` for a text of another form.
    """
    sizes = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not name or not value > 0 or math.isinf(value):
            raise UsageError(f"--size {text!r} is not of the form POOL=TOKENS")
        sizes[name] = value
    return sizes
