"""``weft plan evaluate`` and ``weft plan calibrate``: the planner against measured rows."""

import json
import math
import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as Grid

app = typer.Typer(help="Predict time and memory of layouts, and hold the predictions against measurements.",
                  no_args_is_help=True)  # fmt: skip
Rows = Annotated[Path, typer.Argument(metavar="ROWS.csv", help="Measured rows with the header of measured.csv.")]
_calibration = typer.Option(metavar="FILE", help="Factors from weft plan calibrate; presets without it.")


@app.command()
def evaluate(
    rows: Rows,
    calibration: Annotated[Path | None, _calibration] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Predict every row of a file and show the error per source, beside a constant utilisation."""
    from weft.planner import calibrate as fitting
    from weft.planner.evaluate import fits, memory_scores, scores
    from weft.planner.rows import read_rows

    known, refused = read_rows(rows)
    factors = fitting.load(calibration) if calibration else None
    seconds, gib = fitting.apply(factors, known)
    fit = fits(known, gib)
    table = scores(known, factors)
    if as_json:
        record = {
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
                for i, row in enumerate(known)
            ],
            "refused": [{"id": name, "reason": reason} for name, reason in refused],
            "sources": [{k: None if v != v else v for k, v in vars(score).items()} for score in table],
        }
        print(json.dumps(record))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 110)  # a source's name and eight figures
    grid = Grid(header_style="bold", box=None, padding=(0, 2, 0, 0))
    heads = ("source", "rows", "shapes", "constant MFU", "presets", "held out", "regret", "of 3")
    for name in (*heads, *(["given"] if factors else [])):
        grid.add_column(name, justify="left" if name == "source" else "right", no_wrap=True)
    for s in table:
        cells = [s.source[:40], f"{s.rows}", f"{s.shapes}"]
        cells += [_number(x) for x in (s.constant, s.preset, s.held_out, s.regret, s.regret_of_three)]
        grid.add_row(*cells, *([_number(s.given)] if factors else []))
    wide = [s for s in table if s.rows >= 5]
    cells = [f"median of {len(wide)} sources of 5 rows up", f"{len(known)}", ""]
    cells += [_median([getattr(s, k) for s in wide]) for k in ("constant", "preset", "held_out")]
    jobs = sum(s.groups for s in table)
    cells += [_number(sum(getattr(s, k) * s.groups for s in table if s.groups) / max(jobs, 1))
              for k in ("regret", "regret_of_three")]  # fmt: skip
    grid.add_row(*cells, *([_median([s.given for s in wide])] if factors else []), style="bold")
    console.print("Mean absolute error of the step time in percent; held out: fitted without the row's shape.")
    console.print("Regret: how much slower the first choice (best of three) is than the best layout measured.")
    console.print(grid)
    console.print()
    for program, count, wrong in memory_scores(known, gib):
        console.print(f"memory  {program:<20} {count:>4} rows  error {wrong:.1f} %")
    failed = [i for i, row in enumerate(known) if not row.ran]
    ran = [i for i, row in enumerate(known) if row.ran and row.gib]
    console.print(
        f"memory  of {len(failed)} rows that ran out, {sum(not fit[i] for i in failed)} are rejected; "
        f"of {len(ran)} that ran with memory stated, {sum(not fit[i] for i in ran)}"
    )
    if refused:
        console.print(f"\n{len(refused)} rows cannot be read:")
        for reason in dict.fromkeys(reason for _, reason in refused):
            names = [name for name, why in refused if why == reason]
            more = f" and {len(names) - 12} more" if len(names) > 12 else ""
            console.print(f"  {reason}: {', '.join(names[:12])}{more}", soft_wrap=True, markup=False)
    return 0


@app.command()
def calibrate(rows: Rows, out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write (JSON).")]) -> int:
    """Fit the model's constants to measured rows, within bounds, for weft plan evaluate --calibration."""
    from weft.planner import calibrate as fitting
    from weft.planner.rows import read_rows

    known, refused = read_rows(rows)
    found = fitting.calibrate(known)
    fitting.save(found, out)
    print(f"{out}: {len(found['sources'])} sources from {len(known)} rows; {len(refused)} rows could not be read")
    return 0


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def _median(values: list[float]) -> str:
    known = [v for v in values if not math.isnan(v)]
    return _number(statistics.median(known)) if known else "-"
