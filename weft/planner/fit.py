"""Fits the engine's constants to measured runs, within bounds and drawn towards the presets (ridge regression).

The unknowns are logarithms of factors on :class:`~weft.planner.engine_constants.EngineConstants`, each with a prior
standard deviation that says how far the constant plausibly lies from its preset. So few rows change constants little,
and many rows change the constants that they determine. The method is damped Gauss-Newton (Levenberg 1944, Marquardt
1963) on log ratios with Huber weights, over several folds at once: a fold is a set of row weights.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost import Plan, step_time
from weft.planner.engine_constants import EngineConstants, scaled, stack
from weft.planner.machine import Machine
from weft.planner.memory import peak_memory
from weft.shapes.shape import Shape

Array = NDArray[np.float64]

#: Constants that are fitted and their prior standard deviations (of the logarithm).
PRIORS: dict[str, float] = {
    "matmul": 0.3, "attention": 0.5, "inner": 0.5, "kernels": 0.7, "step": 1.0, "network": 0.5, "exposed_dp": 0.7,
    "dispatch": 0.5,
}  # fmt: skip
NOISE, HUBER, BOUND, FORMS, STEP = 0.06, 1.5, 3.0, 6, 1e-3


@dataclass(frozen=True)
class Measurement:
    """One measured run of a training program, from a publication or from the user.

    Attributes:
        ``id``, ``source``: name of the run, and where it comes from.
        ``family``: class of programs with common constants, a key of :data:`ENGINES`.
        ``framework``: the program.
        ``device``: name of the device preset; ``bits``: width of the operands of products.
        ``shape``, ``machine``, ``plan``, ``engine``: the model, the cluster, the layout, and the constants of the
            program's class.
        ``seconds``: seconds of a step, None if not measured.
        ``gib``: peak GiB on a device, None if not measured.
        ``ran``: False for runs that ended out of memory.
        ``assumed``: settings that the source leaves out and that are assumed.
        ``release``: version of the program as a tuple of numbers, such as ``(2, 1)``; empty if it is not known.
    """

    id: str
    source: str
    family: str
    framework: str
    device: str
    bits: int
    shape: Shape
    machine: Machine
    plan: Plan
    engine: EngineConstants
    seconds: float | None
    gib: float | None
    ran: bool = True
    assumed: tuple[str, ...] = ()
    release: tuple[int, ...] = ()

    @property
    def form(self) -> tuple[float, ...]:
        """Sizes that tell whether two runs have the same shape: layers, widths, experts and sequence length."""
        s = self.shape
        return (s.layers, s.embed, s.heads, s.ffn, s.experts, self.plan.seq)


@dataclass(frozen=True)
class Knob:
    """An engine constant that is fitted: its preset value is multiplied by a factor, which is found from measured runs.

    ``field``: name of the constant in :class:`EngineConstants`. ``sigma``: standard deviation of the factor's logarithm
    that is assumed before the fit. ``key``: text that names the measured runs to which the factor applies; empty: all
    runs. :func:`fit` does not read it: its caller computes the argument ``masks`` from it.
    """

    field: str
    sigma: float
    key: str = ""


#: What is fitted if nothing else is asked for.
KNOBS = tuple(Knob(name, sigma) for name, sigma in PRIORS.items())


class MeasurementColumns(NamedTuple):
    """Descriptions of measured runs, as objects whose fields are arrays with one entry per run.

    ``shape``: the models; ``machine``: the clusters; ``plan``: the layouts; ``engine``: the programs' constants.
    """

    shape: Any
    machine: Any
    plan: Any
    engine: EngineConstants


def measurement_columns(rows: Sequence[Measurement]) -> MeasurementColumns:
    """Return the shapes, machines, plans and engines of the measured runs ``rows``, with their fields as arrays."""
    names = ("shape", "machine", "plan", "engine")
    return MeasurementColumns(*(stack([getattr(r, n) for r in rows]) for n in names))


def times_of(
    rows: Sequence[Measurement], knobs: Sequence[Knob], masks: Array | None
) -> Callable[[Array], Array]:
    """Return a function that predicts the seconds per step of each run in ``rows``, given factors on constants.

    The function takes the logarithms of the factors, ``[..., knob]``, and returns seconds, ``[..., row]``. ``knobs``:
    the engine constants that are multiplied, each by its factor. ``masks``: 1 where a factor applies to a run, else 0,
    ``[knob, row]``; None: every factor applies to all runs.
    """
    shape, machine, plan, engine = measurement_columns(rows)
    where = np.ones((len(knobs), len(rows))) if masks is None else masks
    return lambda theta: (
        step_time(
            shape, machine, plan, scaled(engine, factors(knobs, theta, where))
        ).total
    )


def factors(knobs: Sequence[Knob], theta: Array, masks: Array) -> dict[str, Array]:
    """Return the factor on each engine constant in each run, ``[..., row]``, by name of the constant.

    ``knobs``: the constants that are fitted. ``theta``: logarithms of their factors, ``[..., knob]``. ``masks``: 1
    where a factor applies to a run, else 0, ``[knob, row]``. Where no factor applies, the result is 1.
    """
    logs: dict[str, Array] = {}
    for i, knob in enumerate(knobs):
        logs[knob.field] = (
            logs.get(knob.field, np.zeros(1)) + theta[..., i, None] * masks[i]
        )
    return {name: np.exp(value) for name, value in logs.items()}


def fit(
    rows: Sequence[Measurement],
    weights: Array | None = None,
    knobs: Sequence[Knob] = KNOBS,
    masks: Array | None = None,
    steps: int = 12,
) -> Array:
    """Fit the factors on engine constants to measured step times, and return their logarithms, ``[knob]``.

    ``rows``: the measured runs. ``knobs``: the constants, each of which is multiplied by one factor. ``masks``: 1 where
    a factor applies to a run, else 0, ``[knob, row]``; None: every factor applies to all runs. ``steps``: iterations of
    Gauss-Newton. ``weights``: weights of the runs for a cross-validation, ``[fold, row]``. Each fold is then fitted by
    itself, and the result is ``[fold, knob]``.
    """
    times = times_of(rows, knobs, masks)
    target = np.log(np.array([row.seconds for row in rows], dtype=float))
    # Rows of one shape err together: they count as the square root of their number.
    count = Counter(row.form for row in rows)
    weight = np.array([count[row.form] ** -0.5 for row in rows]) * (
        np.ones((1, 1)) if weights is None else weights
    )
    # One shape cannot tell the constants apart: the fewer there are, the closer to the presets all but one must stay.
    forms = [
        len({row.form for row, w in zip(rows, fold, strict=True) if w > 0})
        for fold in weight
    ]
    narrow = np.clip(np.array(forms) / FORMS, 1 / FORMS, 1.0)
    free = np.array([k.field == "matmul" or k.key.startswith("from") for k in knobs])
    sigma = np.array([k.sigma for k in knobs]) * np.where(free, 1.0, narrow[:, None])
    theta = np.zeros((len(weight), len(knobs)))

    def residual(theta: Array) -> Array:
        return (np.log(times(theta)) - target) / NOISE

    def loss(r: Array, theta: Array) -> Array:
        size = np.abs(r)
        huber = np.where(size < HUBER, r * r, 2 * HUBER * size - HUBER**2)
        return (weight * huber).sum(1) + ((theta / sigma) ** 2).sum(1)

    r = residual(theta)
    best = loss(r, theta)
    damping = np.full(len(weight), 1.0)
    for _ in range(steps):
        robust = weight * np.minimum(1.0, HUBER / np.maximum(np.abs(r), 1e-9))
        # all at once
        moved = residual(
            (theta[:, None] + STEP * np.eye(len(knobs))).reshape(-1, len(knobs))
        )
        jacobian = (moved.reshape(len(theta), len(knobs), -1) - r[:, None]).swapaxes(
            1, 2
        ) / STEP
        normal = (
            np.einsum("fnp,fn,fnq->fpq", jacobian, robust, jacobian)
            + np.eye(len(knobs)) / sigma[:, None] ** 2
        )
        slope = np.einsum("fnp,fn->fp", jacobian, robust * r) + theta / sigma**2
        for _ in range(4):
            scale = damping[:, None, None] * np.eye(len(knobs)) / sigma[:, None] ** 2
            move = np.linalg.solve(normal + scale, slope[..., None])[..., 0]
            trial = np.clip(theta - move, -BOUND * sigma, BOUND * sigma)
            tried = residual(trial)
            value = loss(tried, trial)
            better = value < best
            theta, r = (
                np.where(better[:, None], trial, theta),
                np.where(better[:, None], tried, r),
            )
            best = np.where(better, value, best)
            damping = np.where(better, damping / 4, damping * 4)
            if better.all():
                break
    return theta if weights is not None else theta[0]


def predict(
    rows: Sequence[Measurement],
    theta: Array,
    knobs: Sequence[Knob] = KNOBS,
    masks: Array | None = None,
) -> Array:
    """Return the predicted seconds per step of each measured run in ``rows``, ``[..., row]``, with fitted engine
    constants.

    ``knobs``: the constants, each of which is multiplied by one factor. ``theta``: logarithms of these factors, ``[...,
    knob]``. ``masks``: 1 where a factor applies to a run, else 0, ``[knob, row]``; None: every factor applies to all
    runs.
    """
    return times_of(rows, knobs, masks)(theta)


def constants(rows: Sequence[Measurement]) -> dict[str, float]:
    """Return the GiB of memory per device that no formula explains, by the training program's name (``framework`` of a
    run).

    For each run in ``rows`` the measured memory minus the memory by the formulas is computed. The median over a
    program's runs counts; a negative median counts as 0.
    """
    known = [row for row in rows if row.gib]
    if not known:
        return {}
    missing = np.array([row.gib for row in known]) - formulas(known)
    programs = {row.framework for row in known}
    medians = {
        p: float(np.median(missing[[row.framework == p for row in known]]))
        for p in sorted(programs)
    }
    return {program: round(max(0.0, value), 2) for program, value in medians.items()}


def formulas(rows: Sequence[Measurement]) -> Array:
    """Return the GiB of memory of each measured run in ``rows`` by the formulas, ``[row]``.

    The constant that no formula explains is left out.
    """
    shape, _, plan, engine = measurement_columns(rows)
    memory = peak_memory(shape, plan, engine)
    return np.asarray(memory.total - memory.constant) / 2**30
