"""Images as PNG files: single ones, grids of many, and strips of a video's frames."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np

#: Pixels between the images of a grid, and their grey.
GAP, GREY = 2, 96
#: Sides of images shorter than this are shown as a multiple, so that one sees something.
LEAST_SIDE = 48


def png_bytes(pixels: np.ndarray) -> bytes:
    """Return a PNG file of ``pixels``, uint8 ``[height, width]`` (grey) or ``[height, width, 3]``."""
    height, width = pixels.shape[:2]
    lines = np.zeros(
        (height, 1 + pixels[0].size), np.uint8
    )  # each begins with 0: no filter
    lines[:, 1:] = pixels.reshape(height, -1)

    def chunk(name: bytes, content: bytes) -> bytes:
        number = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", number)  # fmt: skip

    head = struct.pack(">IIBBBBB", width, height, 8, 0 if pixels.ndim == 2 else 2, 0, 0, 0)  # fmt: skip
    body = zlib.compress(lines.tobytes(), 6)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", body), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def as_pixels(image: np.ndarray) -> np.ndarray:
    """Convert an image ``[channels, height, width]`` with values from -1 to 1 to uint8 pixels.

    The result is ``[height, width]`` (grey) or ``[height, width, 3]``. Unless there are one or three channels, only the
    first is shown. A video ``[channels, frames, height, width]`` becomes a strip of its frames.
    """
    if image.ndim == 4:
        frames = [as_pixels(image[:, i]) for i in range(image.shape[1])]
        return tiled([frames])
    values = np.clip((image + 1) * 127.5, 0, 255).round().astype(np.uint8)
    return values.transpose(1, 2, 0).copy() if len(image) == 3 else values[0]


def magnified(pixels: np.ndarray) -> np.ndarray:
    """Return ``pixels`` with every pixel repeated, so that the shorter side is at least :data:`LEAST_SIDE`."""
    times = max(1, -(-LEAST_SIDE // min(pixels.shape[:2])))
    return pixels.repeat(times, 0).repeat(times, 1)


def tiled(rows: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Arrange ``rows`` of images (uint8, all of one size) in one image, with gaps between them."""
    first = rows[0][0]
    height, width = first.shape[:2]
    columns = max(map(len, rows))
    size = len(rows) * (height + GAP) - GAP, columns * (width + GAP) - GAP
    whole = np.full((*size, *first.shape[2:]), GREY, np.uint8)
    for i, row in enumerate(rows):
        for j, pixels in enumerate(row):
            top, left = i * (height + GAP), j * (width + GAP)
            whole[top : top + height, left : left + width] = pixels
    return whole


def image_grid(images: np.ndarray, columns: int = 10) -> np.ndarray:
    """Arrange ``images``, ``[images, channels, (frames,) height, width]``, in a grid with ``columns`` columns.

    A video takes a row of its own, as a strip of its frames.
    """
    shown = [magnified(as_pixels(image)) for image in images]
    columns = 1 if images.ndim == 5 else columns
    return tiled([shown[i : i + columns] for i in range(0, len(shown), columns)])
