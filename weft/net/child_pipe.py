"""A pipe to a child process of this one: a fresh interpreter that calls one function with what it inherits.

Nothing else runs in the child: multiprocessing's spawn would run the main program again.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, NamedTuple, Protocol

#: One end of a pipe between a process and its child.
PipeEnd = Connection


class RunningProcess(Protocol):
    """Interface of a child process, the part of :class:`subprocess.Popen` that pipes need."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""

    def kill(self) -> None:
        """End the process at once, by SIGKILL."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended; return its exit code.

        ``timeout``: seconds to wait at most; None: without limit. Raises :class:`subprocess.TimeoutExpired` after
        that.
        """


class Child(NamedTuple):
    """A child process that was started, with the pipe to it.

    ``pipe``: this process's end of the pipe; reading from it fails once the child has ended. ``process``: the child.
    """

    pipe: PipeEnd
    process: RunningProcess


def open_child(start: Callable[[PipeEnd], RunningProcess]) -> Child:
    """Open a pipe, start a child process by calling ``start`` with the child's end, and return the child."""
    pipe, theirs = Pipe()
    try:
        return Child(pipe, start(theirs))
    except BaseException:
        pipe.close()
        raise
    finally:
        theirs.close()


def call_in_child(
    module: str, function: str, pipe: PipeEnd, *handles: int, stdout: IO[str] | None = None
) -> "subprocess.Popen[bytes]":  # fmt: skip
    """Start a Python interpreter that imports ``module`` and calls ``function`` with inherited file descriptors.

    The descriptors are that of ``pipe``, and ``handles``. ``stdout``: file for what the child prints; None: this
    process's output. The child is in a session of its own: a terminal's Ctrl-C reaches this process only, which then
    waits for the child.
    """
    inherited = pipe.fileno(), *handles
    call = f"import sys; from {module} import {function}; {function}(*map(int, sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", call, *map(str, inherited)],
        pass_fds=inherited,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        start_new_session=True,
    )


def parent_pipe(handle: int) -> PipeEnd:
    """Return the child's end of the pipe to its parent. ``handle``: the inherited file descriptor of this end."""
    return PipeEnd(handle)


def ready_pipes(pipes: Iterable[PipeEnd]) -> list[PipeEnd]:
    """Wait until any of ``pipes`` has a message, or its child has ended; return all pipes for which that is true."""
    ends = list(pipes)
    ready = {id(end) for end in wait(ends)}
    return [end for end in ends if id(end) in ready]
