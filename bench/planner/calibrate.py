"""Constants fitted to published rows: for each source, for shapes held out, and as a file for ``--calibration``.

python bench/planner/calibrate.py ROWS.csv --out FILE
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from correction import Correction, correct
from numpy.typing import NDArray
from rows import read_rows
from script import run

from weft.errors import WeftError
from weft.planner.fit import KNOBS, Knob, Measurement, constants, fit, formulas, predict

Array = NDArray[np.float64]


#: Prior of the extra factor on ``matmul`` of one device and precision within a source.
GROUP = 0.2
#: Priors of what changes from one release of a program to the next, in a source that states them. Models with experts
#: change most: between 25.09 and 26.08 of Megatron-Bridge by up to 1.9 times under one layout.
RELEASE, RELEASE_EXPERTS = {"matmul": 0.05}, {"matmul": 0.2, "moe": 0.3}


def group(row: Measurement) -> str:
    """Device, bits of the products, and whether there are experts."""
    return f"{row.device}/{row.bits}{'/experts' if row.shape.experts else ''}"


def knobs_of(rows: Sequence[Measurement]) -> list[Knob]:
    """What is fitted to the rows of one source: the constants, and factors for its devices, precisions and releases."""
    groups = sorted({group(row) for row in rows})
    knobs = [
        *KNOBS,
        *[Knob("matmul", GROUP, key) for key in groups] * (len(groups) > 1),
    ]
    # A step from each release to the next: with these priors a random walk over releases.
    steps = RELEASE_EXPERTS if any(row.shape.experts for row in rows) else RELEASE
    for release in sorted({row.release for row in rows if row.release})[1:]:
        key = "from " + ".".join(map(str, release))
        knobs += [Knob(name, sigma, key) for name, sigma in steps.items()]
    return knobs


def applies(knob: Knob, row: Measurement) -> bool:
    """Whether ``knob`` is for ``row``: for all rows, for its group, or from its release or an earlier one on."""
    start, _, release = knob.key.partition(" ")
    if start == "from":
        return row.release >= tuple(int(part) for part in release.split("."))
    return knob.key in ("", group(row))


def masks_of(knobs: Sequence[Knob], rows: Sequence[Measurement]) -> Array:
    return np.array(
        [[applies(knob, row) for row in rows] for knob in knobs], dtype=float
    )


def fitted(
    rows: Sequence[Measurement], weights: Array | None = None
) -> tuple[list[Knob], Array]:
    """The knobs of one source's rows and what :func:`weft.planner.fit.fit` finds for them."""
    knobs = knobs_of(rows)
    return knobs, fit(rows, weights, knobs, masks_of(knobs, rows))


def predicted(
    rows: Sequence[Measurement], knobs: Sequence[Knob], theta: Array
) -> Array:
    return predict(rows, theta, knobs, masks_of(knobs, rows))


def system(row: Measurement) -> str:
    """What is fitted together: a source, and in it models with experts apart from those without."""
    return row.source + (" (experts)" if row.shape.experts else "")


def held_out(rows: Sequence[Measurement], most: int = 24) -> Array:
    """Seconds predicted for each row by a fit of its system that has not seen its shape; NaN if there is only one.

    With more than ``most`` shapes, they are held out in ``most`` sets.
    """
    names = [system(row) for row in rows]
    if len(set(names)) > 1:
        found = np.zeros(len(rows))
        for name in set(names):
            index = [i for i, other in enumerate(names) if other == name]
            found[index] = held_out([rows[i] for i in index], most)
        return found
    forms = sorted({row.form for row in rows})
    if len(forms) < 2:
        return np.full(len(rows), np.nan)
    # Forms are sorted by size, so that taking every n-th one spreads a set over the sizes.
    fold = {form: i % min(most, len(forms)) for i, form in enumerate(forms)}
    member = np.array([fold[row.form] for row in rows])
    weights = np.array(
        [(member != i).astype(float) for i in range(min(most, len(forms)))]
    )
    knobs, theta = fitted(rows, weights)
    found = np.zeros(len(rows))
    for i, values in enumerate(theta):
        seen = [row for row, m in zip(rows, member, strict=True) if m != i]
        rest = [row for row, m in zip(rows, member, strict=True) if m == i]
        correction = correct(seen, predicted(seen, knobs, values))
        found[member == i] = predicted(rest, knobs, values) * correction.factor(rest)
    return found


def calibrate(rows: Sequence[Measurement]) -> dict[str, Any]:
    """A calibration as plain data: factors per source and for all rows together, and GiB of constant per program."""
    timed = [row for row in rows if row.seconds]
    if not timed:
        raise WeftError("no row has a time to calibrate with")
    sources: dict[str, list[Measurement]] = {}
    for row in timed:
        sources.setdefault(system(row), []).append(row)
    # Sources count alike in the fit for all, whatever their number of rows.
    even = np.array([[min(1.0, 12 / len(sources[system(row)])) for row in timed]])
    return {
        "version": 2,
        "all": {"factors": _plain(KNOBS, fit(timed, even))},
        "sources": {
            name: _source(members)
            for name, members in sources.items()
            if len(members) >= 3
        },
        "memory": constants(rows),
    }


def _source(rows: list[Measurement]) -> dict[str, Any]:
    knobs, theta = fitted(rows)
    return {
        "factors": _plain(knobs, theta),
        "correction": correct(rows, predicted(rows, knobs, theta)).plain(),
    }


def _plain(knobs: Sequence[Knob], theta: Array) -> list[dict[str, Any]]:
    values = np.exp(theta.reshape(-1, len(knobs))[0])
    return [
        {"constant": k.field, "for": k.key, "factor": round(float(x), 4)}
        for k, x in zip(knobs, values, strict=True)
    ]


def save(calibration: dict[str, Any], path: Path) -> None:
    try:
        path.write_text(json.dumps(calibration, indent=1) + "\n")
    except OSError as error:
        raise WeftError(f"cannot write {path}: {error.strerror}") from None


def apply(
    calibration: dict[str, Any] | None, rows: Sequence[Measurement]
) -> tuple[Array, Array]:
    """``(seconds, GiB)`` of each row: by the fit of its system, else by that of all rows, else by the presets."""
    calibration = calibration or {"all": {"factors": []}, "sources": {}, "memory": {}}
    time = np.zeros(len(rows))
    tables = {None: calibration["all"], **calibration["sources"]}
    chosen = [
        system(row) if system(row) in calibration["sources"] else None for row in rows
    ]
    for name, table in tables.items():
        knobs = [Knob(item["constant"], 0.0, item["for"]) for item in table["factors"]]
        theta = np.log([float(item["factor"]) for item in table["factors"]])
        index = [i for i, source in enumerate(chosen) if source == name]
        part = [rows[i] for i in index]
        if part:
            time[index] = predicted(part, knobs, theta)
        if part and table.get("correction"):
            time[index] *= Correction.of(table["correction"]).factor(part)
    return time, gib_of(rows, calibration["memory"])


def gib_of(rows: Sequence[Measurement], constants: dict[str, float]) -> Array:
    """GiB of each row. Of rows that do not state recomputation: with the least under which they fit, as their
    operators must have found it; without any if none suffices."""
    if not rows:
        return np.zeros(0)
    own = np.array([constants.get(row.framework, row.engine.constant) for row in rows])
    found = np.asarray(formulas(rows) + own, dtype=float)
    room = np.array([float(row.machine.memory) / 2**30 for row in rows])
    for kind in (1, 2):
        tight = [
            i
            for i, row in enumerate(rows)
            if "recompute=none" in row.assumed and found[i] > room[i]
        ]
        if tight:
            again = [
                replace(rows[i], plan=replace(rows[i].plan, recompute=kind))
                for i in tight
            ]
            less = formulas(again) + own[tight]
            found[tight] = np.where(
                (less <= room[tight]) | (kind == 1),
                np.minimum(less, found[tight]),
                found[tight],
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Fit the model's constants to measured rows, within bounds."
    )
    parser.add_argument(
        "rows",
        type=Path,
        metavar="ROWS.csv",
        help="measured rows with the header of measured.csv",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="the file to write (JSON)",
    )
    options = parser.parse_args()
    known, refused = read_rows(options.rows)
    found = calibrate(known)
    save(found, options.out)
    print(
        f"{options.out}: {len(found['sources'])} sources from {len(known)} rows; {len(refused)} could not be read"
    )


if __name__ == "__main__":
    run(main)
