"""Whether a result can be written where a command's option says, asked before the work of which it is the result."""

import os
import tempfile
from pathlib import Path

from weft.errors import WeftError, why_unwritten


def check_writable(place: Path, option: str, folder: bool = False) -> None:
    """Raise :class:`WeftError` if the file ``place``, which the command's ``option`` names, cannot be written.

    Folders above it may be missing. Nothing is created. ``folder``: whether ``place`` is a folder for files instead.
    """
    try:
        if not folder and _exists(place):
            place.open("a").close()
        else:
            _check_room(place)
    except OSError as error:
        remedy = "choose another folder" if folder else "name another file"
        raise WeftError(
            f"cannot write {option} {place}: {why_unwritten(error, remedy)}"
        ) from None


def _check_room(place: Path) -> None:
    """Raise ``OSError`` unless files can be made in ``place`` or, where that is missing, in the next folder above."""
    # what a link leads to may be missing too
    whole = above = place if _exists(place) else Path(os.path.realpath(place))
    while not _exists(above):
        above = above.parent
    tempfile.TemporaryFile(dir=above).close()
    for name in whole.parts[len(above.parts) :]:
        # raises for a name that is too long, which the missing folder above it has hidden
        _exists(above / name)


def _exists(path: Path) -> bool:
    """Return whether ``path`` exists. Raises ``OSError`` where the system refuses to say, such as for a name that is
    too long; ``Path.exists`` does so in some versions of Python only.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
