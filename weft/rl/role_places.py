"""Places where the processes of roles are started: their interface, and places on this host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from weft.net.sockets import listen, own_address

#: What a process runs first: the kernel is told to end it when the process that has started it dies.
ENTRY = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class PlacedProcess(Protocol):
    """Interface of a process of a role, wherever it runs; that of :class:`subprocess.Popen`, as far as it is used."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs. A negative code is the number of a signal."""

    def kill(self) -> None:
        """End the process at once."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return its exit code.

        Raises :class:`subprocess.TimeoutExpired` after ``timeout`` seconds.
        """


class Meeting(NamedTuple):
    """Address at which processes that share a model find each other: ``host`` and ``port`` of the first of them."""

    host: str
    port: int


class RolePlace(Protocol):
    """Interface of a place for one process of a role, which can be started there again after it has ended."""

    def meeting(self) -> Meeting:
        """Return an address of this place at which nobody listens."""

    def start(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> PlacedProcess:
        """Start a process of Weft. ``command``: arguments of Python. ``environment``: all variables that it gets here;
        on another host, those that are Weft's are added to the variables of that host.
        """

    def close(self) -> None:
        """Let a call of :meth:`start` in another thread wait for nothing any longer."""


class LocalPlace:
    """A place on this host."""

    def meeting(self) -> Meeting:
        with listen(own_address(), 0, 1) as probe:
            return Meeting(*probe.getsockname()[:2])

    def start(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> PlacedProcess:
        return subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            # signals for the run are for the run alone
            start_new_session=True,
        )

    def close(self) -> None:
        pass


def weft_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those variables of ``environment`` that a process of Weft on another host gets from the run.

    They may hide all GPUs, but not choose some, whose names are those of this host.
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(("WEFT_", "OMP_"))
        or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        or name in ("MASTER_ADDR", "MASTER_PORT")
        or (name == "CUDA_VISIBLE_DEVICES" and not value)
    }


def entry_words(command: Sequence[str]) -> list[str]:
    """Return the whole command that runs Python with ``command`` and ends when this process does."""
    return [sys.executable, "-c", ENTRY, str(os.getpid()), sys.executable, *command]
