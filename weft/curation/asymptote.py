"""Asymptote of a loss: where a recipe leads when the model, or its ensemble, grows without end.

With a fixed amount of data and settings that are tuned for each size, the loss falls as ``scale * size ** -exponent +
floor`` (Kim et al. 2025, "Pre-training under infinite compute"). The floor is what recipes are compared by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.errors import UsageError, WeftError

#: Sizes that a fit needs, so that its interval means something.
FEWEST_SIZES = 4
#: Where the search for the exponent begins.
STARTS = (0.1, 0.3, 1.0, 2.0)
#: Bounds of the exponent. A law with a smaller one is a straight line in the logarithm, which has no floor.
EXPONENTS = (0.02, 4.0)


@dataclass(frozen=True)
class Asymptote:
    """Scaling law of the loss, ``scale * size ** -exponent + floor``, with the 90 % interval of its floor.

    Attributes:
        ``scale``: reducible loss at size 1.
        ``exponent``: exponent of the power law, above 0; the larger, the faster the reducible loss falls.
        ``floor``: loss that is approached at infinite size.
        ``low``: lower end of the floor's interval.
        ``high``: upper end of the floor's interval.
        ``noise``: standard deviation of the losses' relative errors around the law.
    """

    scale: float
    exponent: float
    floor: float
    low: float
    high: float
    noise: float

    def loss(self, size: float) -> float:
        """Return the loss that the law predicts for a model of ``size`` (see :func:`fit_asymptote`)."""
        return float(self.scale * size**-self.exponent + self.floor)


def fit_asymptote(
    sizes: Sequence[float], losses: Sequence[float], resamples: int = 200, seed: int = 0
) -> Asymptote:
    """Fit an :class:`Asymptote` by least squares of relative errors. Its interval comes from refits to resampled
    residuals.

    ``sizes``: numbers of parameters, or of an ensemble's members. ``losses``: the loss at each size, with the settings
    that are best there. ``resamples``: number of refits. ``seed``: seed of the resampling. Raises :class:`UsageError`
    for fewer than :data:`FEWEST_SIZES` sizes, and :class:`WeftError` for losses that do not fall.
    """
    x, y = np.asarray(sizes, np.float64), np.asarray(losses, np.float64)
    if len(set(sizes)) < FEWEST_SIZES:
        raise UsageError(
            f"{len(set(sizes))} sizes do not show an asymptote; {FEWEST_SIZES} are the least"
        )
    if not ((x > 0).all() and (y > 0).all() and np.isfinite(y).all()):
        raise UsageError("sizes and losses have to be above 0")
    if y[x.argmax()] >= y[x.argmin()]:
        raise WeftError(
            f"the loss does not fall from size {x.min():g} ({y[x.argmin()]:.4g}) to {x.max():g} "
            f"({y[x.argmax()]:.4g}); tune decay, rate and epochs for the larger ones"
        )
    unit = float(np.exp(np.log(x).mean()))
    best = _solve(x / unit, y)
    expected = _losses(best, x / unit)
    residuals = np.log(y) - np.log(expected)
    freedom = max(1, len(x) - 3)
    noise = float(np.sqrt(residuals @ residuals / freedom))
    spread = (residuals - residuals.mean()) * np.sqrt(len(x) / freedom)
    random = np.random.default_rng(seed)
    floors = [
        _solve(x / unit, expected * np.exp(random.choice(spread, len(x))), best)[2]
        for _ in range(resamples)
    ]
    low, high = np.quantile(floors, [0.05, 0.95]) if floors else (best[2], best[2])
    exponent = float(best[1])
    scale = float(np.exp(best[0]) * unit**exponent)
    return Asymptote(scale, exponent, float(best[2]), float(low), float(high), noise)


def _losses(parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
    losses: np.ndarray = np.exp(parameters[0]) * x ** -parameters[1] + parameters[2]
    return losses


def _solve(x: np.ndarray, y: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """Return logarithm of the scale, exponent and floor with the smallest relative errors."""
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise UsageError(
            "the fit of a scaling law needs scipy; pip install scipy"
        ) from None
    bounds = np.array([(-30.0, 30.0), EXPONENTS, (0.0, 0.9999 * float(y.min()))]).T
    starts = [start] if start is not None else []
    for exponent in STARTS if start is None else ():
        columns = np.stack([x**-exponent, np.ones_like(x)], axis=1)
        scale, floor = np.linalg.lstsq(
            columns / y[:, None], np.ones_like(y), rcond=None
        )[0]
        starts.append(np.array([np.log(max(scale, 1e-6)), exponent, floor]))
    best, lowest = starts[0], np.inf
    for point in starts:
        solution = least_squares(
            lambda parameters: _losses(parameters, x) / y - 1,
            np.clip(point, bounds[0] + 1e-9, bounds[1] - 1e-9),
            bounds=(bounds[0], bounds[1]),
            x_scale="jac",
        )
        if solution.cost < lowest:
            best, lowest = solution.x, solution.cost
    return best
