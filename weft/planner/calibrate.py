"""Fit the engine's constants to measured rows, within bounds and drawn towards the presets (ridge regression).

The unknowns are logarithms of factors on :class:`~weft.planner.engine.Engine` constants, each with a prior standard
deviation that says how far the constant plausibly lies from its preset. So few rows move little, and many rows move
what they show. Damped Gauss-Newton (Levenberg 1944, Marquardt 1963) on log ratios with Huber weights, over several
folds at once: a fold is a set of row weights.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import UsageError, WeftError
from weft.planner.correction import Correction, correct
from weft.planner.cost import step_time
from weft.planner.engine import Engine, scaled, stack
from weft.planner.memory import peak_memory
from weft.planner.rows import Row

Array = NDArray[np.float64]

#: Constants that are fitted and their prior standard deviations (of the logarithm).
PRIORS: dict[str, float] = {
    "matmul": 0.3, "traffic": 0.5, "attention": 0.5, "scores": 0.5, "elementwise": 0.5, "inner": 0.5, "kernels": 0.7,
    "step": 1.0, "link": 0.4, "network": 0.5, "latency": 0.7, "exposed_tp": 0.3, "exposed_dp": 0.7, "exposed_pp": 0.7,
    "exposed_cp": 0.5, "exposed_ep": 0.5, "moe": 0.7, "optimizer": 0.5, "jitter": 0.7, "buckets": 0.5,
    "dispatch": 0.5,
}  # fmt: skip
#: Prior of the extra factor on ``matmul`` of one device and precision within a source.
GROUP = 0.2
#: Priors of what changes from one release of a program to the next, in a source that states them. Models with experts
#: change most: between 25.09 and 26.08 of Megatron-Bridge by up to 1.9 times under one layout.
RELEASE, RELEASE_EXPERTS = {"matmul": 0.05}, {"matmul": 0.2, "moe": 0.3}
NOISE, HUBER, BOUND, FORMS, STEP = 0.06, 1.5, 3.0, 6, 1e-3


@dataclass(frozen=True)
class Knob:
    """A fitted constant; ``key``: the group (see :func:`group`) or class of programs it is for, empty for all rows, or
    ``from`` and a release: for this one and those after it."""

    field: str
    sigma: float
    key: str = ""

    def applies(self, row: Row) -> bool:
        start, _, release = self.key.partition(" ")
        if start == "from":
            return row.release >= tuple(int(part) for part in release.split("."))
        return self.key in ("", group(row), row.family)


def group(row: Row) -> str:
    """Device, bits of the products, and whether there are experts."""
    return f"{row.device}/{row.bits}{'/experts' if row.shape.experts else ''}"


def knobs_of(rows: Sequence[Row]) -> list[Knob]:
    groups = sorted({group(row) for row in rows})
    knobs = [Knob(name, sigma) for name, sigma in PRIORS.items()]
    knobs += [Knob("matmul", GROUP, key) for key in groups] * (len(groups) > 1)
    if len({row.source for row in rows}) > 1:  # versions of different programs do not compare
        return knobs
    # A step from each release to the next: with these priors a random walk over releases.
    steps = RELEASE_EXPERTS if any(row.shape.experts for row in rows) else RELEASE
    for release in sorted({row.release for row in rows if row.release})[1:]:
        key = "from " + ".".join(map(str, release))
        knobs += [Knob(name, sigma, key) for name, sigma in steps.items()]
    return knobs


def columns(rows: Sequence[Row]) -> tuple[Any, Any, Any, Engine]:
    """Shapes, machines, plans and engines of the rows as arrays."""
    shape, machine, plan, engine = (
        stack([getattr(r, n) for r in rows]) for n in ("shape", "machine", "plan", "engine")
    )
    return shape, machine, plan, engine


def factors(knobs: Sequence[Knob], theta: Array, masks: Array) -> dict[str, Array]:
    """Factor per engine constant and row. ``theta``: ``[..., knob]``, ``masks``: ``[knob, row]``."""
    logs: dict[str, Array] = {}
    for i, knob in enumerate(knobs):
        logs[knob.field] = logs.get(knob.field, np.zeros(1)) + theta[..., i, None] * masks[i]
    return {name: np.exp(value) for name, value in logs.items()}


def masks_of(knobs: Sequence[Knob], rows: Sequence[Row]) -> Array:
    return np.array([[knob.applies(row) for row in rows] for knob in knobs], dtype=float)


def fit(
    rows: Sequence[Row], weights: Array | None = None, knobs: list[Knob] | None = None, steps: int = 12
) -> tuple[list[Knob], Array]:
    """``(knobs, theta)`` for the rows with a time; ``weights``: ``[fold, row]``, and then theta is ``[fold, knob]``."""
    knobs = knobs if knobs is not None else knobs_of(rows)
    masks = masks_of(knobs, rows)
    shape, machine, plan, engine = columns(rows)
    target = np.log(np.array([row.seconds for row in rows], dtype=float))
    # Rows of one shape err together: they count as the square root of their number.
    count = Counter(row.form for row in rows)
    weight = np.array([count[row.form] ** -0.5 for row in rows]) * (np.ones((1, 1)) if weights is None else weights)
    # One shape cannot tell the constants apart: the fewer there are, the closer to the presets all but one must stay.
    forms = [len({row.form for row, w in zip(rows, fold, strict=True) if w > 0}) for fold in weight]
    narrow = np.clip(np.array(forms) / FORMS, 1 / FORMS, 1.0)
    free = np.array([k.field == "matmul" or k.key.startswith("from") for k in knobs])
    sigma = np.array([k.sigma for k in knobs]) * np.where(free, 1.0, narrow[:, None])
    theta = np.zeros((len(weight), len(knobs)))

    def residual(theta: Array) -> Array:
        time = step_time(shape, machine, plan, scaled(engine, factors(knobs, theta, masks))).total
        return (np.log(time) - target) / NOISE

    def loss(r: Array, theta: Array) -> Array:
        size = np.abs(r)
        huber = np.where(size < HUBER, r * r, 2 * HUBER * size - HUBER**2)
        return (weight * huber).sum(1) + ((theta / sigma) ** 2).sum(1)

    r = residual(theta)
    best = loss(r, theta)
    damping = np.full(len(weight), 1.0)
    for _ in range(steps):
        robust = weight * np.minimum(1.0, HUBER / np.maximum(np.abs(r), 1e-9))
        moved = residual((theta[:, None] + STEP * np.eye(len(knobs))).reshape(-1, len(knobs)))  # all at once
        jacobian = (moved.reshape(len(theta), len(knobs), -1) - r[:, None]).swapaxes(1, 2) / STEP
        normal = np.einsum("fnp,fn,fnq->fpq", jacobian, robust, jacobian) + np.eye(len(knobs)) / sigma[:, None] ** 2
        slope = np.einsum("fnp,fn->fp", jacobian, robust * r) + theta / sigma**2
        for _ in range(4):
            scale = damping[:, None, None] * np.eye(len(knobs)) / sigma[:, None] ** 2
            move = np.linalg.solve(normal + scale, slope[..., None])[..., 0]
            trial = np.clip(theta - move, -BOUND * sigma, BOUND * sigma)
            tried = residual(trial)
            value = loss(tried, trial)
            better = value < best
            theta, r = np.where(better[:, None], trial, theta), np.where(better[:, None], tried, r)
            best = np.where(better, value, best)
            damping = np.where(better, damping / 4, damping * 4)
            if better.all():
                break
    return knobs, theta if weights is not None else theta[0]


def system(row: Row) -> str:
    """What is fitted together: a source, and in it models with experts apart from those without."""
    return row.source + (" (experts)" if row.shape.experts else "")


def held_out(rows: Sequence[Row], most: int = 24) -> Array:
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
    weights = np.array([(member != i).astype(float) for i in range(min(most, len(forms)))])
    knobs, theta = fit(rows, weights)
    found = np.zeros(len(rows))
    for i, fitted in enumerate(theta):
        seen = [row for row, m in zip(rows, member, strict=True) if m != i]
        rest = [row for row, m in zip(rows, member, strict=True) if m == i]
        correction = correct(seen, predict(seen, knobs, fitted))
        found[member == i] = predict(rest, knobs, fitted) * correction.factor(rest)
    return found


def predict(rows: Sequence[Row], knobs: Sequence[Knob], theta: Array) -> Array:
    """Seconds of each row by the roofline with fitted constants."""
    shape, machine, plan, engine = columns(rows)
    total = step_time(shape, machine, plan, scaled(engine, factors(knobs, theta, masks_of(knobs, rows)))).total
    return np.asarray(total, dtype=float)


# --- files


def calibrate(rows: Sequence[Row]) -> dict[str, Any]:
    """A calibration as plain data: factors per source and for all rows together, and GiB of constant per program."""
    timed = [row for row in rows if row.seconds]
    if not timed:
        raise WeftError("no row has a time to calibrate with")
    sources: dict[str, list[Row]] = {}
    for row in timed:
        sources.setdefault(system(row), []).append(row)
    # Sources count alike in the fit for all, whatever their number of rows.
    even = np.array([[min(1.0, 12 / len(sources[system(row)])) for row in timed]])
    return {
        "version": 1,
        "all": {"factors": _plain(*fit(timed, even))},
        "sources": {name: _source(members) for name, members in sources.items() if len(members) >= 3},
        "memory": constants(rows),
    }


def _source(rows: list[Row]) -> dict[str, Any]:
    knobs, theta = fit(rows)
    return {"factors": _plain(knobs, theta), "correction": correct(rows, predict(rows, knobs, theta)).plain()}


def _plain(knobs: Sequence[Knob], theta: Array) -> list[dict[str, Any]]:
    values = np.exp(theta.reshape(-1, len(knobs))[0])
    return [
        {"constant": k.field, "for": k.key, "factor": round(float(x), 4)} for k, x in zip(knobs, values, strict=True)
    ]


def constants(rows: Sequence[Row]) -> dict[str, float]:
    """GiB beyond the formulas, per program: the median over its rows, and never below zero."""
    known = [row for row in rows if row.gib]
    if not known:
        return {}
    missing = np.array([row.gib for row in known]) - formulas(known)
    programs = {row.framework for row in known}
    medians = {p: float(np.median(missing[[row.framework == p for row in known]])) for p in sorted(programs)}
    return {program: round(max(0.0, value), 2) for program, value in medians.items()}


def formulas(rows: Sequence[Row]) -> Array:
    """GiB of each row without the constant."""
    shape, _, plan, engine = columns(rows)
    memory = peak_memory(shape, plan, engine)
    return np.asarray(memory.total - memory.constant) / 2**30


def save(calibration: dict[str, Any], path: Path) -> None:
    try:
        path.write_text(json.dumps(calibration, indent=1) + "\n")
    except OSError as error:
        raise WeftError(f"cannot write {path}: {error.strerror}") from None


def load(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        if found["version"] != 1 or not isinstance(found["all"]["factors"], list):
            raise ValueError
        found["sources"], found["memory"]
        return found
    except OSError as error:
        raise WeftError(f"cannot read calibration {path}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UsageError(
            f"{path} is not a calibration; write one with weft plan calibrate ROWS.csv --out FILE"
        ) from None


def apply(calibration: dict[str, Any] | None, rows: Sequence[Row]) -> tuple[Array, Array]:
    """``(seconds, GiB)`` of each row: by the fit of its system, else by that of all rows, else by the presets."""
    calibration = calibration or {"all": {"factors": []}, "sources": {}, "memory": {}}
    time = np.zeros(len(rows))
    tables = {None: calibration["all"], **calibration["sources"]}
    chosen = [system(row) if system(row) in calibration["sources"] else None for row in rows]
    for name, table in tables.items():
        knobs = [Knob(item["constant"], 0.0, item["for"]) for item in table["factors"]]
        theta = np.log([float(item["factor"]) for item in table["factors"]])
        index = [i for i, source in enumerate(chosen) if source == name]
        part = [rows[i] for i in index]
        if part:
            time[index] = predict(part, knobs, theta)
        if part and table.get("correction"):
            time[index] *= Correction.of(table["correction"]).factor(part)
    return time, gib_of(rows, calibration["memory"])


def gib_of(rows: Sequence[Row], constants: dict[str, float]) -> Array:
    """GiB of each row. Of rows that do not state recomputation: with the least under which they fit, as their
    operators must have found it; without any if none suffices."""
    if not rows:
        return np.zeros(0)
    own = np.array([constants.get(row.framework, row.engine.constant) for row in rows])
    found = np.asarray(formulas(rows) + own, dtype=float)
    room = np.array([float(row.machine.memory) / 2**30 for row in rows])
    for kind in (1, 2):
        tight = [i for i, row in enumerate(rows) if "recompute=none" in row.assumed and found[i] > room[i]]
        if tight:
            again = [replace(rows[i], plan=replace(rows[i].plan, recompute=kind)) for i in tight]
            less = formulas(again) + own[tight]
            found[tight] = np.where((less <= room[tight]) | (kind == 1), np.minimum(less, found[tight]), found[tight])
    return found
