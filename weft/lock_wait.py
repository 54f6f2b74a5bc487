"""Wait for a lock file that another process holds, with signs of life."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

#: Called at every look at a lock: a process that waits rightly uses no processor time, and tells so by these.
SIGNS_OF_LIFE: list[Callable[[], object]] = []
#: Seconds between two looks at most, and seconds of waiting between two lines for the user.
LOOK_S, SILENT_S = 0.5, 30.0


def wait_for_lock(lock: IO[str], path: Path) -> None:
    """Take the lock of the open file ``lock`` as soon as the process that holds it gives it up.

    ``path``: path of the file. A line on the standard error names file and holder now and then.
    """
    pause, shown = 0.01, time.monotonic()
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        for sign in SIGNS_OF_LIFE:
            sign()
        if time.monotonic() - shown >= SILENT_S:
            shown = time.monotonic()
            sys.stderr.write(
                f"weft: {os.getpid()} waits for {_holder(lock)}, which holds {path}; if that one is stopped, end it\n"
            )
        time.sleep(pause)
        pause = min(LOOK_S, 1.5 * pause)


def _holder(lock: IO[str]) -> str:
    """Return which process holds the lock of a file, as far as this machine's system knows."""
    with suppress(OSError, IndexError):
        number = os.fstat(lock.fileno()).st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5].endswith(f":{number}"):
                return f"process {words[4]}"
    return "another process"
