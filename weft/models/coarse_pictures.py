"""Images as short vectors: averages of neighbouring pixels."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F

T = torch.Tensor

#: Most values of a vector.
MOST_VALUES = 1024


def coarse_size(shape: tuple[int, ...], most: int = MOST_VALUES) -> tuple[int, ...]:
    """Return the size to which images are averaged so that they have at most ``most`` values, as far as possible.
    ``shape``: shape of an image: channels, frames if it is a video, height, width. The result is height and width,
    for a video with the frames before them.
    """
    channels, *size = shape
    while channels * prod(size) > most and max(size) > 1:
        largest = size.index(max(size))
        size[largest] = -(-size[largest] // 2)
    return tuple(size)


def coarse_values(pixels: T, most: int = MOST_VALUES) -> T:
    """Return images ``[batch, channels, (frames,) height, width]`` as vectors ``[batch, values]``.

    Where they have more than ``most`` values, neighbouring pixels are averaged.
    """
    size = coarse_size(tuple(pixels.shape[1:]), most)
    if size != tuple(pixels.shape[2:]):
        pool: Any = F.adaptive_avg_pool3d if len(size) == 3 else F.adaptive_avg_pool2d
        pixels = pool(pixels, size)
    return pixels.flatten(1)
