"""Simulators as processes of this host, which the first rank of a training starts and, if they die, starts again."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.errors import UsageError, WeftError
from weft.run.rank_variables import environment_without_ranks
from weft.streams.sample_store import ProducerState
from weft.streams.stream_producer import ADDRESS, NAME, SECRET

#: Seconds until a simulator that has died is started again, and for a simulator to end when the training does.
AGAIN_S, END_S = 0.5, 5.0


@dataclass
class _Simulator:
    """A simulator's process. ``began``: samples that had come at its start. ``vain``: starts in a row that brought
    nothing new. ``due``: when it is started again; 0: it runs.
    """

    command: list[str]
    process: subprocess.Popen[bytes]
    began: int = 0
    vain: int = 0
    due: float = 0.0


class SimulatorProcesses:
    """Runs one process for each of ``commands``, which are simulators. ``names``: names of the simulators. ``address``,
    ``secret``: address and secret by which they reach the training. ``folder``: gets a file NAME.log with the output of
    each simulator. ``states``: function from a simulator's name to its state
    (:class:`weft.streams.sample_store.ProducerState`). Simulators that have already sent all samples, or are refused,
    are not started. ``restarts``: how often in a row a simulator may be started again without a new sample. ``say``:
    prints a line. Raises :class:`UsageError` if a command cannot be started.
    """

    def __init__(
        self,
        commands: Sequence[str],
        names: Sequence[str],
        address: str,
        secret: str,
        folder: Path,
        states: Callable[[str], ProducerState],
        restarts: int,
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._states, self._say = folder, states, say
        self._restarts = restarts
        self._environment = environment_without_ranks() | {ADDRESS: address, SECRET: secret}  # fmt: skip
        self._running: dict[str, _Simulator] = {}
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for name, command in zip(names, commands, strict=True):
                if not states(name).over:
                    words = words_of(command)
                    process = self._start(name, words)
                    self._running[name] = _Simulator(words, process, states(name).next)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> Mapping[str, int]:
        """Operating-system number of each simulator's present process, by the simulator's name."""
        return {name: each.process.pid for name, each in self._running.items()}

    def tend(self) -> None:
        """Start simulators again whose processes have ended before they had sent all samples. Call this now and then.
        Raises :class:`WeftError` for a simulator that ends again and again and sends nothing new.
        """
        for name, each in self._running.items():
            state = self._states(name)
            code = each.process.poll()
            if code is None or state.over:
                continue
            if not each.due:
                each.vain = 0 if state.next > each.began else each.vain + 1
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                log = self._folder / f"{name}.log"
                if each.vain > self._restarts:
                    raise WeftError(
                        f"simulator {name} ({shlex.join(each.command)}) has ended with {how} before it had sent all, "
                        f"{each.vain} times in a row without a new sample: {last_line(log)}; {log} has all that it "
                        "printed"
                    )
                self._say(
                    f"simulator {name} has ended with {how} after {state.next} samples, before its end; it is started "
                    "again"
                )
                each.due = time.monotonic() + AGAIN_S
            if time.monotonic() >= each.due:
                each.process, each.due = self._start(name, each.command), 0.0
                each.began = state.next

    def close(self) -> None:
        """End all processes. They get :data:`END_S` seconds to end by themselves; then they are killed."""
        deadline = time.monotonic() + END_S
        try:
            for each in self._running.values():
                with suppress(subprocess.TimeoutExpired):
                    each.process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # also when Ctrl-C is pressed again
            for each in self._running.values():
                if each.process.poll() is None:
                    each.process.kill()
                each.process.wait()

    def _start(self, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            try:
                # signals for the run are for the run alone, which ends its simulators when it has saved
                return subprocess.Popen(
                    words,
                    env=self._environment | {NAME: name},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise UsageError(
                    f"the command {shlex.join(words)!r} of simulator {name} cannot be started: {error.strerror}"
                ) from None


def words_of(command: str) -> list[str]:
    """Return the words of a command line, with the interpreter of this process for ``python``.

    Raises :class:`UsageError` for a command without words, or with a quotation mark that is not closed.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"the command {command!r} of a simulator: {error}") from None
    if not words:
        raise UsageError(
            "the command of a simulator is empty; leave it out of [stream]"
        )
    return [sys.executable if words[0] == "python" else words[0], *words[1:]]


def last_line(log: Path) -> str:
    """Return the last line of the file ``log`` that is not blank; if there is none, a text that says so."""
    with suppress(OSError):
        lines = log.read_text(errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        if written:
            return written[-1][:300]
    return "it printed nothing"
