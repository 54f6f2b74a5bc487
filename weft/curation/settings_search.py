"""Joint search of settings for each size: the best run, whether the search was wide enough, and the asymptote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.curation.asymptote import FEWEST_SIZES, Asymptote, fit_asymptote
from weft.data.files import read_records
from weft.data.reading import reading
from weft.errors import UsageError, WeftError
from weft.observe.run_metrics import FILE, RecordedRun, read_metrics
from weft.paths import home_path

#: Settings that are read from the recipes of recorded runs, by the section that they stand in.
SETTINGS = {"optimizer": ("weight_decay", "lr"), "data": ("epochs",)}


@dataclass(frozen=True)
class SearchedRun:
    """One run of a search for the best settings at several model sizes.

    Attributes:
        ``size``: number of the model's parameters, or another quantity that grows, such as members of an ensemble.
        ``loss``: loss on held-out data at the end.
        ``settings``: settings that were varied, by name.
    """

    size: float
    loss: float
    settings: Mapping[str, float]


@dataclass(frozen=True)
class SettingsSearch:
    """Result of a search for the best settings at several model sizes.

    Attributes:
        ``best``: the best run of each size, the smallest size first.
        ``asymptote``: the law of the best losses; None if there are too few sizes to fit it
            (:func:`weft.curation.asymptote.fit_asymptote`).
        ``notes``: lines on what the search leaves open.
    """

    best: tuple[SearchedRun, ...]
    asymptote: Asymptote | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the result as values that JSON can hold: best runs, asymptote and notes."""
        return asdict(self)


def read_searched_runs(
    places: Sequence[str], over: str = "parameters"
) -> list[SearchedRun]:
    """Read the runs at ``places``: tables, folders of ``weft train``, or folders of its sweeps.

    A table has a column ``loss`` and a column named ``over`` with the size; all other columns of numbers are settings.
    The size of a run of ``weft train`` is its number of parameters, and its settings are decay, learning rate and
    epochs. Raises :class:`UsageError` or :class:`WeftError`, which names the table or folder that cannot be read.
    """
    runs: list[SearchedRun] = []
    for place in places:
        path = home_path(place)
        if path.is_dir():
            folders = (
                [path] if (path / FILE).is_file() else sorted(path.glob(f"*/{FILE}"))
            )
            if not folders:
                raise UsageError(
                    f"{place} is the folder of no run and of no sweep; check the name"
                )
            if over != "parameters":
                raise UsageError(
                    f"--over {over} is for tables; folders of runs have parameters"
                )
            runs += [
                _recorded(each if each.is_dir() else each.parent) for each in folders
            ]
        elif path.is_file():
            with reading(path, "a table of runs"):
                rows = list(read_records(path))
            runs += [_row(row, f"{place}:{number}", over) for number, row in rows]
        else:
            raise UsageError(
                f"{place} is neither a table of runs nor the folder of a run or a sweep; check the name"
            )
    if not runs:
        raise UsageError("there is no run to choose from")
    return runs


def _recorded(folder: Path) -> SearchedRun:
    record = RecordedRun(folder.name, read_metrics(folder))
    validated = record.records.get("validation", [])
    parameters = record.head.get("parameters")
    if not validated or validated[-1].get("loss") is None or not parameters:
        raise WeftError(
            f"{folder} has no loss on held-out data after training; train with data.validation and validation.every"
        )
    settings = {
        name: float(value)
        for section, names in SETTINGS.items()
        for name in names
        if (value := (record.recipe.get(section) or {}).get(name)) is not None
    }
    return SearchedRun(float(parameters), float(validated[-1]["loss"]), settings)


def _row(row: Any, place: str, over: str) -> SearchedRun:
    numbers = {}
    for name, value in row.items() if isinstance(row, Mapping) else ():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError):
            continue
    if missing := next((name for name in (over, "loss") if name not in numbers), None):
        raise WeftError(
            f"{place}: there is no number in {missing!r}; a table has columns {over} and loss, and one for each setting"
        )
    size, loss = numbers.pop(over), numbers.pop("loss")
    return SearchedRun(size, loss, numbers)


def search_settings(runs: Sequence[SearchedRun]) -> SettingsSearch:
    """Choose the best run of each size, fit the asymptote to these runs if there are enough sizes, and return both.

    The notes name each setting whose best value is the smallest or largest one that was tried at a size, because the
    optimum may lie beyond.
    """
    sizes = sorted({run.size for run in runs})
    best, notes = [], []
    for size in sizes:
        same = [run for run in runs if run.size == size]
        winner = min(same, key=lambda run: run.loss)
        best.append(winner)
        for name, value in winner.settings.items():
            tried = sorted({run.settings[name] for run in same if name in run.settings})
            if len(tried) > 1 and value in (tried[0], tried[-1]):
                end = "smallest" if value == tried[0] else "largest"
                notes.append(
                    f"at size {size:g} the best {name} is {value:g}, the {end} that was tried; try further ones"
                )
    if len(sizes) < FEWEST_SIZES:
        notes.append(
            f"{len(sizes)} sizes do not show an asymptote; {FEWEST_SIZES} are the least"
        )
        return SettingsSearch(tuple(best), None, tuple(notes))
    law = fit_asymptote(sizes, [run.loss for run in best])
    return SettingsSearch(tuple(best), law, tuple(notes))
