"""How well scores rank positive before negative examples, and how sure that is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class RankingQuality(NamedTuple):
    """Area under the ROC curve with its 95 % interval.

    ``area``: probability that a positive example has a higher score than a negative one. ``low``, ``high``: ends of the
    interval.
    """

    area: float
    low: float
    high: float


def area_under_curve(
    scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
) -> float:
    """Return the area under the ROC curve; equal scores count half. NaN without examples of both classes.

    ``scores``: float64 ``[examples]``; ``labels``: whether each example is positive, bool ``[examples]``; ``weights``:
    how often each example counts, ``[examples]``; None: once.
    """
    weights = np.ones(len(scores)) if weights is None else weights
    _, ties = np.unique(scores, return_inverse=True)
    positive = np.bincount(ties, weights * labels)
    negative = np.bincount(ties, weights * ~labels)
    below = np.cumsum(negative) - negative
    pairs = positive.sum() * negative.sum()
    if pairs == 0:
        return float("nan")
    return float((positive * (below + negative / 2)).sum() / pairs)


def ranking_quality(
    scores: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray,
    draws: int = 1000,
    seed: int = 0,
) -> RankingQuality:
    """Return the area under the ROC curve with a 95 % interval, by a bootstrap over groups (Efron 1979; Field 2007).

    Documents of a group, such as a package, are similar, so whole groups are resampled. ``scores``: float64
    ``[examples]``. ``labels``: whether each example is positive, bool ``[examples]``. ``groups``: name of each
    example's group, ``[examples]``. ``draws``: number of bootstrap samples. ``seed``: seed of the draws.
    """
    names, members = np.unique(groups, return_inverse=True)
    random = np.random.default_rng(seed)
    areas = []
    for _ in range(draws):
        drawn = np.bincount(
            random.integers(len(names), size=len(names)), minlength=len(names)
        )
        areas.append(area_under_curve(scores, labels, drawn[members].astype(float)))
    low, high = np.nanquantile(areas, (0.025, 0.975))
    return RankingQuality(area_under_curve(scores, labels), float(low), float(high))
