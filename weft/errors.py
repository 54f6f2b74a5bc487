"""The errors that reach a user as one line instead of a traceback."""

import difflib
import errno
from collections.abc import Iterable


class WeftError(Exception):
    """An error of a valid request, such as a missing file or a damaged checkpoint. The command ends with exit code 1.

    ``secondary``: whether the error only passes on what another rank has reported. ``hangs``: whether a thread of this
    process still waits for a device that does not answer; the process must then end without joining this thread.
    """

    exit_code = 1
    secondary = False
    hangs = False


class UsageError(WeftError):
    """An error of the request itself, such as an unknown key or a layout that does not divide; exit code 2."""

    exit_code = 2


class Interrupted(Exception):
    """Raised for Ctrl-C in a command, in place of ``KeyboardInterrupt``.

    For ``KeyboardInterrupt`` Typer would end the process with an exit code, but print nothing.
    """


def nearest(word: str, choices: Iterable[str], listed: bool = False) -> str:
    """Return the end of an error line for an unknown ``word``.

    It names the closest of ``choices``, or all of them if none is close. ``listed``: name all of them in any case.
    """
    choices = list(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    near, every = f"did you mean {close[0]!r}?" if close else "", ", ".join(choices)
    return (
        f"{near} Choose from: {every}"
        if near and listed
        else near or f"choose from: {every}"
    )


def why_unwritten(error: OSError, remedy: str = "") -> str:
    """Return the end of an error line for a file that cannot be written because of ``error``.

    It is the cause, and what helps: room on the disk if it is full, or else ``remedy``, which may be empty.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "make room on its disk"
    return f"{error.strerror or error}; {remedy}".removesuffix("; ")
