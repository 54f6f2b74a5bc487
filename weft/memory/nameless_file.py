"""A file without a name, as memory of this process: a crash leaves nothing behind, and no two runs share it."""

import mmap
import os
import tempfile
from pathlib import Path

from weft.errors import WeftError
from weft.paths import home_path


class TierError(WeftError):
    """Error of a file for offloaded tensors that cannot be created, read or written."""


def nameless_file(folder: Path, name: str) -> int:
    """Create a file without a name in ``folder``, which vanishes when it is closed, and return its descriptor. A
    missing folder is created.

    ``name``: what error messages call the folder. Raises :class:`TierError` if the folder cannot be used.
    """
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


def check_file_folder(folder: Path, name: str) -> None:
    """Raise :class:`TierError` if ``folder`` cannot have a file of this kind, before there is anything to write.

    ``name``: what the error message calls the folder.
    """
    os.close(nameless_file(home_path(folder), name))


def reserve(descriptor: int, start: int, size: int, where: str) -> mmap.mmap:
    """Reserve bytes of a file on the disk. Return them mapped as memory of this process.

    ``descriptor``: the file's descriptor; ``start``: first byte; ``size``: number of bytes; ``where``: what the error
    message calls the file, such as ``in /tmp``. Raises :class:`TierError` if the disk is full. Without the reservation,
    a later write to the memory would find the disk full, and the process would be ended by a signal.
    """
    try:
        os.posix_fallocate(descriptor, start, size)
        return mmap.mmap(descriptor, size, offset=start)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or "that is more than any disk has"
        raise TierError(
            f"no room for {size:,} bytes {where}: {why}; free some, or choose another folder"
        ) from None
