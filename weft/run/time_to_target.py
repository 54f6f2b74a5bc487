"""Time to a target: which settings bring a model to a given validation loss first, by rules that are declared.

The protocol is that of AlgoPerf (Dahl et al. 2023, "Benchmarking Neural Network Training Algorithms") with external
tuning. An *entrant* is a set of settings with candidates for others, such as the learning rate. A *study* is one seed:
in it the entrant trains with each of its candidates, and the one that reaches the target first counts. An entrant's
result on a workload is the median over studies. Only the time of training steps counts, not that of validations,
checkpoints and the preparation of data.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from weft.errors import UsageError
from weft.observe.run_metrics import FILE as METRICS
from weft.observe.run_metrics import read_metrics
from weft.recipe.toml import read_toml, toml_value

#: Multiples of the best time at which a performance profile is drawn.
PROFILE = [1 + 0.05 * i for i in range(61)]


@dataclass(frozen=True)
class Entrant:
    """An entrant of a comparison: recipe settings whose time to a target loss is measured.

    ``name``: its name in tables; ``settings``: settings of the recipe, as ``--set`` takes them; ``candidates``:
    further settings, one tuple for each candidate. The best candidate of a study counts.
    """

    name: str
    settings: tuple[str, ...] = ()
    candidates: tuple[tuple[str, ...], ...] = ((),)


class TargetRun(NamedTuple):
    """One run of a comparison: an entrant with one of its candidates, on one workload, with one seed.

    ``workload``: name of the workload. ``candidate``: further settings, as texts ``section.key=value``. ``folder``:
    folder of the run. The runs with the same ``seed`` form a study: every entrant with every candidate on every
    workload.
    """

    workload: str
    entrant: Entrant
    candidate: tuple[str, ...]
    seed: int
    folder: Path

    @property
    def overrides(self) -> list[str]:
        return [*self.entrant.settings, *self.candidate, f"train.seed={self.seed}"]


class Reached(NamedTuple):
    """Steps and seconds after which a run reached the target loss.

    ``steps``: steps until the first validation with the target loss; ``seconds``: these steps times the mean time of
    a step. Both are infinite if the run never reached the target.
    """

    steps: float = math.inf
    seconds: float = math.inf


@dataclass(frozen=True)
class StudyResult:
    """The best candidate of an entrant in one study.

    A study is the runs with one ``seed``. ``candidate``: settings of the best candidate, as texts
    ``section.key=value``; ``reached``: when that candidate reached the target.
    """

    seed: int
    candidate: tuple[str, ...]
    reached: Reached


@dataclass(frozen=True)
class Standing:
    """Result of an entrant on a workload.

    ``workload``, ``entrant``: their names. ``rank``: place among the entrants by the median time, from 1 on; entrants
    that did not reach the target share the last place. ``steps``, ``seconds``: medians over studies, infinite if half
    of the studies or more did not reach the target. ``studies``: the result of each study (the runs with one seed).
    """

    workload: str
    entrant: str
    rank: int
    steps: float
    seconds: float
    studies: tuple[StudyResult, ...]

    @property
    def reached(self) -> int:
        """Number of studies (the runs with one seed) in which the entrant reached the target."""
        return sum(math.isfinite(study.reached.steps) for study in self.studies)


def read_entrants(path: Path) -> list[Entrant]:
    """Read the entrants that the TOML file ``path`` declares: a table for each, with the keys ``set`` and ``tune``.

    ``set`` lists settings as ``section.key=value``. ``tune`` maps settings to lists of values, all of whose
    combinations are candidates. Raises :class:`UsageError` if the file has another form.
    """
    entrants = []
    for name, given in read_toml(path).items():
        about = f"{path}: entrant [{name}]"
        if not re.fullmatch(r"[\w.+-]*[\w+-]", name):
            raise UsageError(
                f"{about}: its name is part of its folders' names; use letters, digits and . + - _ alone"
            )
        if not isinstance(given, dict) or (unknown := given.keys() - {"set", "tune"}):
            what = (
                f"has {sorted(unknown)[0]!r}"
                if isinstance(given, dict)
                else "is no table"
            )
            raise UsageError(f"{about} {what}; an entrant has set and tune alone")
        settings, tuned = given.get("set", []), given.get("tune", {})
        if not isinstance(settings, list) or not all(
            isinstance(text, str) and "=" in text for text in settings
        ):
            raise UsageError(f'{about}: set is a list such as ["optimizer.kind=lion"]')
        if not isinstance(tuned, dict) or not all(
            isinstance(values, list) and values for values in tuned.values()
        ):
            raise UsageError(
                f'{about}: tune is a table such as {{ "optimizer.lr" = [1e-3, 3e-3] }}'
            )
        entrants.append(Entrant(name, tuple(settings), candidates_of(tuned)))
    if not entrants:
        raise UsageError(f"{path} declares no entrant; write a table for each")
    return entrants


def candidates_of(tuned: Mapping[str, Sequence[Any]]) -> tuple[tuple[str, ...], ...]:
    """Return a candidate for every combination of the values that ``tuned`` lists for each setting.

    A candidate is a tuple of texts ``section.key=value``, as ``--set`` takes them.
    """
    return tuple(
        tuple(
            f"{key}={toml_value(value)}"
            for key, value in zip(tuned, values, strict=True)
        )
        for values in itertools.product(*tuned.values())
    )


def target_runs(
    workloads: Sequence[str],
    entrants: Sequence[Entrant],
    seeds: Sequence[int],
    folder: Path,
) -> list[TargetRun]:
    """Return all runs of a comparison, study by study, so that a slow phase of the machine affects all entrants
    alike.

    ``workloads``: names of the workloads; ``entrants``: what is compared; ``seeds``: the seed of each study;
    ``folder``: the folder in which every run has a folder of its own.
    """
    return [
        TargetRun(
            workload,
            entrant,
            candidate,
            seed,
            folder / f"{workload},{entrant.name},{number},{seed}",
        )
        for seed in seeds
        for workload in workloads
        for entrant in entrants
        for number, candidate in enumerate(entrant.candidates, 1)
    ]


def reached_at(folder: Path, target: float) -> Reached:
    """Return after how many steps and seconds the run in ``folder`` had a validation loss of at most ``target``.

    It is read from the run's records; the seconds are infinite if these have no step times.
    """
    if not (folder / METRICS).is_file():
        return Reached()
    records = read_metrics(folder)
    steps = [
        r["step"]
        for r in records.get("validation", [])
        if r["loss"] is not None and r["step"] and r["loss"] <= target
    ]
    if not steps:
        return Reached()
    last = min(steps)
    # a step whose time was split by a profile has none of its own, and counts as the others do
    times = [
        r["step_s"]
        for r in records.get("train", [])
        if r["step"] <= last and r.get("step_s")
    ]
    return Reached(last, last * mean(times)) if times else Reached(last)


def standings(
    attempts: Sequence[TargetRun], targets: Mapping[str, float]
) -> list[Standing]:
    """Return the result of every entrant on every workload, workload by workload, fastest first.

    ``attempts``: the runs that were trained; ``targets``: target loss of each workload.
    """
    table = []
    for workload, target in targets.items():
        its = [attempt for attempt in attempts if attempt.workload == workload]
        rows = []
        for entrant in dict.fromkeys(attempt.entrant for attempt in its):
            studies = tuple(_studies([a for a in its if a.entrant == entrant], target))
            steps = median(study.reached.steps for study in studies)
            seconds = median(study.reached.seconds for study in studies)
            rows.append(Standing(workload, entrant.name, 0, steps, seconds, studies))
        rows.sort(key=lambda row: row.seconds)
        for row in rows:
            faster = sum(other.seconds < row.seconds for other in rows)
            table.append(Standing(**{**vars(row), "rank": 1 + faster}))
    return table


def _studies(attempts: Sequence[TargetRun], target: float) -> Iterator[StudyResult]:
    """Yield the best candidate of each study of one entrant."""
    for seed in dict.fromkeys(attempt.seed for attempt in attempts):
        results = [
            StudyResult(seed, attempt.candidate, reached_at(attempt.folder, target))
            for attempt in attempts
            if attempt.seed == seed
        ]
        yield min(results, key=lambda result: result.reached.seconds)


def performance_profile(table: Sequence[Standing]) -> dict[str, list[float]]:
    """Return for each entrant the share of workloads that it finishes within each multiple of the best time.

    ``table``: results of all entrants. The multiples are :data:`PROFILE`. The best time of a workload is the lowest
    median time that any entrant takes for it (Dolan and More 2002).
    """
    best: dict[str, float] = {}
    for row in table:
        best[row.workload] = min(row.seconds, best.get(row.workload, math.inf))
    shares: dict[str, list[float]] = {}
    for name in dict.fromkeys(row.entrant for row in table):
        ratios = [
            row.seconds / best[row.workload]
            for row in table
            if row.entrant == name and math.isfinite(row.seconds)
        ]
        shares[name] = [
            sum(ratio <= limit for ratio in ratios) / len(best) for limit in PROFILE
        ]
    return shares


def record_of(row: Standing) -> dict[str, Any]:
    """Return ``row`` as a dictionary of JSON values, with None in place of infinite numbers."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [finite(part) for part in value]
        return None if isinstance(value, float) and math.isinf(value) else value

    studies = [
        asdict(study) | {"reached": study.reached._asdict()} for study in row.studies
    ]
    record: dict[str, Any] = finite(
        asdict(row) | {"studies": studies, "reached": row.reached}
    )
    return record
