"""Read runs on mixtures of data: a table of weights, and a table of losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.data.files import read_records
from weft.data.reading import reading
from weft.errors import UsageError, WeftError, nearest
from weft.paths import home_path

#: Names of the column by which rows of two tables belong together; without it they do by their order.
KEYS = ("index", "run", "name", "id")
#: By how much the weights of a mixture may miss 1, as published ones are rounded.
ROUNDED = 0.02

Row = Mapping[str, Any]


@dataclass(frozen=True)
class MixtureRuns:
    """Small runs on mixtures of domains, to which a regression of the loss is fitted.

    Attributes:
        ``domains``: names of the domains.
        ``weights``: share of each domain in each run, ``[runs, domains]``; each row adds up to 1.
        ``losses``: loss of each run, ``[runs]``.
    """

    domains: tuple[str, ...]
    weights: np.ndarray
    losses: np.ndarray


def read_mixture_runs(mixtures: str, losses: str | None, target: str) -> MixtureRuns:
    """Read runs on mixtures with their measured losses from one or two tables.

    ``mixtures``: table with a column of weights for each domain. ``losses``: table of measured losses; None if they are
    in the same table. ``target``: column of the loss. Rows of two tables are matched by a column such as ``index`` that
    both have, or else by their order. Raises :class:`UsageError` or :class:`WeftError`, which names the fault.
    """
    rows = _read(mixtures)
    measured = rows if losses is None else _read(losses)
    columns = [name for name in measured[0] if name not in KEYS]
    if target not in measured[0]:
        place = losses or mixtures
        raise UsageError(
            f"--target {target!r} is no column of {place}; {nearest(target, columns)}"
        )
    key = next((name for name in KEYS if name in rows[0] and name in measured[0]), None)
    if key is None and len(rows) != len(measured):
        raise WeftError(
            f"{mixtures} has {len(rows)} runs and {losses} has {len(measured)}; give both a column 'index'"
        )
    if key is not None and losses is not None:
        by_key = {row[key]: row for row in measured}
        if lost := next((row[key] for row in rows if row[key] not in by_key), None):
            raise WeftError(
                f"{losses} has no run with {key} = {lost}, which {mixtures} has"
            )
        measured = [by_key[row[key]] for row in rows]
    domains = tuple(name for name in rows[0] if name not in KEYS and name != target)
    weights = np.array(
        [
            [_number(row, name, mixtures, i) for name in domains]
            for i, row in enumerate(rows, 1)
        ]
    )
    totals = weights.sum(1)
    wrong = np.flatnonzero((abs(totals - 1) > ROUNDED) | (weights < 0).any(1))
    if len(wrong):
        raise WeftError(
            f"{mixtures}: the weights of run {wrong[0] + 1} add up to {totals[wrong[0]]:.3g} instead of 1; "
            "leave out columns that are no domains"
        )
    values = [
        _number(row, target, losses or mixtures, i) for i, row in enumerate(measured, 1)
    ]
    return MixtureRuns(domains, weights / totals[:, None], np.array(values))


def _read(place: str) -> list[Row]:
    file = home_path(place)
    if not file.is_file():
        raise UsageError(f"{place} is no table; check the name")
    with reading(file, "a table of runs"):
        rows = [record for _, record in read_records(file)]
    if not rows or not isinstance(rows[0], Mapping):
        raise WeftError(
            f"{place} has no run in it; each row has a column for each domain"
        )
    return rows


def _number(row: Row, name: str, place: str, number: int) -> float:
    value = row.get(name)
    try:
        read = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        read = math.nan
    if not math.isfinite(read):
        raise WeftError(
            f"{place}: {name} of run {number} is {value!r}; it should be a number"
        )
    return read
