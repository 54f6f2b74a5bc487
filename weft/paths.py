"""Paths that users give, without the errors of :mod:`pathlib` that name no path: what is missing is said by whoever
opens it.
"""

import os
from pathlib import Path


def real_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as an absolute path without symbolic links. A link that leads to itself stays as it is, where
    ``Path.resolve`` raises RuntimeError.
    """
    return Path(os.path.realpath(path))


def home_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` with a user's home folder in place of ``~`` or ``~NAME`` at its beginning. The name of a user
    whom the system does not know stays as it is, where ``Path.expanduser`` raises RuntimeError.
    """
    return Path(os.path.expanduser(path))
