"""Open files of data, compressed or not, and explain in one line why a file cannot be read."""

import bz2
import csv
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from weft.cache import DOWNLOADS
from weft.errors import WeftError

PACKED = (".gz", ".bz2", ".xz", ".zst")
JSON_LINES = (".jsonl", ".ndjson")
#: How files begin that are no text.
_BEGINNINGS = {
    b"PAR1": "it is Parquet", b"\x1f\x8b": "it is compressed by gzip, and '.gz' is missing from its name",
    b"\x28\xb5\x2f\xfd": "it is compressed by zstd, and '.zst' is missing from its name",
    b"PK\x03\x04": "it is a zip archive, which must be unpacked", b"%PDF": "it is a PDF; take its text out first",
    b"\x89PNG": "it is an image", b"\xff\xd8\xff": "it is an image", b"ARROW1": "it is an Arrow file",
    b"\xff\xff\xff\xff": "it is of a saved data set: kind = 'chat' or 'huggingface' reads its folder",
    b"\xff\xfe": "it is UTF-16; save it as UTF-8", b"\xfe\xff": "it is UTF-16; save it as UTF-8",
    b"BZh": "it is compressed by bzip2, and '.bz2' is missing from its name", b"GGUF": "it is a model",
}  # fmt: skip


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Convert errors of reading ``path`` inside the context to a :class:`WeftError` of one line with cause and remedy.

    A downloaded file stays in the cache as long as the context lasts. ``kind``: what the error calls the format of the
    file.
    """
    with naming_file(path, kind):
        if DOWNLOADS in path.parts:
            from weft.data.remote_files import in_use

            with in_use(path):
                yield
            return
        yield


@contextmanager
def naming_file(path: Path, kind: str) -> Iterator[None]:
    """Convert errors of reading ``path`` inside the context to a :class:`WeftError` of one line, as :func:`reading`
    does.

    Unlike :func:`reading`, it does not download the file. ``kind``: what the error calls the format of the file.
    """
    try:
        yield
    except ImportError as error:
        raise WeftError(
            f"{kind} needs {error.name}, which is not installed; pip install 'weft[data]'"
        ) from None
    except (OSError, EOFError, ValueError, lzma.LZMAError, csv.Error) as error:
        reason = str(getattr(error, "strerror", None) or error).partition("\n")[0]
        encoding = (
            "save it as UTF-8, or " if isinstance(error, UnicodeDecodeError) else ""
        )
        remedy = kind_by_content(path) or f"{encoding}check 'path' and 'kind'"
        raise WeftError(f"cannot read {path} as {kind}: {reason}; {remedy}") from None


class FilePart(NamedTuple):
    """Part of a file of records, which one task reads.

    ``start`` and ``end``: range of bytes of JSON Lines, or of row groups of Parquet. ``first``: number of the first
    line or row.
    """

    start: int
    end: int
    first: int


def format_of(file: Path) -> str:
    """Return the suffix of a file's name that tells its format, such as ".jsonl" for "a.jsonl.gz": the suffix of the
    compression is left out.
    """
    name = file.name.lower()
    packed = next((end for end in PACKED if name.endswith(end)), "")
    return Path(name.removesuffix(packed)).suffix


def open_file(file: Path) -> IO[bytes]:
    """Open a file to read bytes, and decompress it if its suffix says so."""
    if DOWNLOADS in file.parts:
        from weft.data.remote_files import downloaded

        downloaded(file)
    packed = next((end for end in PACKED if file.name.lower().endswith(end)), "")
    if packed == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    openers: dict[str, Callable[..., Any]] = {
        ".gz": gzip.open,
        ".bz2": bz2.open,
        ".xz": lzma.open,
    }
    stream: IO[bytes] = openers.get(packed, open)(file, "rb")
    return stream


def file_state(file: Path) -> tuple[int, int]:
    """Return the size of a file in bytes, and a number that changes with its content: the time of its last change.

    For a file of a remote source, both come from the listing, without downloading it.
    """
    if DOWNLOADS in file.parts:
        from weft.data.remote_files import remote_state

        return remote_state(file)
    state = file.stat()
    return state.st_size, state.st_mtime_ns


def kind_by_content(file: Path) -> str | None:
    """Detect the format of a file by its first bytes, and return a clause about it for an error message.

    Returns None if the file seems to be text, or if its suffix already tells this format.
    """
    if file.suffix.lower() in (".parquet", ".arrow", *PACKED):
        return None
    try:
        with open(file, "rb") as stream:
            head = stream.read(8)
    except OSError:
        return None
    return next(
        (said for begin, said in _BEGINNINGS.items() if head.startswith(begin)), None
    )
