"""How far predictions are from published measurements: per source, beside a constant utilisation.

python bench/planner/evaluate.py ROWS.csv [--calibration FILE] [--json]
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from calibrate import apply, group, held_out
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as Grid
from rows import read_rows
from script import run

from weft.planner.fit import Measurement, measurement_columns
from weft.planner.own import load

Array = NDArray[np.float64]
#: Share by which a prediction may exceed the device's memory before the row counts as "does not fit".
MARGIN = 0.03
#: How many groups of depths tell whether a source's times are sums, and how far from a line these may be.
LINES, STRAIGHT = 5, 1e-4


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
    composed: bool


def error(predicted: Array, measured: Array) -> float:
    return 100 * float(np.mean(np.abs(predicted / measured - 1)))


def constant_utilisation(rows: Sequence[Measurement]) -> Array:
    """Seconds at one utilisation per device and precision, the one that fits these very rows best."""
    shape, machine, plan, _ = measurement_columns(rows)
    ideal = (
        shape.flops_per_token(plan.seq)
        * plan.batch
        * plan.seq
        / (machine.peak * plan.world)
    )
    measured = np.array([row.seconds for row in rows])
    keys = [group(row) for row in rows]
    found = np.zeros(len(rows))
    for key in set(keys):
        index = np.array([k == key for k in keys])
        found[index] = ideal[index] * np.median(measured[index] / ideal[index])
    return found


def regrets(rows: Sequence[Measurement], predicted: Array) -> list[tuple[float, float]]:
    """Per group of at least four layouts of one job: how much slower the first choice (best of the first three) is."""
    jobs: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(rows):
        jobs.setdefault(
            (row.form, row.device, row.bits, row.plan.world, row.plan.batch), []
        ).append(i)
    found = []
    for index in jobs.values():
        if (
            len(
                {
                    (p.tp, p.pp, p.micro_batch, p.virtual, p.schedule)
                    for p in (rows[i].plan for i in index)
                }
            )
            < 4
        ):
            continue
        order = np.array(index)[np.argsort(predicted[index])]
        time = np.array([rows[i].seconds for i in order], dtype=float)
        found.append(
            (100 * (time[0] / time.min() - 1), 100 * (time[:3].min() / time.min() - 1))
        )
    return found


def composed(rows: Sequence[Measurement]) -> bool:
    """Whether these times were put together from pieces that were measured, instead of measured whole.

    Of runs that differ in their depth alone, real times leave a straight line by a thousandth and more, and those that
    are sums of so many layers lie on it to the last digits.
    """
    alike: dict[Any, dict[float, float]] = {}
    for row in rows:
        key = (
            row.shape.embed,
            row.shape.heads,
            row.shape.ffn,
            row.device,
            row.bits,
            row.plan,
        )
        alike.setdefault(key, {})[float(row.shape.layers)] = float(row.seconds or 0)
    off = []
    for times in alike.values():
        depths = sorted(times)
        for a, b, c in zip(depths, depths[1:], depths[2:], strict=False):
            line = times[a] + (times[c] - times[a]) * (b - a) / (c - a)
            off.append(abs(times[b] / line - 1))
    return len(off) >= LINES and statistics.median(off) < STRAIGHT


def scores(
    rows: Sequence[Measurement], calibration: dict[str, Any] | None
) -> list[Score]:
    """One :class:`Score` per source, in the order of the rows."""
    sources: dict[str, list[Measurement]] = {}
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
                error(apply(calibration, members)[0], measured)
                if calibration
                else float("nan"),
                len(ranks),
                float(np.mean([r[0] for r in ranks])) if ranks else float("nan"),
                float(np.mean([r[1] for r in ranks])) if ranks else float("nan"),
                composed(members),
            )
        )
    return found


def fits(rows: Sequence[Measurement], gib: Array) -> list[bool]:
    """Whether each prediction stays below its device's memory, with :data:`MARGIN`."""
    return [
        bool(g <= (1 + MARGIN) * float(row.machine.memory) / 2**30)
        for row, g in zip(rows, gib, strict=True)
    ]


def memory_scores(
    rows: Sequence[Measurement], gib: Array
) -> list[tuple[str, int, float]]:
    """``(program, rows, mean absolute error in percent)``."""
    found = []
    for program in dict.fromkeys(row.framework for row in rows if row.gib):
        index = [
            i for i, row in enumerate(rows) if row.gib and row.framework == program
        ]
        found.append(
            (
                program,
                len(index),
                error(gib[index], np.array([rows[i].gib for i in index], dtype=float)),
            )
        )
    return found


def record(
    rows: Sequence[Measurement],
    refused: Sequence[tuple[str, str]],
    calibration: Path | None,
) -> dict[str, Any]:
    """Every row with what is predicted for it, and the scores of every source, as plain data."""
    factors = load(calibration) if calibration else None
    seconds, gib = apply(factors, rows)
    fit = fits(rows, gib)
    return {
        "calibration": str(calibration) if calibration else "presets",
        "rows": [
            {
                "id": row.id,
                "source": row.source,
                "measured_s": row.seconds,
                "predicted_s": float(seconds[i]),
                "measured_gib": row.gib,
                "predicted_gib": float(gib[i]),
                "fits": fit[i],
                "assumed": list(row.assumed),
            }
            for i, row in enumerate(rows)
        ],
        "refused": [{"id": name, "reason": reason} for name, reason in refused],
        "sources": [
            {k: None if v != v else v for k, v in vars(s).items()}
            for s in scores(rows, factors)
        ],
    }


def show(
    rows: Sequence[Measurement],
    refused: Sequence[tuple[str, str]],
    calibration: Path | None,
) -> None:
    """The same as tables."""
    factors = load(calibration) if calibration else None
    gib = apply(factors, rows)[1]
    table = scores(rows, factors)
    names = (
        "source",
        "rows",
        "shapes",
        "constant MFU",
        "presets",
        "held out",
        "regret",
        "of 3",
        *["given"] * bool(factors),
    )
    grid = Grid(header_style="bold", box=None, padding=(0, 2, 0, 0))
    for name in names:
        grid.add_column(
            name, justify="left" if name == "source" else "right", no_wrap=True
        )
    keys = (
        "constant",
        "preset",
        "held_out",
        "regret",
        "regret_of_three",
        *["given"] * bool(factors),
    )
    for s in table:
        grid.add_row(
            s.source[:40],
            f"{s.rows}",
            f"{s.shapes}",
            *(number(getattr(s, key)) for key in keys),
        )
    wide = [s for s in table if s.rows >= 5]
    jobs = max(sum(s.groups for s in table), 1)

    def overall(key: str) -> str:
        if key.startswith("regret"):  # a mean over jobs
            return number(
                sum(getattr(s, key) * s.groups for s in table if s.groups) / jobs
            )
        known = [v for s in wide if not math.isnan(v := getattr(s, key))]
        return number(statistics.median(known)) if known else "-"

    total = f"median of {len(wide)} sources of 5 rows up"
    grid.add_row(
        total, f"{len(rows)}", "", *(overall(key) for key in keys), style="bold"
    )
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 110)  # a source's name and eight figures
    console.print(
        "Mean absolute error of the step time in percent; held out: fitted without the row's shape."
    )
    console.print(
        "Regret: how much slower the first choice (best of three) is than the best layout measured, mean over jobs."
    )
    console.print(grid)
    for s in table:
        if s.composed:
            console.print(
                f"{s.source}: its times are sums of pieces, not steps that ran."
            )
    console.print()
    for program, count, wrong in memory_scores(rows, gib):
        console.print(f"memory  {program:<20} {count:>4} rows  error {wrong:.1f} %")
    fit = fits(rows, gib)
    failed = [i for i, row in enumerate(rows) if not row.ran]
    ran = [i for i, row in enumerate(rows) if row.ran and row.gib]
    console.print(
        f"memory  of {len(failed)} rows that ran out, {sum(not fit[i] for i in failed)} are rejected; "
        f"of {len(ran)} that ran with memory stated, {sum(not fit[i] for i in ran)}"
    )
    reasons: dict[str, list[str]] = {}
    for name, reason in refused:
        reasons.setdefault(reason, []).append(name)
    if refused:
        console.print(f"\n{len(refused)} rows cannot be read:")
    for reason, names_of in reasons.items():
        more = f" and {len(names_of) - 12} more" if len(names_of) > 12 else ""
        console.print(
            f"  {reason}: {', '.join(names_of[:12])}{more}",
            soft_wrap=True,
            markup=False,
        )


def number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Predict every row of a file and show the error per source."
    )
    parser.add_argument(
        "rows",
        type=Path,
        metavar="ROWS.csv",
        help="measured rows with the header of measured.csv",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="factors from calibrate.py; else presets",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    rows, refused = read_rows(options.rows)
    if options.json:
        print(json.dumps(record(rows, refused, options.calibration)))
    else:
        show(rows, refused, options.calibration)


if __name__ == "__main__":
    run(main)
