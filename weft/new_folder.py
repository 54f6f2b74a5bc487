"""A folder that appears when it is complete, or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.errors import WeftError, why_unwritten


def check_new(folder: Path, option: str = "--out") -> None:
    """Raise :class:`WeftError` if ``folder``, which the command's ``option`` names, exists already."""
    if folder.exists():
        raise WeftError(f"{option} {folder} exists already; choose another folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a draft folder beside ``folder``, and rename it to ``folder`` when the context ends without an error.

    Raises :class:`WeftError` if ``folder`` has files already, or cannot be written.
    """
    folder = folder.absolute()
    if folder.is_dir() and any(folder.iterdir()):
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
        raise WeftError(
            f"cannot write {folder}: {why_unwritten(error, 'choose another folder')}"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
