"""A folder that appears when it is complete, or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.errors import WeftError, why_unwritten
from weft.writable import check_writable


def check_new(folder: Path, option: str = "--out") -> None:
    """Raise :class:`WeftError` if ``folder``, which the command's ``option`` names, exists already or cannot be made.

    Commands call it before the work whose result goes there.
    """
    if os.path.exists(folder):  # false for a path that the system refuses
        raise WeftError(f"{option} {folder} exists already; choose another folder")
    check_writable(folder, option, folder=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a draft folder beside ``folder``, and rename it to ``folder`` when the context ends without an error.

    Raises :class:`WeftError` if ``folder`` has files already, or cannot be written.
    """
    folder = folder.absolute()
    try:
        holds = folder.is_dir() and any(folder.iterdir())
    except OSError as error:
        raise _unwritten(error, str(folder)) from None
    if holds:
        raise WeftError(f"{folder} exists already; choose another folder")
    draft = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        yield draft
        for file in draft.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        draft.rename(folder)
    except OSError as error:
        raise _unwritten(error, str(folder)) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _unwritten(error: OSError, named: str) -> WeftError:
    """Return the error for a folder that cannot be written because of ``error``. ``named``: the folder in its line."""
    return WeftError(
        f"cannot write {named}: {why_unwritten(error, 'choose another folder')}"
    )
