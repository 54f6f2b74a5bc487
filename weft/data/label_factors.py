"""Weights of labels by the source of their sample, where sources get their shares by weighting."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from weft.data.mix_leg import MixLeg


def source_factor(leg: MixLeg, sample: int, source: int) -> float:
    """Return the factor of the loss weights of global sample ``sample``, which comes from source number ``source``.

    A mixture can weigh losses instead of drawing more samples. The factor is then the source's share at this sample,
    divided by its share of all tokens; otherwise it is 1. ``leg``: the part of the order of samples, with one mixture,
    that holds the sample.
    """
    if leg.weighed is None:
        return 1.0
    return leg.weighed.shares(sample, sample + 1)[source] / leg.sizes[source]


def weighed_row(row: Any, leg: MixLeg, sample: int, source: int) -> Any:
    """Return ``row`` with the loss weights of its labels, or of its pairs, multiplied by :func:`source_factor`, in
    float64.

    ``row``: a :class:`weft.data.order.Row`. The other arguments are those of :func:`source_factor`.
    """
    factor = source_factor(leg, sample, source)
    if row.pairs is not None:
        pairs = replace(row.pairs, weight=row.pairs.weight * factor)
        return row._replace(pairs=pairs)
    weights = np.ones(len(row.tokens)) if row.weights is None else row.weights
    return row._replace(weights=weights.astype(np.float64) * factor)
