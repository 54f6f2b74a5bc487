"""Writes files of federated runs, so that an error of the disk is never taken for the end of a connection."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.errors import WeftError, why_unwritten


class FileNotWritten(WeftError):
    """Error of a file that cannot be written, such as on a full disk. The message names the file and the cause."""


@contextmanager
def writing_file(path: Path) -> Iterator[None]:
    """Return a context that writes the file at ``path``. Errors of the disk become :class:`FileNotWritten`."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        why = (
            why_unwritten(error, "choose another folder (--out)")
            if isinstance(error, OSError)
            else f"{error}; make room or choose another folder (--out)"
        )
        raise FileNotWritten(
            f"cannot write {path}: {why}, and start again: what is stored is kept"
        ) from None
