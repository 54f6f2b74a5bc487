"""The end of a process that steps environments: how it ended in words, and ending it at once."""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress

from weft.rl.control.array_frames import FramePipe

#: Seconds that a process whose pipe has closed gets to end.
END_S = 5


def how_ended(process: subprocess.Popen[bytes]) -> str:
    """Return in words how ``process`` has ended after its pipe was closed, such as "was killed (SIGKILL)"."""
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    if code < 0:
        return f"was killed ({signal.Signals(-code).name})"
    return f"ended with the exit code {code}"


def end_process(process: subprocess.Popen[bytes], pipe: FramePipe) -> None:
    """End ``process`` at once, and close ``pipe``, this side's end of its pipe."""
    with suppress(OSError):
        pipe.close()
    process.kill()
    process.wait()
