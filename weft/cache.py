"""Cache folder: a result is built once, by one process, and never seen incomplete."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.errors import WeftError, why_unwritten
from weft.paths import home_path

#: Folder of the cache with the files of remote sources, which are there when they are read.
DOWNLOADS = "weft-downloads"


def cache_root(chosen: Path | None = None) -> Path:
    """Return the cache folder: ``chosen`` (``data.cache``), else ``$WEFT_CACHE``, else ``~/.cache/weft``."""
    return home_path(
        chosen or os.environ.get("WEFT_CACHE") or "~/.cache/weft"
    ).absolute()


def digest(*parts: Any) -> str:
    """Return a hexadecimal digest of 24 characters of ``parts``, which must be values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return ``folder``; if it does not exist, ``build`` fills it first, while concurrent processes wait.

    ``build`` gets the path of a temporary folder to fill. An interrupted build leaves no folder. Raises
    :class:`WeftError` if the folder cannot be written.
    """
    if folder.exists():  # also where the cache is read-only
        return folder
    making = folder.with_name(f".{folder.name}.making")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock")):
            if not folder.exists():
                # left by a killed process: nobody else holds the lock
                shutil.rmtree(making, ignore_errors=True)
                making.mkdir()
                try:
                    build(making)
                    os.rename(making, folder)
                finally:
                    shutil.rmtree(making, ignore_errors=True)
    except OSError as error:
        raise WeftError(
            f"cannot write {folder}: {why_unwritten(error, 'set data.cache (or WEFT_CACHE) to another folder')}"
        ) from None
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path`` while the context is open, waiting until no other process holds it.

    The file is removed at the end.
    """
    while True:
        with open(path, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                from weft.lock_wait import wait_for_lock

                wait_for_lock(lock, path)
            try:
                unchanged = os.path.samestat(os.fstat(lock.fileno()), path.stat())
            except FileNotFoundError:
                unchanged = False
            # whoever had it before has taken the file away, and the next one makes another
            if not unchanged:
                continue
            try:
                yield
            finally:
                path.unlink()
            return
