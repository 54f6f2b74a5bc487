"""Fit of the repetition-aware scaling law to the losses of small runs, with its uncertainty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from weft.curation.repetition_law import (
    PoolUtility,
    RepetitionLaw,
    epoch_ends,
    halvings,
    log_growth,
)
from weft.errors import UsageError, WeftError

#: Bounds of exponents and half-lives. At the upper half-life nothing fades within any run.
EXPONENTS, HALF_LIVES = (-3.0, -1e-4), (0.05, 1e3)
#: Where the search begins: shares of the lowest loss that are irreducible, and half-lives in epochs.
FLOORS, STARTS = (0.0, 0.5, 0.8, 0.95), (1.0, 4.0, 20.0)
#: Share of laws below and above the interval that is reported.
TAIL = 0.05


@dataclass(frozen=True)
class PoolRun:
    """A small training run on a single pool of data.

    Attributes:
        ``pool``: name of the pool.
        ``samples``: number of samples or tokens that were trained on, repeated ones counted again.
        ``epochs``: how often the pool was read.
        ``loss``: loss on held-out data at the end of the run.
    """

    pool: str
    samples: float
    epochs: float
    loss: float

    @property
    def size(self) -> float:
        """Number of different samples in the pool of this run: the samples trained on, divided by the epochs."""
        return self.samples / self.epochs


@dataclass(frozen=True)
class FittedLaw:
    """A law of the loss on repeated data, with its uncertainty.

    Attributes:
        ``law``: the law that fits best.
        ``resampled``: laws that fit the bootstrap's resampled losses.
        ``noise``: standard deviation of a run's relative error around the law.
    """

    law: RepetitionLaw
    resampled: tuple[RepetitionLaw, ...]
    noise: float

    def interval(self, of: Callable[[RepetitionLaw], float]) -> tuple[float, float]:
        """Return the ends of the 90 % interval of a number that ``of`` computes from a law, over the laws that were
        fitted to bootstrap samples.
        """
        values = [of(law) for law in self.resampled]
        low, high = np.quantile(values, [TAIL, 1 - TAIL])
        return float(low), float(high)

    def loss_interval(
        self, chosen: Sequence[str], samples: float
    ) -> tuple[float, float]:
        """Return the 90 % interval of a new run's loss, which covers the uncertainty of the law and the noise of a
        single run.

        ``chosen``: names of the pools. ``samples``: number of samples of the run.
        """
        noise = np.random.default_rng(0).normal(0.0, self.noise, len(self.resampled))
        values = [
            law.loss(chosen, samples) * (1 + error)
            for law, error in zip(self.resampled, noise, strict=True)
        ]
        low, high = np.quantile(values, [TAIL, 1 - TAIL])
        return float(low), float(high)

    def with_sizes(self, sizes: dict[str, float]) -> FittedLaw:
        """Return the same law for pools of other sizes. ``sizes``: number of samples by pool.

        Raises :class:`UsageError` for a pool that the law does not know.
        """
        unknown = sorted(sizes.keys() - self.law.pools.keys())
        if unknown:
            raise UsageError(
                f"there is no run of pool {unknown[0]!r}; the runs are of {', '.join(sorted(self.law.pools))}"
            )
        return replace(
            self,
            law=_resized(self.law, sizes),
            resampled=tuple(_resized(law, sizes) for law in self.resampled),
        )


def _resized(law: RepetitionLaw, sizes: dict[str, float]) -> RepetitionLaw:
    pools = {
        name: replace(pool, size=sizes.get(name, pool.size))
        for name, pool in law.pools.items()
    }
    return replace(law, pools=pools)


def fit_repetition_law(
    runs: Sequence[PoolRun],
    unit: float | None = None,
    resamples: int = 100,
    seed: int = 0,
) -> FittedLaw:
    """Fit the law of the loss on repeated data by least squares to runs of single pools, and return it. Scale and floor
    are common to all pools.

    The relative errors of the losses are minimised over all parameters. Starting points come from several floors and
    half-lives: for each of these, ``log(loss - floor)`` is linear in the other parameters. The random search over a
    grid of Goyal et al. 2024 is not needed. Errors of ``log(loss - floor)`` alone cannot determine the floor, because
    all of them vanish when it goes to minus infinity.

    Arguments:
        ``unit``: number of samples after which runs of all pools have the same loss. None: it is fitted, too.
        ``resamples``: number of bootstrap resamples of the residuals, from which intervals follow.
        ``seed``: seed of the resampling.

    Raises :class:`UsageError` if the runs cannot determine the parameters (:func:`check_runs`).
    """
    check_runs(runs, unit)
    fit = _Fit.of(runs, unit)
    start = fit.start()
    best = fit.polished(start)
    predicted = fit.predicted(best)
    residuals = np.log(fit.losses) - np.log(predicted)
    freedom = max(1, len(runs) - len(best))
    noise = float(np.sqrt(residuals @ residuals / freedom))
    # residuals of a fit are smaller than errors, by the parameters that have adapted to them
    spread = (residuals - residuals.mean()) * np.sqrt(len(runs) / freedom)
    random, resampled = np.random.default_rng(seed), []
    for _ in range(resamples):
        drawn = predicted * np.exp(random.choice(spread, len(runs)))
        again = replace(fit, losses=drawn)
        resampled.append(again.law(again.polished(best)))
    return FittedLaw(fit.law(best), tuple(resampled), noise)


def check_runs(runs: Sequence[PoolRun], unit: float | None = None) -> None:
    """Raise an error if ``runs`` are not enough to fit the law, or have losses that it cannot describe.

    The law needs runs of at least two pools. For each pool it needs three runs of different lengths, one of them with
    more than one epoch. In all it needs as many runs as it has parameters. Its loss falls with every epoch. ``unit``:
    as in :func:`fit_repetition_law`. Raises :class:`UsageError` for too few runs, and :class:`WeftError` for unfit
    losses.
    """
    names = sorted({run.pool for run in runs})
    for run in runs:
        numbers = (run.samples, run.epochs, run.loss)
        if not all(np.isfinite(number) and number > 0 for number in numbers):
            raise UsageError(
                f"a run of pool {run.pool!r} has samples {run.samples:g}, epochs {run.epochs:g} and loss {run.loss:g}; "
                "all have to be above 0"
            )
    if len(names) < 2:
        raise UsageError(
            f"all {len(runs)} runs are of one pool, {names[0]!r}, so that there is no choice; add runs of another one"
            if names
            else "there is no run in the table; it needs some of each of two pools"
        )
    for name in names:
        own = [run for run in runs if run.pool == name]
        if len({(run.samples, run.epochs) for run in own}) < 3:
            raise UsageError(
                f"pool {name!r} has {len(own)} runs; three of different lengths are needed, such as 1, 2 and 4 epochs"
            )
        if max(run.epochs for run in own) <= 1:
            raise UsageError(
                f"no run of pool {name!r} has more than one epoch, so that nothing is known of repetition; add one"
            )
    parameters = 2 * len(names) + (3 if unit is None else 2)
    if len(runs) < parameters:
        raise UsageError(
            f"{len(runs)} runs cannot decide the {parameters} parameters of a law for {len(names)} pools; add some"
        )
    for name in names:
        _check_falls(name, [run for run in runs if run.pool == name])


def _check_falls(name: str, runs: list[PoolRun]) -> None:
    """Raise :class:`WeftError` if the loss rises with the length of the runs on the same number of samples."""
    sizes = {round(run.size, 6) for run in runs}
    for size in sizes:
        same = sorted(
            (run for run in runs if round(run.size, 6) == size), key=lambda r: r.samples
        )
        shortest, longest = same[0], same[-1]
        if longest.samples > shortest.samples and longest.loss >= shortest.loss:
            raise WeftError(
                f"the loss of pool {name!r} rises from {shortest.loss:.4g} at {shortest.epochs:g} epochs to "
                f"{longest.loss:.4g} at {longest.epochs:g}; the model overfits, so take shorter runs or a larger pool"
            )


@dataclass(frozen=True)
class _Fit:
    """The runs as arrays, and the layout of the vector of parameters.

    The vector holds the logarithm of the scale, the floor, the logarithm of the unit if that is fitted, the exponent of
    each pool, and the logarithm of each half-life.
    """

    names: tuple[str, ...]
    pool: np.ndarray  # [runs]
    growth_in: np.ndarray  # [runs, epochs]: growth of the logarithm of the samples seen, 0 after a run's end
    shortest: float  # fewest samples of a run
    sizes: dict[str, float]
    losses: np.ndarray  # [runs]
    unit: float | None

    @staticmethod
    def of(runs: Sequence[PoolRun], unit: float | None) -> _Fit:
        names = tuple(sorted({run.pool for run in runs}))
        sizes = {
            name: max(run.size for run in runs if run.pool == name) for name in names
        }
        grown = [log_growth(epoch_ends(run.samples, run.size)) for run in runs]
        growth_in = np.zeros((len(runs), max(map(len, grown))))
        for row, values in zip(growth_in, grown, strict=True):
            row[: len(values)] = values
        return _Fit(
            names,
            np.array([names.index(run.pool) for run in runs]),
            growth_in,
            min(run.samples for run in runs),
            sizes,
            np.array([run.loss for run in runs]),
            unit,
        )

    @property
    def first(self) -> int:
        """Index of the first exponent in the vector of parameters."""
        return 2 if self.unit is not None else 3

    def growth(self, half_lives: np.ndarray, log_unit: float) -> np.ndarray:
        """Return by what each run's exponent is multiplied, ``[runs]``."""
        epochs = np.arange(self.growth_in.shape[1])
        factors = halvings(epochs, half_lives[self.pool, None])  # [runs, epochs]
        growth: np.ndarray = (factors * self.growth_in).sum(1) - log_unit
        return growth

    def predicted(self, parameters: np.ndarray) -> np.ndarray:
        """Return the loss of each run by the law with these parameters, ``[runs]``."""
        count = len(self.names)
        exponents = parameters[self.first : self.first + count]
        half_lives = np.exp(parameters[self.first + count :])
        log_unit = parameters[2] if self.unit is None else np.log(self.unit)
        logarithm = parameters[0] + exponents[self.pool] * self.growth(
            half_lives, log_unit
        )
        # trial points of the search may be far away
        losses: np.ndarray = np.exp(np.clip(logarithm, -50, 50)) + parameters[1]
        return losses

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and the upper bounds of the parameters."""
        count = len(self.names)
        free = [] if self.unit is not None else [(-5.0, np.log(self.shortest))]
        pairs = [
            (-20.0, 20.0), (0.0, 0.999 * float(self.losses.min())), *free,
            *[EXPONENTS] * count, *[(np.log(HALF_LIVES[0]), np.log(HALF_LIVES[1]))] * count,
        ]  # fmt: skip
        low, high = np.array(pairs).T
        return low, high

    def start(self) -> np.ndarray:
        """Return the best of the starting points, whose linear parts are solved for."""
        low, high = self.bounds()
        units = [0.0, 0.5, 0.9] if self.unit is None else [0.0]
        best, lowest = low, np.inf
        for share, half_life, unit in product(FLOORS, STARTS, units):
            floor = share * float(self.losses.min())
            log_unit = (
                np.log(self.unit) if self.unit is not None else unit * float(high[2])
            )
            log_half_lives = np.full(len(self.names), np.log(half_life))
            growth = self.growth(np.exp(log_half_lives), log_unit)
            # [runs, 1 + pools]: logarithm of the scale, and the exponents
            columns = np.zeros((len(self.losses), 1 + len(self.names)))
            columns[:, 0] = 1
            columns[np.arange(len(self.losses)), 1 + self.pool] = growth
            weights = (self.losses - floor) / self.losses
            solved = np.linalg.lstsq(
                columns * weights[:, None],
                np.log(self.losses - floor) * weights,
                rcond=None,
            )[0]
            free = [] if self.unit is not None else [log_unit]
            point = np.clip(
                np.concatenate([[solved[0], floor], free, solved[1:], log_half_lives]),
                low + 1e-6,
                high - 1e-6,
            )
            residuals = self.predicted(point) / self.losses - 1
            if residuals @ residuals < lowest:
                best, lowest = point, residuals @ residuals
        return best

    def polished(self, start: np.ndarray) -> np.ndarray:
        """Return the parameters with the smallest relative errors, searched from ``start``."""
        try:
            from scipy.optimize import least_squares
        except ImportError:
            raise UsageError(
                "the fit of a scaling law needs scipy; pip install scipy"
            ) from None
        low, high = self.bounds()
        solution = least_squares(
            lambda parameters: self.predicted(parameters) / self.losses - 1,
            np.clip(start, low + 1e-9, high - 1e-9),
            bounds=(low, high),
            x_scale="jac",
            max_nfev=200,
        )
        parameters: np.ndarray = solution.x
        return parameters

    def law(self, parameters: np.ndarray) -> RepetitionLaw:
        """Return the law with these parameters."""
        count = len(self.names)
        pools = {
            name: PoolUtility(
                float(parameters[self.first + i]),
                float(np.exp(parameters[self.first + count + i])),
                self.sizes[name],
            )
            for i, name in enumerate(self.names)
        }
        unit = self.unit if self.unit is not None else float(np.exp(parameters[2]))
        return RepetitionLaw(
            float(np.exp(parameters[0])), float(parameters[1]), unit, pools
        )
