"""Images of several sizes in one set: each is scaled to the size whose form is nearest to its own."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

import numpy as np

from weft.errors import UsageError


class ImageSize(NamedTuple):
    """Height and width of an image, in pixels."""

    height: int
    width: int


def checked_buckets(buckets: Sequence[Sequence[int]]) -> tuple[ImageSize, ...]:
    """Return the sizes ``buckets``. Raises :class:`UsageError` unless each is a height and a width."""
    if not (isinstance(buckets, list | tuple) and all(map(_is_size, buckets))):
        raise UsageError(
            f"data.settings.buckets = {buckets!r} should be heights and widths, such as [[32, 32], [24, 40]]"
        )
    return tuple(ImageSize(*each) for each in buckets)


def _is_size(each: object) -> bool:
    """Return whether ``each`` is a height and a width."""
    sides = each if isinstance(each, list | tuple) else ()
    return len(sides) == 2 and all(type(side) is int and side >= 1 for side in sides)


def unused_buckets(buckets: Sequence[ImageSize], sizes: np.ndarray) -> tuple[str, ...]:
    """Return a line about those of ``buckets`` that no image gets, given the ``sizes`` of all ``[samples, 2]``."""
    used = {(height, width) for height, width in sizes.tolist()}
    unused = [f"{b.height} x {b.width}" for b in dict.fromkeys(buckets) if b not in used]  # fmt: skip
    if not unused:
        return ()
    return (
        f"data.settings.buckets: no image gets the size {', '.join(unused)}, so that the model learns none of it",
    )


def nearest_bucket(buckets: Sequence[ImageSize], own: ImageSize) -> ImageSize:
    """Return the size among ``buckets`` to which an image of size ``own`` is scaled.

    It is the size with the most similar ratio of height to width. Among sizes of equal ratio it is the one with the
    most similar number of pixels.
    """

    def distance(bucket: ImageSize) -> tuple[float, float]:
        form = log(bucket.height / bucket.width) - log(own.height / own.width)
        area = log(bucket.height * bucket.width) - log(own.height * own.width)
        return round(abs(form), 9), abs(area)

    return min(buckets, key=distance)


def filled_up(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the images ``arrays``, ``[channels, height, width]`` each, padded with zeros below and to the right to one
    common size.
    """
    height, width = (max(array.shape[axis] for array in arrays) for axis in (1, 2))
    return [
        np.pad(array, ((0, 0), (0, height - array.shape[1]), (0, width - array.shape[2])))
        for array in arrays
    ]  # fmt: skip


def real_pixels(shape: Sequence[int], size: Sequence[int]) -> np.ndarray:
    """Return a mask of the pixels that belong to an image and not to padding, bool ``[channels, height, width]``.

    ``shape``: shape of the padded array. ``size``: height and width of the image, which is in the upper left corner.
    """
    real = np.zeros(shape, bool)
    real[:, : size[0], : size[1]] = True
    return real


def bucket_line(sizes: np.ndarray) -> str:
    """Return how many images have each of ``sizes`` ``[samples, 2]``, in words."""
    each, counts = np.unique(sizes, axis=0, return_counts=True)
    return ", ".join(
        f"{count:,} of {height} x {width}"
        for (height, width), count in zip(each.tolist(), counts.tolist(), strict=True)
    )
