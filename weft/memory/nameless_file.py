"""A file without a name, as memory of this process: nothing is left of it after a crash, and no two runs share one."""

import mmap
import os
import tempfile
from pathlib import Path

from weft.errors import WeftError


class TierError(WeftError):
    """A tier's file could not be made, read or written."""


def nameless_file(folder: Path, name: str) -> int:
    """A new file without a name, by its descriptor; the folder is made if there is none. ``name``: its, in errors."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        except (
            OSError,
            AttributeError,
        ):  # some file systems and systems have no such thing
            descriptor, path = tempfile.mkstemp(".weft-tier", dir=folder)
            os.unlink(path)
            return descriptor
    except OSError as error:
        why = (
            "it is a file"
            if isinstance(error, FileExistsError)
            else error.strerror or error
        )
        raise TierError(
            f"{name} cannot be used: {why}; choose a folder on a local disk"
        ) from None


def reserve(descriptor: int, start: int, size: int, where: str) -> mmap.mmap:
    """So many bytes of a file from ``start`` on as memory of this process.

    A full disk is known now: later it would be a signal that ends the process, wherever it writes to that memory.
    """
    try:
        os.posix_fallocate(descriptor, start, size)
        return mmap.mmap(descriptor, size, offset=start)
    except OSError as error:
        raise TierError(
            f"no room for {size:,} bytes {where}: {error.strerror or error}; free some, or choose another folder"
        ) from None
