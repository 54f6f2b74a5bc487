"""Which sizes of images a model has learned, as its checkpoints record them."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from weft.data.size_buckets import ImageSize

#: The file of a checkpoint that has heights and widths, as a list of JSON.
SIZES_FILE = "sizes.json"


def sizes_file(sizes: np.ndarray | None) -> dict[str, bytes]:
    """Return the file with the different ``sizes`` of a run's images for a checkpoint, as contents by file name.

    The size of most images comes first. ``sizes``: height and width of each image ``[samples, 2]``; None if all images
    have the model's own size, and the result is empty.
    """
    if sizes is None:
        return {}
    each, counts = np.unique(sizes, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {SIZES_FILE: json.dumps(each[order].tolist()).encode()}


def learned_sizes(files: Mapping[str, bytes]) -> tuple[ImageSize, ...]:
    """Return the sizes of the images on which a model was trained. The size of most of these images comes first.

    ``files``: contents of the checkpoint's files by name. Returns an empty tuple if no file lists sizes, as for a model
    that was trained on images of one size, or if the file cannot be read.
    """
    try:
        given = json.loads(files.get(SIZES_FILE, b"[]"))
        return tuple(ImageSize(int(height), int(width)) for height, width in given)
    except (ValueError, TypeError):
        return ()
