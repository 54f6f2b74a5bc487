"""Clips for training: windows of equally many frames, cut from the videos of a folder or file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.data.broken_files import readable
from weft.data.moving_digits import MOVING_DIGITS, moving_digits
from weft.data.pictures import (
    ENDINGS,
    PictureSet,
    as_picture_set,
    caption_beside,
    check_size,
    checked_captions,
    image_pixels,
    lone_captions,
)
from weft.errors import UsageError, WeftError
from weft.paths import home_path

#: Endings of files that hold a video: in a container, as an array, or as an animation.
CONTAINERS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v")
ARRAYS = (".npy", ".npz")
ANIMATIONS = (".gif", ".png", ".apng", ".webp")


class Video(NamedTuple):
    """A video that can be read: its name, the name of its class (``label``), its caption, and a function that yields
    its frames in order. Class and caption are empty if the video has none.

    A frame is an image of Pillow.
    """

    name: str
    label: str
    frames: Callable[[], Iterator[Any]]
    caption: str = ""


@dataclass(frozen=True)
class ClipForm:
    """How clips (short videos of a fixed number of frames) are cut from videos.

    Attributes:
        ``frames``: number of frames of a clip.
        ``every``: stride between the frames of the video that a clip takes: 1 for every frame, 2 for every second.
        ``step``: distance between the first frames of successive clips, counted in frames that are taken; 0: clips do
            not overlap.
        ``size``: height and width in pixels to which frames are scaled; empty: that of the videos.
        ``colours``: whether pixels have three channels; None: as many as the frames have.
        ``anywhere``: whether moving digits begin at random positions; otherwise they begin in the middle of the frame.
    """

    frames: int = 16
    every: int = 1
    step: int = 0
    size: tuple[int, ...] = ()
    colours: bool | None = None
    anywhere: bool = True

    def __post_init__(self) -> None:
        for name, least in (("frames", 1), ("every", 1), ("step", 0)):
            if (value := getattr(self, name)) < least:
                raise UsageError(
                    f"data.settings.{name} = {value} is not possible; set at least {least}"
                )
        check_size(self.size)

    def starts(self, length: int) -> list[int]:
        """Return the index of the first frame of each clip of a video that has ``length`` frames.

        The last clip ends with the video, and may therefore overlap the clip before it.
        """
        last = length - self.frames
        starts = [*range(0, last + 1, self.step or self.frames)]
        return starts if starts[-1] == last else [*starts, last]


def read_clips(path: str, form: ClipForm) -> PictureSet:
    """Read all videos at ``path`` and cut them into clips.

    ``path``: :data:`MOVING_DIGITS`, a file, or a folder. In a folder every animation (GIF, PNG, WebP), array and
    container is a video. A folder of images in it is a video as well, with the images as its frames. The class of a
    video is the name of its folder; videos directly in ``path`` have no class. Raises :class:`UsageError` or
    :class:`WeftError` if there is no video, or if a video is shorter than a clip.
    """
    if path == MOVING_DIGITS:
        return moving_digits(form.frames, form.every, form.size, form.anywhere)
    if not form.anywhere:
        raise UsageError(
            f"data.settings.anywhere is of {MOVING_DIGITS!r}, and data.path = {path!r} has other videos; leave it out"
        )
    if not path:
        raise UsageError(
            f"data.path is missing: a folder with videos, a file, or {MOVING_DIGITS!r}"
        )
    place = home_path(path)
    if not place.exists():
        raise UsageError(f"data.path = {path!r} does not exist")
    clips: list[np.ndarray] = []
    labels: list[str] = []
    groups: list[int] = []
    said: list[tuple[str, str]] = []
    for number, video in enumerate(_videos_at(place)):
        pixels = _pixels_of(video, form)
        if clips and clips[0][:, 0].shape != pixels[:, 0].shape:
            raise UsageError(
                f"{video.name} has frames of the shape {[*pixels[:, 0].shape]}, and others have "
                f"{[*clips[0][:, 0].shape]}; set data.settings.size, to which all are scaled, and data.settings.colours"
            )
        starts = form.starts(pixels.shape[1])
        clips += [pixels[:, start : start + form.frames] for start in starts]
        labels += [video.label] * len(starts)
        groups += [number] * len(starts)
        said += [(video.name, video.caption)] * len(starts)
    if not clips:
        forms = ", ".join((*ANIMATIONS, *ARRAYS, *CONTAINERS))
        raise UsageError(
            f"data.path = {path!r} has no videos ({forms}, or folders of images); give another one"
        )
    whole = as_picture_set(clips, labels, np.array(groups), checked_captions(said))
    endings = (*CONTAINERS, *ARRAYS, *ANIMATIONS, *ENDINGS)
    return replace(whole, notes=lone_captions(place, endings))


def _pixels_of(video: Video, form: ClipForm) -> np.ndarray:
    """Return the taken frames of ``video`` from -1 to 1, float32 ``[channels, frames, height, width]``."""
    with readable(video.name, "a video"):
        frames = [
            image_pixels(image, form.size, form.colours)
            for number, image in enumerate(video.frames())
            if number % form.every == 0
        ]
    if len(frames) < form.frames:
        taken = f" (every {form.every})" if form.every > 1 else ""
        raise UsageError(
            f"{video.name} has {len(frames)} frames{taken}, and a clip has {form.frames}; set data.settings.frames to "
            "at most that, or take the video out"
        )
    wrong = next((f.shape for f in frames if f.shape != frames[0].shape), None)
    if wrong is not None:
        raise UsageError(
            f"{video.name} has frames of the shapes {[*frames[0].shape]} and {[*wrong]}; set data.settings.size, to "
            "which all are scaled, and data.settings.colours"
        )
    return np.stack(frames, 1)


def _videos_at(place: Path) -> Iterator[Video]:
    """Yield every video at ``place``, a folder or a file, in natural order of names."""
    if place.is_file():
        caption = caption_beside(place)
        for video in _of_file(place, "", always=True):
            yield video._replace(caption=caption)
        return
    files = [file for file in place.rglob("*") if file.is_file()]
    parts: dict[Path, list[Path]] = {}
    for file in sorted(files, key=natural_order):
        label = _label(file.parent, place)
        caption = caption_beside(file)
        videos = [v._replace(caption=caption) for v in _of_file(file, label)]
        yield from videos
        if not videos and file.suffix.lower() in ENDINGS:
            parts.setdefault(file.parent, []).append(file)
    for folder, images in parts.items():
        label = _label(folder.parent, place) if folder != place else ""
        yield Video(
            str(folder), label, partial(_opened, images), caption_beside(folder)
        )


def _label(folder: Path, place: Path) -> str:
    """Return the class that ``folder`` is, which lies in ``place``; empty for ``place`` itself."""
    label = folder.relative_to(place).as_posix()
    return "" if label == "." else label


def natural_order(path: Path) -> list[tuple[int, str]]:
    """Return a sort key for file names that compares numbers in them by value: ``frame2`` precedes ``frame10``."""
    pieces = re.split(r"(\d+)", path.as_posix())
    return [(int(p) if p.isdigit() else -1, p) for p in pieces]


def _of_file(file: Path, label: str, always: bool = False) -> Iterator[Video]:
    """Yield the videos of ``file``; none if it is an image, unless it is read ``always``."""
    ending = file.suffix.lower()
    if ending in ARRAYS:
        yield from _of_arrays(file, label)
    elif ending in CONTAINERS:
        yield Video(str(file), label, partial(_of_container, file))
    elif ending in ANIMATIONS and (always or _is_animated(file)):
        yield Video(str(file), label, partial(_of_animation, file))


def _of_arrays(file: Path, label: str) -> Iterator[Video]:
    """Yield a video for each array of ``file``, ``[(videos,) frames, height, width(, channels)]``."""
    with readable(str(file), "arrays"):
        content = np.load(file)
        several = not isinstance(content, np.ndarray)
        arrays = {key: content[key] for key in content.files} if several else {"": content}  # fmt: skip
    for key, values in arrays.items():
        name = f"{file}: {key}" if several else str(file)
        colours = values.ndim > 3 and values.shape[-1] in (1, 3)
        axes = values.ndim - colours
        # four values at the end would be read as a width
        alpha = values.ndim > 3 and values.shape[-1] == 4
        if axes not in (3, 4) or not values.size or alpha:
            raise UsageError(
                f"{name} has the shape {[*values.shape]}; a video is frames, height and width, with 1 or 3 values of a "
                "pixel at the end and several videos at the front"
            )
        whole = values if axes == 4 else values[None]
        for number, one_video in enumerate(whole):
            which = f"{name}: video {number}" if axes == 4 else name
            yield Video(which, label, partial(_of_values, one_video, which))


def _of_values(values: np.ndarray, name: str) -> Iterator[Any]:
    """Yield the frames of ``values`` ``[frames, height, width(, channels)]``, bytes or numbers from 0 to 1."""
    import PIL.Image

    if values.dtype.kind not in "buif":
        raise UsageError(
            f"{name} has values of the type {values.dtype}; store bytes (uint8), or numbers from 0 to 1"
        )
    if values.dtype != np.uint8:
        low, high = float(values.min()), float(values.max())
        if not (low >= 0 and high <= 1):
            raise UsageError(
                f"{name} has {values.dtype} values from {low:g} to {high:g}; store bytes (uint8), or numbers from 0 to "
                "1"
            )
        values = np.round(values * 255.0).astype(np.uint8)
    for frame in values:
        grey = frame.ndim == 3 and frame.shape[-1] == 1
        yield PIL.Image.fromarray(frame[..., 0] if grey else frame)


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        raise UsageError(
            "videos are read with Pillow, which is not installed; run pip install 'weft[videos]'"
        ) from None
    return PIL.Image


def _is_animated(file: Path) -> bool:
    """Return whether ``file`` has several frames. Raises :class:`WeftError` if it cannot be read."""
    pillow = _pillow()
    with readable(str(file), "an image"), pillow.open(file) as image:
        several: bool = getattr(image, "n_frames", 1) > 1
    return several


def _of_animation(file: Path) -> Iterator[Any]:
    """Yield the frames of an animated ``file``."""
    with _pillow().open(file) as image:
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            # a palette is one of colours only if it has some
            yield _without_palette(image)


def _without_palette(image: Any) -> Any:
    """Return a frame of an animation, grey if all of its colours are."""
    if image.mode not in ("P", "RGB", "RGBA"):
        return image
    whole = image.convert("RGB")
    red, green, blue = whole.split()
    grey = red.tobytes() == green.tobytes() == blue.tobytes()
    return red if grey else whole


def _opened(files: Sequence[Path]) -> Iterator[Any]:
    """Yield the images in ``files``."""
    for file in files:
        with _pillow().open(file) as image:
            yield image


def _of_container(file: Path) -> Iterator[Any]:
    """Yield the frames of the first stream of pictures in ``file``."""
    try:
        import av
    except ImportError:
        raise UsageError(
            f"{file} is read with PyAV, which is not installed; run pip install 'weft[videos]'"
        ) from None
    with av.open(str(file)) as container:
        if not container.streams.video:
            raise WeftError(f"{file} has no pictures, only sound; take it out")
        for frame in container.decode(video=0):
            yield frame.to_image()
