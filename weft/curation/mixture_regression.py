"""Regression of a loss on the mixture of the data, and the best of many simulated mixtures (RegMix, Liu et al. 2024).

Many tiny runs on random mixtures are cheap, and the order of their losses holds for larger models. The paper fits
gradient-boosted trees; here a Gaussian process is fitted, which needs no further package, ranks the paper's published
runs at least as well, and says how sure it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from weft.errors import UsageError, WeftError

#: Added to weights before the logarithm: below it a domain counts as absent.
OFFSETS = (3e-3, 1e-2, 3e-2)
#: Lengths over which the loss bends, shares of noise, and strengths of the linear part, of which the likeliest count.
LENGTHS, NOISES, LINEAR = (2.0, 4.0, 8.0, 16.0), (1e-3, 1e-2, 3e-2, 1e-1), (0.0, 0.3, 1.0)  # fmt: skip
#: Runs that a regression needs at least.
FEWEST = 8
#: Sums of the concentrations of the simulated Dirichlet distributions around the prior: small ones are extreme.
CONCENTRATIONS = (0.5, 50.0)


@dataclass(frozen=True)
class Kernel:
    """Hyperparameters of the Gaussian process that predicts losses of mixtures.

    Attributes:
        ``offset``: number added to weights before the logarithm.
        ``length``: length scale in standardised features: mixtures at a smaller distance have similar losses.
        ``noise``: variance of a single run's loss, as a share of the variance of all runs' losses.
        ``linear``: variance of the linear part, in the same unit.
    """

    offset: float
    length: float
    noise: float
    linear: float


@dataclass(frozen=True)
class PredictedLosses:
    """Losses that a regression predicts for mixtures.

    ``means``: expected losses ``[mixtures]``. ``deviations``: standard deviations of the expectations ``[mixtures]``.
    """

    means: np.ndarray
    deviations: np.ndarray


@dataclass(frozen=True)
class MixtureRegression:
    """Gaussian process that predicts the loss of a run from its mixture of domains.

    Its inputs (features) are the standardised logarithms of the shares of the domains.

    Attributes:
        ``weights``: mixtures of the runs, ``[runs, domains]``.
        ``losses``: losses of the runs, ``[runs]``.
        ``kernel``: the hyperparameters.
        ``center``: mean of the logarithms over the runs, ``[domains]``.
        ``scale``: standard deviation of the logarithms over the runs, ``[domains]``.
    """

    weights: np.ndarray
    losses: np.ndarray
    kernel: Kernel
    center: np.ndarray
    scale: np.ndarray

    def features(self, weights: np.ndarray) -> np.ndarray:
        """Return the inputs of the regression for the mixtures ``weights``: standardised logarithms, ``[mixtures,
        domains]``.
        """
        logarithms = np.log(weights + self.kernel.offset)
        features: np.ndarray = (logarithms - self.center) / self.scale
        return features

    def covariance(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the covariance of the loss at each mixture of ``a`` with that at each of ``b``, ``[len(a), len(b)]``.

        ``a``, ``b``: features of mixtures, as :meth:`features` returns them.
        """
        squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
        bend = np.exp(-np.maximum(squares, 0) / (2 * self.kernel.length**2))
        both: np.ndarray = bend + self.kernel.linear * (a @ b.T) / a.shape[1]
        return both

    def factor(self) -> np.ndarray:
        """Return the lower Cholesky factor of the covariance of the runs' losses, noise included, ``[runs, runs]``."""
        known = self.features(self.weights)
        noise = self.kernel.noise * np.eye(len(known))
        return np.linalg.cholesky(self.covariance(known, known) + noise)

    def predict(self, weights: np.ndarray) -> PredictedLosses:
        """Return the predicted losses of mixtures, with their standard deviations.

        ``weights``: ``[mixtures, domains]``; each row adds up to 1.
        """
        asked = self.features(np.asarray(weights, np.float64))
        known = self.features(self.weights)
        factor = self.factor()
        mean, spread = self.losses.mean(), self.losses.std() or 1.0
        target = (self.losses - mean) / spread
        solved = np.linalg.solve(factor.T, np.linalg.solve(factor, target))
        cross = self.covariance(asked, known)  # [mixtures, runs]
        explained = (np.linalg.solve(factor, cross.T) ** 2).sum(0)
        prior = 1 + self.kernel.linear * (asked**2).sum(1) / asked.shape[1]
        return PredictedLosses(
            mean + spread * cross @ solved,
            spread * np.sqrt(np.maximum(prior - explained, 0)),
        )

    def held_back(self) -> np.ndarray:
        """Return the leave-one-out predictions: the loss of each run as predicted from all others, ``[runs]``."""
        factor = self.factor()
        inverse = np.linalg.inv(factor.T) @ np.linalg.inv(factor)
        target = self.losses - self.losses.mean()
        left_out: np.ndarray = self.losses - (inverse @ target) / np.diag(inverse)
        return left_out

    def likelihood(self) -> float:
        """Return the log-likelihood of the runs' losses under the hyperparameters, up to a constant."""
        factor = self.factor()
        spread = self.losses.std() or 1.0
        white = np.linalg.solve(factor, (self.losses - self.losses.mean()) / spread)
        return float(-0.5 * white @ white - np.log(np.diag(factor)).sum())


def fit_mixture_losses(weights: np.ndarray, losses: np.ndarray) -> MixtureRegression:
    """Return the loss as a fitted function of the mixture, with the hyperparameters of the highest likelihood.

    ``weights``: ``[runs, domains]``, where each row adds up to 1. ``losses``: ``[runs]``. Raises :class:`UsageError`
    for fewer than :data:`FEWEST` runs, and :class:`WeftError` if all have one loss.
    """
    weights, losses = np.asarray(weights, np.float64), np.asarray(losses, np.float64)
    if len(weights) < FEWEST:
        raise UsageError(
            f"{len(weights)} runs on mixtures are too few to learn from; {FEWEST} are the least, and ten for each "
            "domain are good"
        )
    if not losses.std() > 0:
        raise WeftError(
            f"all {len(losses)} runs have the loss {losses[0]:g}; the target does not depend on the mixture"
        )
    best, likeliest = None, -np.inf
    for values in product(OFFSETS, LENGTHS, NOISES, LINEAR):
        kernel = Kernel(*values)
        logarithms = np.log(weights + kernel.offset)
        scale = logarithms.std(0)
        regression = MixtureRegression(
            weights, losses, kernel, logarithms.mean(0), np.where(scale > 0, scale, 1)
        )
        if (likelihood := regression.likelihood()) > likeliest:
            best, likeliest = regression, likelihood
    assert best is not None
    return best


def simulated_mixtures(prior: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Return ``count`` random mixtures around ``prior``, ``[count, domains]``, from Dirichlet distributions.

    The distributions differ in their concentration. ``prior``: a mixture ``[domains]``, such as the mean of the runs.
    Domains with a share of 0 in it get 0. ``seed``: seed of the random numbers.
    """
    random = np.random.default_rng(seed)
    low, high = np.log(CONCENTRATIONS)
    strengths = np.exp(random.uniform(low, high, (count, 1)))
    drawn = random.standard_gamma(strengths * prior[None])
    totals = drawn.sum(1, keepdims=True)
    mixtures: np.ndarray = np.where(
        totals > 0, drawn / np.where(totals > 0, totals, 1), prior
    )
    return mixtures


@dataclass(frozen=True)
class MixtureChoice:
    """The mixture that a regression proposes.

    Attributes:
        ``weights``: share of each domain, by name.
        ``loss``: expected loss of this mixture.
        ``deviation``: standard deviation of the expected loss.
        ``prior_loss``: the loss expected of the mean of the runs' mixtures.
        ``best_run``: the lowest loss of a run.
        ``rank_correlation``: Spearman's correlation between the losses of the runs and their predictions from all other
            runs.
    """

    weights: Mapping[str, float]
    loss: float
    deviation: float
    prior_loss: float
    best_run: float
    rank_correlation: float


def best_mixture(
    domains: Sequence[str],
    weights: np.ndarray,
    losses: np.ndarray,
    draws: int = 100_000,
    keep: int = 100,
    seed: int = 0,
) -> MixtureChoice:
    """Fit the losses of runs on mixtures, and return the mean of the best simulated mixtures, as RegMix does.

    Arguments:
        ``domains``: names of the domains.
        ``weights``: mixtures of the runs, ``[runs, domains]``. Mixtures are simulated around their mean.
        ``losses``: the losses of the runs, ``[runs]``.
        ``draws``: number of simulated mixtures.
        ``keep``: number of best mixtures whose mean is returned.
        ``seed``: seed of the simulated mixtures.
    """
    regression = fit_mixture_losses(weights, losses)
    prior = regression.weights.mean(0)
    mixtures = simulated_mixtures(prior / prior.sum(), draws, seed)
    means = np.concatenate(
        [
            regression.predict(part).means
            for part in np.array_split(mixtures, max(1, draws // 5000))
        ]
    )
    chosen = mixtures[np.argsort(means, kind="stable")[:keep]].mean(0)
    expected = regression.predict(np.stack([chosen, prior / prior.sum()]))
    return MixtureChoice(
        {name: float(share) for name, share in zip(domains, chosen, strict=True)},
        float(expected.means[0]),
        float(expected.deviations[0]),
        float(expected.means[1]),
        float(regression.losses.min()),
        rank_correlation(regression.held_back(), regression.losses),
    )


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's rank correlation of ``a`` and ``b``; equal values share the mean of their ranks."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: np.ndarray = (ends - (counts - 1) / 2)[inverse]
    return ranks
