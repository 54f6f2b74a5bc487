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
    path: str | None, size: Sequence[int] = (), colours: bool | None = None
) -> PictureSet:
    """Read the images at ``path``.

    ``size``: height and width to which they are scaled; ``colours``: whether pixels have three values, None for as many
    as they have.
    """
    from weft.data.pictures import read_pictures

    return read_pictures(path or "", size, colours)
