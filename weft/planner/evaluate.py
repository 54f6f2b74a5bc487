"""How far predictions are from published measurements: per source, beside a constant utilisation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.calibrate import apply, columns, group, held_out
from weft.planner.rows import Row

Array = NDArray[np.float64]
#: Share by which a prediction may exceed the device's memory before the row counts as "does not fit".
MARGIN = 0.03


@dataclass(frozen=True)
class Score:
    """Mean absolute errors of one source in percent (NaN: cannot be had) and its regrets in percent."""

    source: str
    rows: int
    shapes: int
    constant: float
    preset: float
    held_out: float
    given: float
    groups: int
    regret: float
    regret_of_three: float


def error(predicted: Array, measured: Array) -> float:
    return 100 * float(np.mean(np.abs(predicted / measured - 1)))


def constant_utilisation(rows: Sequence[Row]) -> Array:
    """Seconds at one utilisation per device and precision, the one that fits these very rows best."""
    shape, machine, plan, _ = columns(rows)
    ideal = shape.flops_per_token(plan.seq) * plan.batch * plan.seq / (machine.peak * plan.world)
    measured = np.array([row.seconds for row in rows])
    keys = [group(row) for row in rows]
    found = np.zeros(len(rows))
    for key in set(keys):
        index = np.array([k == key for k in keys])
        found[index] = ideal[index] * np.median(measured[index] / ideal[index])
    return found


def regrets(rows: Sequence[Row], predicted: Array) -> list[tuple[float, float]]:
    """Per group of at least four layouts of one job: how much slower the first choice (best of the first three) is."""
    jobs: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(rows):
        jobs.setdefault((row.form, row.device, row.bits, row.plan.world, row.plan.batch), []).append(i)
    found = []
    for index in jobs.values():
        if len({(p.tp, p.pp, p.micro_batch, p.virtual, p.schedule) for p in (rows[i].plan for i in index)}) < 4:
            continue
        order = np.array(index)[np.argsort(predicted[index])]
        time = np.array([rows[i].seconds for i in order], dtype=float)
        found.append((100 * (time[0] / time.min() - 1), 100 * (time[:3].min() / time.min() - 1)))
    return found


def scores(rows: Sequence[Row], calibration: dict[str, Any] | None) -> list[Score]:
    """One :class:`Score` per source, in the order of the rows."""
    sources: dict[str, list[Row]] = {}
    for row in rows:
        if row.seconds:
            sources.setdefault(row.source, []).append(row)
    found = []
    for name, members in sources.items():
        measured = np.array([row.seconds for row in members])
        out = held_out(members) if len(members) >= 5 else np.full(len(members), np.nan)
        preset = apply(None, members)[0]
        # One shape only: ranking is by what was said in advance.
        ranks = regrets(members, preset if np.isnan(out).any() else out)
        found.append(
            Score(
                name,
                len(members),
                len({row.form for row in members}),
                error(constant_utilisation(members), measured),
                error(preset, measured),
                error(out, measured),
                error(apply(calibration, members)[0], measured) if calibration else float("nan"),
                len(ranks),
                float(np.mean([r[0] for r in ranks])) if ranks else float("nan"),
                float(np.mean([r[1] for r in ranks])) if ranks else float("nan"),
            )
        )
    return found


def fits(rows: Sequence[Row], gib: Array) -> list[bool]:
    """Whether each prediction stays below its device's memory, with :data:`MARGIN`."""
    return [bool(g <= (1 + MARGIN) * float(row.machine.memory) / 2**30) for row, g in zip(rows, gib, strict=True)]


def memory_scores(rows: Sequence[Row], gib: Array) -> list[tuple[str, int, float]]:
    """``(program, rows, mean absolute error in percent)``."""
    found = []
    for program in dict.fromkeys(row.framework for row in rows if row.gib):
        index = [i for i, row in enumerate(rows) if row.gib and row.framework == program]
        found.append((program, len(index), error(gib[index], np.array([rows[i].gib for i in index], dtype=float))))
    return found
