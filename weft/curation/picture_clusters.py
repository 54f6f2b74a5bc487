"""Divides images into clusters by k-means, for experts that are trained apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import xxhash

from weft.curation.k_means import k_means
from weft.data.picture_part import PictureClusters
from weft.data.pictures import PictureSet
from weft.errors import UsageError, WeftError
from weft.models.coarse_pictures import coarse_values


def read_features(file: Path, images: int) -> np.ndarray:
    """Read a vector for each of ``images`` images from a NumPy file (.npy), float32 ``[images, n]``.

    Raises :class:`WeftError` or :class:`UsageError` for a file that is missing, damaged or of another shape.
    """
    try:
        features = np.load(file)
    except (OSError, ValueError, EOFError) as error:
        raise WeftError(
            f"--features {file} cannot be read as a .npy file: {error}"
        ) from None
    if not isinstance(features, np.ndarray) or features.dtype.kind not in "fiu":
        raise UsageError(
            f"--features {file} has no array of numbers; write one with numpy.save"
        )
    if features.ndim != 2 or len(features) != images:
        raise UsageError(
            f"--features {file} has the shape {[*features.shape]}, and there are {images} images; give one row for each"
        )
    if not np.isfinite(features).all():
        raise UsageError(
            f"--features {file} has values that are not finite; leave these out"
        )
    return features.astype(np.float32)


def divided_pictures(
    pictures: PictureSet, clusters: int, seed: int, features: Path | None = None
) -> PictureClusters:
    """Divide ``pictures`` into ``clusters`` by k-means. The result is the same on every call.

    ``seed``: seed of the first centroids. ``features``: file with a vector for each image, such as the states of a
    pretrained encoder. None: the pixels are the vectors; large images are averaged to fewer pixels. Raises
    :class:`UsageError` if the images cannot be divided into so many clusters.
    """
    if clusters > len(pictures):
        raise UsageError(
            f"--clusters {clusters} of {len(pictures)} images; give at most one for each image"
        )
    if features is None:
        vectors = coarse_values(torch.from_numpy(pictures.pixels)).numpy()
    else:
        vectors = read_features(features, len(pictures))
    labels = k_means(vectors, clusters, seed).labels.astype(np.int64)
    name = xxhash.xxh3_128(np.ascontiguousarray(vectors).tobytes()).hexdigest()
    divided = PictureClusters(labels, clusters, pictures.fingerprint, name)
    if 0 in divided.sizes:
        raise UsageError(
            f"cluster {divided.sizes.index(0)} of {clusters} has no images, as too many are alike; give fewer"
        )
    return divided
