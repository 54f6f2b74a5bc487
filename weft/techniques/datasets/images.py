"""Images with classes, for models of kind "diffusion"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.registry import register

if TYPE_CHECKING:
    from weft.data.pictures import PictureSet


@register(
    "dataset", "images", title="Images of folders, Parquet files or WebDataset archives"
)
def images(
    path: str | None,
    size: Sequence[int] = (),
    colours: bool | None = None,
    clusters: str = "",
    cluster: int = 0,
    encoder: str = "",
    buckets: Sequence[Sequence[int]] = (),
) -> PictureSet:
    """Read the images at ``path``. ``size``: height and width in pixels to which they are scaled; empty: the images'
    own size. ``colours``: whether a pixel has three values instead of one; None: as many as the images have.
    ``clusters``: file of ``weft experts --clusters``, which divides the images; only those of ``cluster`` are read. "":
    all are read. ``encoder``: folder of an autoencoder of diffusers, whose latents a model learns in place of the
    pixels. ``buckets``: several sizes in place of ``size``, of which each image gets the one nearest to its form.
    """
    from weft.data.pictures import read_pictures

    pictures = read_pictures(path or "", size, colours, buckets)
    if encoder:
        if buckets:
            from weft.errors import UsageError

            raise UsageError(
                "data.settings.encoder encodes images of one size; set data.settings.size in place of buckets"
            )
        from weft.diffusion.latent_pictures import encoded_pictures

        pictures = encoded_pictures(pictures, encoder)
    if not clusters:
        return pictures
    from weft.data.picture_part import cluster_part, read_clusters

    return cluster_part(pictures, read_clusters(clusters), cluster)
