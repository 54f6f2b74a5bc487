"""A set of images divided into clusters, each of which an expert learns from apart: the file of it, and one cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from weft.data.pictures import PictureSet
from weft.errors import UsageError, WeftError


class PictureClusters(NamedTuple):
    """Division of the images of a set into clusters.

    Attributes:
        ``labels``: number of each image's cluster, int64 ``[images]``.
        ``clusters``: number of clusters.
        ``fingerprint``: digest of the images.
        ``features``: digest of the vectors by which the images were divided.
    """

    labels: np.ndarray
    clusters: int
    fingerprint: str
    features: str = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of images of each cluster, in the order of the clusters' numbers."""
        return tuple(np.bincount(self.labels, minlength=self.clusters).tolist())


@dataclass(frozen=True, kw_only=True)
class PicturePart(PictureSet):
    """The images of one cluster of a :class:`PictureSet`, as the data of a run on this cluster alone.

    An image is held out for validation if it is held out in the whole set.

    Attributes:
        ``whole``: the whole set.
        ``numbers``: number of each image in the whole set, int64 ``[images]``.
        ``cluster``, ``clusters``: number of this cluster (from 0), and number of clusters.
    """

    whole: PictureSet
    numbers: np.ndarray
    cluster: int
    clusters: int

    @property
    def part(self) -> str:
        """Words to append to the name of the data, such as ", cluster 2 of 8"."""
        return f", cluster {self.cluster} of {self.clusters}"

    def held_out(self, share: float, seed: int) -> np.ndarray:
        """Return which images are for validation, bool ``[images]``: those that the whole set holds out.

        ``share``: share of the whole set's images that is held out. ``seed``: seed of the choice.
        """
        return self.whole.held_out(share, seed)[self.numbers]


def write_clusters(file: Path, clusters: PictureClusters) -> None:
    """Write ``clusters`` to ``file`` (.npz) in one step, so that no reader sees a part of it."""
    draft = file.with_name(f".{os.getpid()}-{file.name}")
    arrays: dict[str, Any] = {
        name: np.asarray(value) for name, value in clusters._asdict().items()
    }
    np.savez(draft, **arrays)
    draft.replace(file)


def read_clusters(file: str | Path) -> PictureClusters:
    """Read clusters from ``file``, which :func:`write_clusters` wrote. Raises :class:`WeftError` for any other file."""
    try:
        with np.load(file) as values:
            labels, clusters = (
                values["labels"].astype(np.int64),
                int(values["clusters"]),
            )
            names = str(values["fingerprint"]), str(values["features"])
    except FileNotFoundError:
        raise WeftError(
            f"data.settings.clusters = '{file}' does not exist; weft experts --clusters writes it"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        raise WeftError(
            f"{file} does not say which cluster images are in ({type(error).__name__}); remove it, and run "
            "weft experts --clusters again"
        ) from None
    return PictureClusters(labels, clusters, *names)


def cluster_part(
    pictures: PictureSet, clusters: PictureClusters, cluster: int
) -> PicturePart:
    """Return the images of ``pictures`` that are in the cluster with the number ``cluster``, as a set of their own.

    Raises :class:`UsageError` if ``clusters`` divides other images, and for a cluster without images.
    """
    if clusters.fingerprint != pictures.fingerprint:
        raise UsageError(
            f"data.settings.clusters divides {len(clusters.labels)} images, and these {len(pictures)} are others; give "
            "the data that were divided"
        )
    if not 0 <= cluster < clusters.clusters:
        raise UsageError(
            f"data.settings.cluster = {cluster} of {clusters.clusters} clusters; they are numbered from 0"
        )
    numbers = np.flatnonzero(clusters.labels == cluster)
    if not len(numbers):
        raise UsageError(
            f"cluster {cluster} of {clusters.clusters} has no images; divide them into fewer clusters"
        )
    groups, said = pictures.groups, pictures.captions
    return PicturePart(
        pixels=pictures.pixels[numbers],
        sizes=None if pictures.sizes is None else pictures.sizes[numbers],
        labels=pictures.labels[numbers],
        classes=pictures.classes,
        groups=None if groups is None else groups[numbers],
        captions=tuple(said[i] for i in numbers) if said else (),
        encoder=pictures.encoder,
        whole=pictures,
        numbers=numbers,
        cluster=cluster,
        clusters=clusters.clusters,
    )
