"""Writers of checkpoints as forks of their rank, wherever tests train: importing this module makes them so.

A rank that saves in the background starts an interpreter, which takes 0.14 s of processor time, a hundred times as long
as writing what tests write. The fork closes all that a new interpreter would not have. Writers to object stores are
interpreters, as the threads of their client do not outlive a fork, and so are those of commands that tests start with
an interpreter of its own.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from typing import IO, NoReturn

from weft.checkpoint import staging
from weft.net.child_pipe import PipeEnd, RunningProcess, call_in_child
from weft.run.signals import stop_signals

WRITER = "weft.checkpoint.writer"


class ForkedChild:
    """A child process; used as :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(WRITER, timeout or 0)
            time.sleep(0.001)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def forked(
    module: str, function: str, pipe: PipeEnd, *handles: int, stdout: IO[str] | None = None
) -> RunningProcess:  # fmt: skip
    """As :func:`weft.net.child_pipe.call_in_child`, with a fork for the writer."""
    if module != WRITER or "obstore" in sys.modules:
        return call_in_child(module, function, pipe, *handles, stdout=stdout)
    if pid := os.fork():
        return ForkedChild(pid)
    _be_child(module, function, pipe.fileno(), *handles)


def _be_child(module: str, function: str, *handles: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for handle in map(int, os.listdir("/proc/self/fd")):
            if handle > 2 and handle not in handles:
                try:
                    os.close(handle)
                except OSError:  # that of the list itself
                    continue
        getattr(importlib.import_module(module), function)(*handles)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


staging.call_in_child = forked  # type: ignore[assignment]
