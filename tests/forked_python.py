"""Interpreters that Weft starts beside this process, as forks of the server of :mod:`tests.started`.

An interpreter that imports PyTorch takes three seconds of processor time. The fixture ``forked_python`` puts
:class:`ForkedPython` in the place of :class:`subprocess.Popen`, here and in commands that the test starts: the same
command line, variables, open files, session and exit code, but what the command imports is there already. It is for
tests of what such processes do; that a new interpreter comes as far is shown by one test of each kind, without it.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Any, Self

from tests.started import PRELOAD, Started
from weft.prove.pool import fork_server

#: The variable with the address of the server, for commands whose interpreters shall be forks.
SERVER = "WEFT_TESTS_SERVER"


class ForkedPython(Started):
    """Stands for :class:`subprocess.Popen` of this interpreter with the arguments ``words``."""

    def __init__(
        self,
        words: Sequence[object],
        *,
        cwd: Path | str = ".",
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        text: bool = False,
    ) -> None:
        assert stdin in (None, subprocess.DEVNULL)
        # what would be bytes is not read here
        assert text or subprocess.PIPE not in (stdout, stderr)
        super().__init__(
            os.getpid(),
            *words,
            cwd=cwd,
            env=None if env is None else dict(env),
            stdout=_stream(stdout, 1),
            stderr=_stream(stderr, 2),
            start_new_session=start_new_session,
            main=be_python,
            handles=pass_fds,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.wait()

    def communicate(  # type: ignore[override]  # as subprocess.run calls it
        self, given: None = None, timeout: float | None = None
    ) -> tuple[str, str]:
        return super().communicate(timeout)


def server_address() -> str:
    """Return the address of the server, which runs from now on."""
    fork_server(PRELOAD)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server.ensure_running()
    address: str = server._forkserver_address
    return address


def use_server(address: str) -> None:
    """Let forks of the server at ``address`` be the interpreters that this process, a fork as well, starts."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server.ensure_running = address, lambda: None
    subprocess.Popen = forking(lambda process: None)  # type: ignore[assignment,misc]


def forking(note: Callable[[ForkedPython], None]) -> Callable[..., Any]:
    """Return what stands for :class:`subprocess.Popen`, with forks for interpreters; ``note`` gets each of these."""
    plain = subprocess.Popen

    def popen(command: Any, **how: Any) -> Any:
        if command[0] != sys.executable or how.get("stdin") == subprocess.PIPE:
            return plain(command, **how)
        process = ForkedPython(command[1:], **how)
        note(process)
        return process

    return popen


def _stream(given: IO[Any] | int | None, own: int) -> IO[Any] | int | None:
    """What :class:`Started` takes for a stream that Popen is given: None is this process's, and a pipe is None."""
    return own if given is None else None if given == subprocess.PIPE else given


def be_python(parent: str, *words: str) -> None:
    """Do what the interpreter does with ``words``, as a child of the process ``parent``."""

    def execv(program: str, command: Sequence[str]) -> None:
        assert program == sys.executable
        be_python(parent, *command[1:])
        sys.exit()

    os.getppid = lambda: int(parent)
    os.execv = execv  # type: ignore[assignment]
    kind, name, *rest = words
    sys.argv = [kind if kind == "-c" else name, *rest]
    if kind == "-c":
        exec(name, {"__name__": "__main__"})
    elif kind == "-m" and name == "weft":
        from weft import __main__

        __main__.main()
    elif kind == "-m":
        # imported already
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        raise ValueError(f"python {kind} is not known here")
