"""The handwritten digits that come with scikit-learn: 1,797 grey images of 8 x 8 pixels in ten classes."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from weft.errors import UsageError


class Digits(NamedTuple):
    """Handwritten digits.

    Attributes:
        ``images``: from 0 (paper) to 1 (ink), float32 ``[1797, 8, 8]``.
        ``labels``: the digits, int64 ``[1797]``.
    """

    images: np.ndarray
    labels: np.ndarray


@cache
def read_digits() -> Digits:
    """Read the digits (Alpaydin & Kaynak 1998). Raises :class:`UsageError` if scikit-learn is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError(
            "the digits come with scikit-learn, which is not installed; run pip install 'weft[images]'"
        ) from None
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)
    return Digits(images, digits.target.astype(np.int64))
