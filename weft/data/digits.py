"""The handwritten digits that come with scikit-learn: 1,797 grey images of 8 x 8 pixels in ten classes."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from weft.errors import UsageError


class Digits(NamedTuple):
    """The 1,797 handwritten digits of scikit-learn as arrays.

    Attributes:
        ``images``: from 0 (paper) to 1 (ink), float32 ``[1797, 8, 8]``.
        ``labels``: the digits, int64 ``[1797]``.
        ``captions``: a description of each image, such as "a bold three". A digit is called bold if it has more ink
            than most images of the same digit.
    """

    images: np.ndarray
    labels: np.ndarray
    captions: tuple[str, ...]


#: Digits as words.
DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")  # fmt: skip


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
    labels = digits.target.astype(np.int64)
    ink = images.mean((1, 2))
    usual = np.array([np.median(ink[labels == digit]) for digit in range(10)])
    captions = tuple(
        f"a {'bold' if bold else 'thin'} {DIGIT_NAMES[label]}"
        for bold, label in zip(ink > usual[labels], labels, strict=True)
    )
    return Digits(images, labels, captions)
