"""Videos with classes, for models of kind "diffusion"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.registry import register

if TYPE_CHECKING:
    from weft.data.pictures import PictureSet


@register(
    "dataset", "videos", title="Videos of folders: animations, arrays, frames and containers"
)  # fmt: skip
def videos(
    path: str | None,
    frames: int = 16,
    every: int = 1,
    step: int = 0,
    size: Sequence[int] = (),
    colours: bool | None = None,
    anywhere: bool = True,
    clusters: str = "",
    cluster: int = 0,
) -> PictureSet:
    """Read the videos at ``path`` as clips of ``frames`` frames. ``clusters``: file of ``weft experts --clusters``,
    which divides the clips; only those of ``cluster`` are read. "": all are read. The other arguments are those of
    :class:`weft.data.clips.ClipForm`.
    """
    from weft.data.clips import ClipForm, read_clips

    form = ClipForm(frames, every, step, tuple(size), colours, anywhere)
    clips = read_clips(path or "", form)
    if not clusters:
        return clips
    from weft.data.picture_part import cluster_part, read_clusters

    return cluster_part(clips, read_clusters(clusters), cluster)
