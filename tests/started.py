"""Commands of ``weft`` in processes of their own, which start at once: PyTorch and Weft are imported already.

Each is a fork of the server that the workers of the pool come from. The rest is as when a user types the command:
folder, variables, signals, exit code, output through pipes; ranks are forks of it, as they are of a real one.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, reduction
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import psutil

from weft.prove.pool import fork_server

#: What every worker of the pool needs.
USUAL = ("torch._dynamo", "torch.distributed.tensor", "weft.train.training")
#: What the server imports besides that.
PRELOAD = (
    "pytest",
    "weft.cli.app",
    "weft.api",
    "weft.generate.leader",
    "tests.forked_writers",
    "tests.warm",
)


class Started:
    """A command that runs; used as :class:`subprocess.Popen`.

    ``stdout`` and ``stderr`` are files to write to, or None for a pipe each. ``main``: a top-level function that is
    called with the words, in place of ``weft``. ``handles``: open files that it gets, too; words that are their numbers
    become the numbers that they have there.
    """

    def __init__(
        self,
        *words: object,
        cwd: Path | str = ".",
        env: dict[str, str] | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        start_new_session: bool = False,
        main: Callable[..., object] | None = None,
        handles: Sequence[int] = (),
    ) -> None:
        ours, theirs = list[Any](), list[int]()
        for given in (stdout, stderr):
            if given == subprocess.STDOUT:
                theirs.append(os.dup(theirs[0]))
                ours.append(None)
            elif given == subprocess.DEVNULL:
                theirs.append(os.open(os.devnull, os.O_WRONLY))
                ours.append(None)
            elif given is None:
                reading, writing = os.pipe()
                theirs.append(writing)
                ours.append(os.fdopen(reading))
            else:
                theirs.append(
                    os.dup(given if isinstance(given, int) else given.fileno())
                )
                ours.append(None)
        theirs += map(os.dup, handles)
        self.stdout, self.stderr = ours
        self.args = ["weft", *map(str, words)]
        self._process = fork_server(PRELOAD).Process(
            target=_run,
            args=(
                self.args[1:],
                str(Path(cwd).absolute()),
                dict(os.environ if env is None else env),
                start_new_session,
                main,
                list(map(str, handles)),
                *map(_Handle, theirs),
            ),
            daemon=True,  # else pytest would wait for it at its end
        )
        self._process.start()
        for handle in theirs:
            os.close(handle)
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What was written to the pipes, once the command has ended; it is killed when the time is over."""
        texts = ["", ""]

        def read(place: int, pipe: IO[str]) -> None:
            texts[place] = pipe.read()
            pipe.close()

        readers = [
            threading.Thread(target=read, args=(place, pipe))
            for place, pipe in enumerate((self.stdout, self.stderr))
            if pipe
        ]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            for reader in readers:
                reader.join()
        return texts[0], texts[1]

    def ranks(self) -> list[psutil.Process]:
        """Its ranks, in order: each leads a session, as nothing else that a command starts does."""
        return sorted(
            (
                child
                for child in psutil.Process(self.pid).children()
                if os.getsid(child.pid) == child.pid
            ),
            key=lambda child: child.pid,
        )


def start_server(prints: Path) -> None:
    """Start the server now, for this process and forks of it. What ranks of the pool print goes to ``prints``."""
    if sys.platform != "linux":
        return
    fork_server(PRELOAD)
    kept = [os.dup(place) for place in (1, 2)]
    with prints.open("ab") as file:
        for place in (1, 2):
            os.dup2(file.fileno(), place)
    try:
        forkserver.ensure_running()
    finally:
        for place, handle in zip((1, 2), kept, strict=True):
            os.dup2(handle, place)
            os.close(handle)


def run(
    *words: object, timeout: float = 240, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``weft`` with these words to its end."""
    process = Started(*words, **how)
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def trusting_plugins(*words: str) -> None:
    """Be ``weft`` whose ranks are forks in spite of plugins, which here do not look at their rank."""
    from weft import __main__
    from weft.run import forked

    forked.plugins = SimpleNamespace(loaded=())  # type: ignore[assignment]
    sys.argv = [__main__.__file__, *words]
    __main__.main()


class _Handle:
    """An open file that is handed to the process that is being started."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, (reduction.DupFd(self.handle),)  # type: ignore[attr-defined]


def _taken(handed: Any) -> int:
    handle: int = handed.detach()
    return handle


def _run(
    words: list[str],
    folder: str,
    environment: dict[str, str],
    session: bool,
    main: Callable[..., object] | None,
    given: list[str],
    out: int,
    err: int,
    *handles: int,
) -> None:
    """Be ``weft`` with these words, or call ``main`` with them."""
    numbers = dict(zip(given, map(str, handles), strict=True))
    words = [numbers.get(word, word) for word in words]
    gc.freeze()  # what the server has imported need not be looked at again
    for handle, place in ((out, 1), (err, 2)):
        os.dup2(handle, place)
        os.close(handle)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    if address := environment.get("WEFT_TESTS_SERVER"):
        from tests.forked_python import use_server

        use_server(address)
    if main is not None:
        main(*words)
        return
    from weft import __main__

    sys.argv = [__main__.__file__, *words]
    __main__.main()
