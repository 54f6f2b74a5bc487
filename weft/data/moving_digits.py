"""Videos of real digits that move: the source of the recipe that learns to make videos."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.data.digits import DIGIT_NAMES, read_digits
from weft.data.pictures import PictureSet

#: Path of the videos.
MOVING_DIGITS = "sklearn:moving-digits"
#: Directions in which digits move, rows and columns of a frame's shift, and their names.
DIRECTIONS = ((0, 1), (0, -1), (1, 0), (-1, 0))
DIRECTION_NAMES = ("right", "left", "down", "up")


def moving_digits(
    frames: int, every: int = 1, size: Sequence[int] = (), anywhere: bool = True
) -> PictureSet:
    """Return a small test data set: a video of each digit of scikit-learn, moving in one of several directions.

    The digit moves one pixel per frame, and what leaves the frame on one side enters on the other. ``frames``: number
    of frames of a video. ``every``: stride of the frames that are taken, so that digits move faster. ``size``: height
    and width of a frame, at least 8; empty: 8 x 8. ``anywhere``: whether a digit begins at a random position; otherwise
    it begins in the middle of the frame. Raises :class:`UsageError` if scikit-learn is not installed.
    """
    from weft.errors import UsageError

    height, width = size or (8, 8)
    if min(height, width) < 8:
        raise UsageError(
            f"data.settings.size = {[height, width]} is smaller than a digit; set at least [8, 8]"
        )
    digits = read_digits()
    count = len(digits.labels)
    numbers = np.random.Generator(np.random.Philox(key=0xD161))
    which = numbers.integers(len(DIRECTIONS), size=count)
    directions = np.array(DIRECTIONS)[which]
    beginnings = numbers.integers((height, width), size=(count, 2))
    if not anywhere:
        beginnings = np.full_like(beginnings, ((height - 8) // 2, (width - 8) // 2))
    canvas = np.full((count, height, width), -1, np.float32)
    canvas[:, :8, :8] = digits.images * 2 - 1
    pixels = np.empty((count, 1, frames, height, width), np.float32)
    for number, (direction, begin) in enumerate(zip(directions, beginnings, strict=True)):  # fmt: skip
        for frame in range(frames):
            shift = begin + direction * frame * every
            pixels[number, 0, frame] = np.roll(canvas[number], shift, (0, 1))
    captions = tuple(
        f"a {DIGIT_NAMES[label]} moves {DIRECTION_NAMES[way]}"
        for label, way in zip(digits.labels, which, strict=True)
    )
    classes = tuple(map(str, range(10)))
    return PictureSet(pixels, digits.labels, classes, captions=captions)
