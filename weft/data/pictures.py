"""Sets of images or videos with classes, from folders, tables, archives or scikit-learn."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import xxhash

from weft.cache import digest
from weft.errors import UsageError, WeftError

#: Path of the digits that come with scikit-learn.
DIGITS = "sklearn:digits"
#: Endings of files that are read as images.
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
#: Columns of a table, or members of a sample in an archive, that hold an image or its class.
IMAGE_NAMES = ("image", "img", "png", "jpg", "jpeg", "webp")
CLASS_NAMES = ("label", "class", "cls", "fine_label")


@dataclass(frozen=True)
class PictureSet:
    """Images or videos of one size, each with its class.

    Attributes:
        ``pixels``: from -1 to 1, float32 ``[samples, channels, (frames,) height, width]``.
        ``labels``: number of each sample's class, int64 ``[samples]``; all 0 if there are no classes.
        ``classes``: names of the classes; empty if there are none.
        ``groups``: number of each sample's video, int64 ``[samples]``, as clips of one video are either all held out
            for validation or none; None: every sample is for itself.
    """

    pixels: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    groups: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    def __iter__(self) -> Iterator[NoReturn]:
        """Refuse to be read as texts, as models of tokens do."""
        raise UsageError(
            "data.kind has images or videos, which a model of tokens cannot read; set model.kind = 'diffusion'"
        )

    @property
    def fingerprint(self) -> str:
        """Digest of all values."""
        values = xxhash.xxh3_128(self.pixels.tobytes() + self.labels.tobytes())
        return digest(self.pixels.shape, values.hexdigest(), self.classes)


def read_pictures(
    path: str, size: Sequence[int] = (), colours: bool | None = None
) -> PictureSet:
    """Read all images at ``path``: :data:`DIGITS`, a folder, a Parquet file, or a WebDataset tar file.

    In a folder an image's class is the folder that it is in; images right in ``path`` have none. ``size``: height and
    width to which images are scaled, after their longer side was cut to this form; empty: they must be of one size.
    ``colours``: whether pixels have three values; None: as the images. Raises :class:`UsageError` or
    :class:`WeftError` if there is nothing to read.
    """
    if path == DIGITS:
        from weft.data.digits import read_digits

        digits = read_digits()
        if size and tuple(size) != (8, 8):
            raise UsageError(
                f"data.settings.size = {list(size)}, and the digits have [8, 8]; leave it out"
            )
        pixels = digits.images[:, None] * 2 - 1
        return PictureSet(pixels, digits.labels, tuple(map(str, range(10))))
    if not path:
        raise UsageError(
            f"data.path is missing: a folder with images, a .parquet or .tar file, or {DIGITS!r}"
        )
    place = Path(path).expanduser()
    if not place.exists():
        raise UsageError(f"data.path = {path!r} does not exist")
    named = [*_named_images(place)]
    if not named:
        raise UsageError(
            f"data.path = {path!r} has no images ({', '.join(ENDINGS)}); give another folder, .parquet or .tar file"
        )
    return _picture_set(path, named, size, colours)


def _named_images(place: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield name, class and encoded bytes (or path) of every image at ``place``."""
    if place.is_dir():
        for file in sorted(place.rglob("*")):
            if file.suffix.lower() in ENDINGS:
                parent = file.parent.relative_to(place).as_posix()
                yield str(file), "" if parent == "." else parent, file
        return
    if ".parquet" in place.suffixes:
        from weft.data.arrow import read_rows

        for number, row in read_rows(place):
            image = next((row[n] for n in IMAGE_NAMES if n in row), None)
            image = image.get("bytes") if isinstance(image, dict) else image
            label = next((row[n] for n in CLASS_NAMES if n in row), "")
            if not isinstance(image, bytes):
                raise WeftError(
                    f"{place}: row {number} has no image; a column {', '.join(map(repr, IMAGE_NAMES))} should hold its "
                    "bytes"
                )
            yield f"{place}: row {number}", str(label), image
        return
    yield from _of_archive(place)


def _of_archive(place: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield name, class and encoded bytes of every image in a WebDataset tar file."""
    import tarfile

    try:
        with tarfile.open(place) as archive:
            members = {m.name: m for m in archive.getmembers() if m.isfile()}
            for name, member in sorted(members.items()):
                stem, _, ending = name.partition(".")
                if f".{ending.lower()}" not in ENDINGS:
                    continue
                label = members.get(f"{stem}.cls")
                words = archive.extractfile(label) if label else None
                content = archive.extractfile(member)
                assert content is not None
                of_class = words.read().decode().strip() if words else ""
                yield f"{place}: {name}", of_class, content.read()
    except tarfile.TarError as error:
        raise WeftError(f"{place} cannot be read as a tar file: {error}") from None


def _picture_set(
    path: str,
    named: Sequence[tuple[str, str, Any]],
    size: Sequence[int],
    colours: bool | None,
) -> PictureSet:
    """Decode the images ``named`` (name, class, bytes or path), and number their classes by name."""
    try:
        import PIL.Image
    except ImportError:
        raise UsageError(
            "images are read with Pillow, which is not installed; run pip install 'weft[images]'"
        ) from None
    arrays = []
    for name, _, content in named:
        try:
            source = io.BytesIO(content) if isinstance(content, bytes) else content
            with PIL.Image.open(source) as image:
                arrays.append(image_pixels(image, size, colours))
        except (OSError, ValueError) as error:
            raise WeftError(f"{name} cannot be read as an image: {error}") from None
        if arrays[-1].shape != arrays[0].shape:
            raise UsageError(
                f"{name} has the shape {list(arrays[-1].shape)}, and {named[0][0]} has {list(arrays[0].shape)}; set "
                "data.settings.size, to which all are scaled, and data.settings.colours"
            )
    return as_picture_set(arrays, [label for _, label, _ in named])


def as_picture_set(
    arrays: Sequence[np.ndarray],
    labels: Sequence[str],
    groups: np.ndarray | None = None,
) -> PictureSet:
    """Return the set of ``arrays``, all of one shape, whose classes are ``labels``, numbered in order of their names.

    ``groups``: those of :class:`PictureSet`.
    """
    names = sorted({*labels})
    numbers = {label: i for i, label in enumerate(names)}
    of_classes = np.array([numbers[label] for label in labels], np.int64)
    classes = tuple(names) if len(names) > 1 else ()
    return PictureSet(np.stack(arrays), of_classes, classes, groups)


def image_pixels(image: Any, size: Sequence[int], colours: bool | None) -> np.ndarray:
    """Return the pixels of a Pillow image from -1 to 1, float32 ``[channels, height, width]``.

    ``size``, ``colours``: those of :func:`read_pictures`.
    """
    grey = image.mode in ("1", "L", "I", "F") if colours is None else not colours
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
