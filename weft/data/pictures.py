"""Sets of images or videos with classes, from folders, tables, archives or scikit-learn."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import xxhash

from weft.cache import digest
from weft.data.broken_files import readable, worded
from weft.data.json_text import parse_record
from weft.data.order import choose_held_out
from weft.data.size_buckets import (
    ImageSize,
    checked_buckets,
    filled_up,
    nearest_bucket,
    unused_buckets,
)
from weft.errors import UsageError, WeftError
from weft.paths import home_path

#: Path of the digits that come with scikit-learn.
DIGITS = "sklearn:digits"
#: Endings of files that are read as images.
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
#: Columns of a table, or members of a sample in an archive, that hold an image or its class.
IMAGE_NAMES = ("image", "img", "png", "jpg", "jpeg", "webp")
CLASS_NAMES = ("label", "class", "cls", "fine_label")
#: Columns of a table that hold a caption, and those of a JSONL file that name the image's file.
CAPTION_NAMES = ("caption", "text", "txt")
FILE_NAMES = ("file_name", "image", "path")


@dataclass(frozen=True)
class PictureSet:
    """Images or videos of one size, each with its class.

    Attributes:
        ``pixels``: from -1 to 1, float32 ``[samples, channels, (frames,) height, width]``.
        ``labels``: number of each sample's class, int64 ``[samples]``; all 0 if there are no classes.
        ``classes``: names of the classes; empty if there are none.
        ``captions``: a text that describes each sample; empty if there are no such texts.
        ``sizes``: height and width of each image, int64 ``[samples, 2]``, if images have different sizes; the pixels
            beyond an image's size are 0. None: all images have one size.
        ``encoder``: folder of the autoencoder whose latents the pixels are; empty: they are pixels.
        ``notes``: lines about the source to print for the user, such as one about captions that belong to no image.
        ``groups``: number of the video that each clip was cut from, int64 ``[samples]``. All clips of a video are held
            out for validation, or none. None: samples are held out one by one.
    """

    pixels: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    groups: np.ndarray | None = None
    captions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    encoder: str = ""
    sizes: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    def __iter__(self) -> Iterator[NoReturn]:
        """Refuse to be read as texts, as models of tokens do."""
        raise UsageError(
            "data.kind has images or videos, which a model of tokens cannot read; set model.kind = 'diffusion'"
        )

    @property
    def part(self) -> str:
        """Words to append to the name of the data if this is a part of it; an empty text, because this is the whole."""
        return ""

    def held_out(self, share: float, seed: int) -> np.ndarray:
        """Return which samples are for validation, bool ``[samples]``. All clips of a video are held out, or none.

        ``share``: share of the samples (or videos) that is held out. ``seed``: seed of the choice.
        """
        if self.groups is None:
            return choose_held_out(len(self), share, seed)
        videos = int(self.groups.max()) + 1
        return choose_held_out(videos, share, seed)[self.groups]

    @property
    def fingerprint(self) -> str:
        """Digest of pixels, classes and captions, which identifies the set."""
        values = xxhash.xxh3_128(self.pixels.tobytes() + self.labels.tobytes())
        said: tuple[Any, ...] = (self.captions,) if self.captions else ()
        said += () if self.sizes is None else (self.sizes.tolist(),)
        return digest(self.pixels.shape, values.hexdigest(), self.classes, *said)

    @cached_property
    def said(self) -> tuple[str, ...]:
        """A text for each sample: its caption, or the name of its class if there are no captions; empty if there are
        neither.
        """
        if self.captions or not self.classes:
            return self.captions
        return tuple(self.classes[label] for label in self.labels)


def read_pictures(
    path: str,
    size: Sequence[int] = (),
    colours: bool | None = None,
    buckets: Sequence[Sequence[int]] = (),
) -> PictureSet:
    """Read all images at ``path``.

    ``path``: :data:`DIGITS`, a folder, a JSONL or Parquet file, or a WebDataset tar file. In a folder the class of an
    image is the name of its folder; images directly in ``path`` have no class. The caption of ``x.png`` is the text in
    ``x.txt`` beside it. ``size``: height and width in pixels. Images are cropped along their longer side to this shape
    and then scaled; if ``size`` is empty, all images must have one size. ``colours``: whether pixels have three
    channels; None: as the images have them. ``buckets``: several sizes in place of ``size``, of which each image gets
    the one nearest to its form. Raises :class:`UsageError` or :class:`WeftError` if there is no image.
    """
    if path == DIGITS:
        from weft.data.digits import read_digits

        digits = read_digits()
        if buckets:
            raise UsageError(
                "data.settings.buckets are of images of several sizes, and the digits have one; leave it out"
            )
        if size and tuple(size) != (8, 8):
            raise UsageError(
                f"data.settings.size = {list(size)}, and the digits have [8, 8]; leave it out"
            )
        pixels = digits.images[:, None] * 2 - 1
        names = tuple(map(str, range(10)))
        return PictureSet(pixels, digits.labels, names, captions=digits.captions)
    if not path:
        raise UsageError(
            f"data.path is missing: a folder with images, a .parquet or .tar file, or {DIGITS!r}"
        )
    place = home_path(path)
    if not place.exists():
        raise UsageError(f"data.path = {path!r} does not exist")
    check_size(size)
    if size and buckets:
        raise UsageError(
            "data.settings.size and data.settings.buckets both say to what images are scaled; leave one out"
        )
    sizes = checked_buckets(buckets)
    named = [*_named_images(place)]
    if not named:
        raise UsageError(
            f"data.path = {path!r} has no images ({', '.join(ENDINGS)}); give another folder, .jsonl, .parquet or "
            ".tar file"
        )
    pictures = _picture_set(named, size, colours, sizes)
    notes = lone_captions(place, ENDINGS)
    if pictures.sizes is not None:
        notes = (*notes, *unused_buckets(sizes, pictures.sizes))
    return replace(pictures, notes=notes)


def lone_captions(place: Path, endings: Sequence[str]) -> tuple[str, ...]:
    """Return a line about ``.txt`` files at ``place``, a folder or archive, that have no image beside them.

    ``endings``: endings of image files. The result is a tuple with the line, or an empty tuple if there is no such
    file.
    """
    if place.is_dir():
        names = [file.relative_to(place).as_posix() for file in place.rglob("*")]
    elif ".tar" in place.suffixes:
        import tarfile

        with tarfile.open(place) as archive:
            names = [m.name.removeprefix("./") for m in archive if m.isfile()]
    else:
        return ()
    media = {name.rpartition(".")[0] for name in names if name.lower().endswith(tuple(endings))}  # fmt: skip
    # a folder of frames is a video
    beside = media | {*names}
    lone = sorted(name for name in names if name.endswith(".txt") and name[:-4] not in beside)  # fmt: skip
    if not lone:
        return ()
    more = f" and {len(lone) - 1} more" if len(lone) > 1 else ""
    return (
        f"{place}: {lone[0]}{more} would be a caption, and no image or video has its name; it is not read",
    )


class NamedImage(NamedTuple):
    """An image that can be decoded: its name, the name of its class (``label``), its encoded bytes or its path
    (``content``), and its caption. Class and caption are empty if the image has none.
    """

    name: str
    label: str
    content: Any
    caption: str = ""


def check_size(size: Sequence[int]) -> None:
    """Raise :class:`UsageError` unless ``size`` is empty, or a height and width."""
    if len(size) not in (0, 2) or any(side < 1 for side in size):
        raise UsageError(
            f"data.settings.size = {[*size]} should be height and width; frames have a setting of their own"
        )


def caption_beside(path: Path) -> str:
    """Return the caption in the file beside ``path`` whose name ends with ``.txt``; empty if there is none."""
    text = path.with_suffix(".txt")
    return text.read_text(errors="replace").strip() if text.is_file() else ""


def _of_lines(place: Path) -> Iterator[NamedImage]:
    """Yield the images that the rows of a JSONL file name, with their captions and classes."""
    with readable(str(place), "lines of JSON"):
        lines = place.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name = f"{place}: line {number}"
        with readable(name, "JSON"):
            row = parse_record(line)
        row = row if isinstance(row, dict) else {}
        file = next((row[n] for n in FILE_NAMES if isinstance(row.get(n), str)), None)
        if file is None:
            raise WeftError(
                f"{place}: line {number} names no image; {', '.join(map(repr, FILE_NAMES))} should have its file"
            )
        caption = worded(name, row, CAPTION_NAMES)
        label = worded(name, row, CLASS_NAMES)
        # a path is one from the folder of the list
        yield NamedImage(name, label, place.parent / file, caption)


def _named_images(place: Path) -> Iterator[NamedImage]:
    """Yield every image at ``place``."""
    if place.is_dir():
        for file in sorted(place.rglob("*")):
            if file.suffix.lower() in ENDINGS:
                parent = file.parent.relative_to(place).as_posix()
                label = "" if parent == "." else parent
                yield NamedImage(str(file), label, file, caption_beside(file))
        return
    if place.suffix == ".jsonl":
        yield from _of_lines(place)
        return
    if ".parquet" in place.suffixes:
        from weft.data.arrow import read_rows

        with readable(str(place), "Parquet"):
            rows = [*read_rows(place)]
        for number, row in rows:
            image = next((row[n] for n in IMAGE_NAMES if n in row), None)
            image = image.get("bytes") if isinstance(image, dict) else image
            name = f"{place}: row {number}"
            if not isinstance(image, bytes):
                raise WeftError(
                    f"{place}: row {number} has no image; a column {', '.join(map(repr, IMAGE_NAMES))} should hold its "
                    "bytes"
                )
            label = worded(name, row, CLASS_NAMES)
            yield NamedImage(name, label, image, worded(name, row, CAPTION_NAMES))
        return
    yield from _of_archive(place)


def _of_archive(place: Path) -> Iterator[NamedImage]:
    """Yield every image in a WebDataset tar file."""
    import tarfile

    with readable(str(place), "a tar file"), tarfile.open(place) as archive:
        # a name may begin with the folder that was packed
        members = {m.name.removeprefix("./"): m for m in archive.getmembers() if m.isfile()}  # fmt: skip

        def content(name: str) -> bytes:
            file = archive.extractfile(members[name]) if name in members else None
            return file.read() if file else b""

        for name in sorted(members):
            folder, slash, base = name.rpartition("/")
            stem, _, ending = base.partition(".")
            stem = f"{folder}{slash}{stem}"
            shown = f"{place}: {name}"
            if f".{ending.lower()}" not in ENDINGS:
                _check_key(shown, name, stem, members)
                continue
            with readable(f"{place}: {stem}.json", "JSON"):
                about = parse_record(content(f"{stem}.json") or b"{}")
            about = about if isinstance(about, dict) else {}
            words = (content(f"{stem}.{each}").decode(errors="replace").strip() for each in ("cls", "txt"))  # fmt: skip
            label, caption = words
            label = label or worded(shown, about, CLASS_NAMES)
            caption = caption or worded(shown, about, CAPTION_NAMES)
            yield NamedImage(shown, label, content(name), caption)


def _check_key(shown: str, name: str, stem: str, members: Mapping[str, object]) -> None:
    """Raise :class:`WeftError` if ``name`` is an image by its last ending only, and sample ``stem`` has no other."""
    alone = not any(f"{stem}{ending}" in members for ending in ENDINGS)
    if alone and Path(name).suffix.lower() in ENDINGS:
        raise WeftError(
            f"{shown} has a dot inside its name, and a sample of WebDataset is named by what is before the first; "
            "rename it"
        )


def _picture_set(
    named: Sequence[NamedImage], size: Sequence[int], colours: bool | None, buckets: Sequence[ImageSize]
) -> PictureSet:  # fmt: skip
    """Decode the images ``named``, and number their classes by name."""
    try:
        import PIL.Image
    except ImportError:
        raise UsageError(
            "images are read with Pillow, which is not installed; run pip install 'weft[images]'"
        ) from None
    arrays = []
    for name, _, content, _ in named:
        source = io.BytesIO(content) if isinstance(content, bytes) else content
        with readable(name, "an image"), PIL.Image.open(source) as image:
            own = ImageSize(image.height, image.width)
            wanted = nearest_bucket(buckets, own) if buckets else size
            arrays.append(image_pixels(image, wanted, colours))
        if arrays[-1].shape[: 1 if buckets else 3] != arrays[0].shape[: 1 if buckets else 3]:  # fmt: skip
            raise UsageError(
                f"{name} has the shape {list(arrays[-1].shape)}, and {named[0][0]} has {list(arrays[0].shape)}; set "
                "data.settings.size, to which all are scaled, and data.settings.colours"
            )
    captions = checked_captions([(each.name, each.caption) for each in named])
    labels = [each.label for each in named]
    if not buckets:
        return as_picture_set(arrays, labels, captions=captions)
    whole = as_picture_set(filled_up(arrays), labels, captions=captions)
    return replace(whole, sizes=np.array([array.shape[1:] for array in arrays]))


def checked_captions(named: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the captions of samples, given as pairs of name and caption; an empty tuple if no sample has a caption.

    Raises :class:`WeftError` if some have one and others have none.
    """
    missing = next((name for name, caption in named if not caption), "")
    if any(caption for _, caption in named):
        if missing:
            raise WeftError(
                f"{missing} has no caption, and others have one; add it in a .txt file beside it, or take it out"
            )
        return tuple(caption for _, caption in named)
    return ()


def as_picture_set(
    arrays: Sequence[np.ndarray],
    labels: Sequence[str],
    groups: np.ndarray | None = None,
    captions: tuple[str, ...] = (),
) -> PictureSet:
    """Build a picture set from ``arrays`` of one shape. Classes are numbered in the order of their names in ``labels``.

    ``labels``: the name of each array's class. ``groups``, ``captions``: see :class:`PictureSet`.
    """
    names = sorted({*labels})
    numbers = {label: i for i, label in enumerate(names)}
    of_classes = np.array([numbers[label] for label in labels], np.int64)
    classes = tuple(names) if len(names) > 1 else ()
    return PictureSet(np.stack(arrays), of_classes, classes, groups, captions)


def image_pixels(image: Any, size: Sequence[int], colours: bool | None) -> np.ndarray:
    """Return the pixels of a Pillow image from -1 to 1, float32 ``[channels, height, width]``.

    ``size``, ``colours``: the size to scale to and the number of channels, as in :func:`read_pictures`.
    """
    sixteen_bits = image.mode.startswith("I")
    grey = sixteen_bits or image.mode in ("1", "L", "F") if colours is None else not colours  # fmt: skip
    if sixteen_bits:  # which Pillow would cut off at 255
        import PIL.Image

        bytes_of = np.asarray(image).clip(0, 65535) / 257
        image = PIL.Image.fromarray(bytes_of.round().astype(np.uint8))
    image = image.convert("L" if grey else "RGB")
    if size:
        height, width = size
        share = min(image.width / width, image.height / height)
        left = (image.width - width * share) / 2
        top = (image.height - height * share) / 2
        box = (left, top, left + width * share, top + height * share)
        image = image.resize((width, height), box=box)
    values = np.asarray(image, np.float32) / 127.5 - 1
    return values[None] if values.ndim == 2 else values.transpose(2, 0, 1).copy()
