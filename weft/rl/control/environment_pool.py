"""Environments in processes of their own, stepped together; one that dies or hangs is named and started anew."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from weft.errors import UsageError, WeftError
from weft.layout.dims import part
from weft.rl.control.array_frames import pipe_ends, readable_pipes
from weft.rl.control.child_end import end_process, how_ended
from weft.rl.control.environment_kinds import ActionForm, form_from_words
from weft.rl.control.environment_process import IDLE, episode_seed

#: Seconds in which a process must have made its environments.
START_S = 120.0
#: Times that a process may fail without a whole step, until the run gives up.
TRIES = 3


@dataclass(frozen=True)
class PoolStep:
    """Result of one step of all environments of a pool; the first dimension of all arrays is the environment.

    Attributes:
        ``observations``: observations for the next action, ``[environments, observed]``.
        ``finals``: observations after the step; they differ from ``observations`` where an episode has ended.
        ``rewards``: rewards to learn from.
        ``own``: the environments' own rewards.
        ``terminated``: whether an episode has reached a terminal state, whose value is 0.
        ``truncated``: whether an episode was cut off at a limit, so that its last state still has a value.
        ``dropped``: whether the environment was lost, so that its episode does not count.
    """

    observations: np.ndarray
    finals: np.ndarray
    rewards: np.ndarray
    own: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    dropped: np.ndarray


class ProcessEnd(NamedTuple):
    """Why a process of environments failed: ``why`` in words, and whether it is the user's mistake (``usage``), such as
    an unknown environment.
    """

    why: str
    usage: bool = False


class EnvironmentProcess:
    """Parent's handle of a process that steps some environments.

    ``about``: settings of the environments, as for :class:`EnvironmentPool`; ``numbers``: numbers of the environments
    among all environments of the run.
    """

    def __init__(self, about: Mapping[str, Any], numbers: Sequence[int]) -> None:
        self._about, self.numbers = about, list(numbers)
        self._marker_handle = os.memfd_create("weft-environments")
        os.ftruncate(self._marker_handle, 8)
        self._marker = mmap.mmap(self._marker_handle, 8)
        self._marker[:8] = IDLE.to_bytes(8, "little", signed=True)
        self.process: subprocess.Popen[bytes] | None = None
        self.failures = 0

    def start(self, seeds: Sequence[int]) -> None:
        """Start the process that steps the environments. ``seeds``: the seed of each environment's first episode."""
        self.pipe, theirs = pipe_ends()
        handles = theirs.fileno(), self._marker_handle
        command = [
            sys.executable,
            "-c",
            "import sys; from weft.rl.control.environment_process import run_environments; "
            "run_environments(*map(int, sys.argv[1:]))",
            *map(str, handles),
        ]
        # in a session of its own: Ctrl-C is for the run, which ends its step first
        self.process = subprocess.Popen(
            command,
            pass_fds=handles,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            start_new_session=True,
        )
        theirs.close()
        self.deadline = time.monotonic() + START_S
        about = {**self._about, "numbers": self.numbers, "seeds": list(seeds)}
        with suppress(OSError):  # it has ended already, which the answer shows
            self.pipe.send(about, {})

    @property
    def name(self) -> str:
        """The process in words for error lines, with the environment that it is stepping, or the range of all its
        environments.
        """
        at = int.from_bytes(self._marker[:8], "little", signed=True)
        first, last = self.numbers[0], self.numbers[-1]
        which = f"environments {first} to {last}" if last > first else f"environment {first}"  # fmt: skip
        which = which if at == IDLE else f"environment {at}"
        pid = self.process.pid if self.process else 0
        return f"{which} (process {pid})"

    def take_answer(self) -> dict[str, np.ndarray] | ActionForm | ProcessEnd:
        """Read the message that has arrived from the process.

        Returns the arrays of a step, or the form of new environments, or why the process has failed.
        """
        assert self.process is not None
        try:
            frame = self.pipe.receive()
        except (EOFError, OSError, ValueError):
            return ProcessEnd(how_ended(self.process))
        if "failed" in frame.head:
            return ProcessEnd(f"failed: {frame.head['failed']}", frame.head["usage"])
        if "form" in frame.head:
            self.first = frame.arrays["observation"]
            return form_from_words(frame.head["form"])
        return frame.arrays

    def end(self) -> None:
        """Kill the process that steps the environments at once. :meth:`start` can start it again."""
        if self.process is not None:
            end_process(self.process, self.pipe)
        self.process = None

    def close(self) -> None:
        """End the process for good, and free the memory that it shares with this one."""
        self.end()
        self._marker.close()
        os.close(self._marker_handle)


class EnvironmentPool:
    """Vectorised environments: the environments ``numbers`` of a run, in processes, stepped together.

    Args:
        ``about``: settings of the environments: ``environment``, ``settings``, ``time_limit``, ``reward``, ``progress``
            and ``terms`` of the section ``[control]``.
        ``numbers``: numbers of the pool's environments among all of the run, which decide their seeds.
        ``processes``: number of processes.
        ``seconds``: seconds after which a step that has not ended counts as hanging.
        ``seeds``: numbers from which seeds are drawn, together with the number of the environment.

    Attributes:
        ``form``: form of observations and actions.
        ``observations``: observations for the next action, ``[environments, observed]``.
        ``dropped``: number of episodes that were lost with their process.
        ``lines``: lines about lost processes that are still to be printed.

    As a context manager it ends the processes at exit. Raises :class:`UsageError` if the environment cannot be made.
    """

    def __init__(
        self,
        about: Mapping[str, Any],
        numbers: Sequence[int],
        processes: int,
        seconds: float,
        seeds: tuple[int, ...],
    ) -> None:
        self._seconds, self._seeds, self._lives = seconds, seeds, 0
        self.dropped, self.lines = 0, list[str]()
        count = min(processes, len(numbers))
        shares = [part(len(numbers), count, i) for i in range(count)]
        self._shares = [slice(lo, hi) for lo, hi in shares]
        self._processes = [
            EnvironmentProcess(about, list(numbers)[lo:hi]) for lo, hi in shares
        ]
        try:
            for process in self._processes:
                process.start(self._first_seeds(process))
            forms = [self._await_start(process) for process in self._processes]
            self.form = forms[0]
        except BaseException:
            self.close()
            raise
        self.observations = np.concatenate([p.first for p in self._processes])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Operating-system ids of the pool's processes."""
        return [p.process.pid for p in self._processes if p.process is not None]

    def step(self, actions: np.ndarray) -> PoolStep:
        """Take one step in every environment. ``actions``: choices ``[environments]``, or numbers ``[environments,
        numbers]``.

        If the process of an environment dies or hangs, it is started anew. The environment is marked as ``dropped`` in
        the result, and its observation is the first one of a new episode. Raises :class:`WeftError` if a process fails
        :data:`TRIES` times in a row.
        """
        failed: dict[EnvironmentProcess, ProcessEnd] = {}
        for process, share in zip(self._processes, self._shares, strict=True):
            # its answer, which is none then, says why
            with suppress(OSError):
                process.pipe.send({}, {"action": actions[share]})
            process.deadline = time.monotonic() + self._seconds
        answers: dict[EnvironmentProcess, dict[str, np.ndarray]] = {}
        waiting = list(self._processes)
        while waiting:
            first = min(p.deadline for p in waiting)
            pipes = {p.pipe: p for p in waiting}
            ready = readable_pipes(pipes, max(0.0, first - time.monotonic()))
            for pipe in ready:
                process = pipes[pipe]
                waiting.remove(process)
                answer = process.take_answer()
                if isinstance(answer, ProcessEnd):
                    failed[process] = answer
                else:
                    assert isinstance(answer, dict)
                    answers[process], process.failures = answer, 0
            for process in [p for p in waiting if p.deadline <= time.monotonic()]:
                if not process.pipe.poll():
                    waiting.remove(process)
                    why = f"has not answered for {self._seconds:g} s"
                    failed[process] = ProcessEnd(why)
        for process, end in failed.items():
            answers[process] = self._start_anew(process, end)
        whole = {
            key: np.concatenate([answers[p][key] for p in self._processes])
            for key in ("observation", "final", "reward", "own", "terminated", "truncated")
        }  # fmt: skip
        dropped = np.concatenate(
            [np.full(len(p.numbers), p in failed) for p in self._processes]
        )
        self.observations = whole["observation"]
        return PoolStep(
            whole["observation"],
            whole["final"],
            whole["reward"],
            whole["own"],
            whole["terminated"],
            whole["truncated"],
            dropped,
        )

    def close(self) -> None:
        """End all processes that step environments."""
        for process in self._processes:
            process.close()
        self._processes = []

    def take_lines(self) -> list[str]:
        """Return the lines about lost processes since the last call."""
        lines, self.lines = self.lines, []
        return lines

    def _first_seeds(self, process: EnvironmentProcess) -> list[int]:
        return [episode_seed(*self._seeds, self._lives, n) for n in process.numbers]

    def _await_start(self, process: EnvironmentProcess) -> ActionForm:
        if not process.pipe.poll(max(0.0, process.deadline - time.monotonic())):
            raise WeftError(f"{process.name} was not made within {START_S:g} s")
        answer = process.take_answer()
        if isinstance(answer, ProcessEnd):
            if answer.usage:
                raise UsageError(answer.why.removeprefix("failed: "))
            raise WeftError(f"{process.name} {answer.why}")
        assert isinstance(answer, ActionForm)
        return answer

    def _start_anew(
        self, process: EnvironmentProcess, end: ProcessEnd
    ) -> dict[str, np.ndarray]:
        process.failures += 1
        name, count = process.name, len(process.numbers)
        self.dropped += count
        if process.failures >= TRIES:
            raise WeftError(
                f"{name} {end.why}, for the {TRIES}rd time in a row; mend the environment, or raise "
                "control.step_seconds if its steps take so long"
            )
        process.end()
        self._lives += 1
        process.start(self._first_seeds(process))
        self._await_start(process)
        plural = "s were" if count > 1 else " was"
        self.lines.append(
            f"{name} {end.why}; {count} episode{plural} dropped, and the process started anew"
        )
        zeros, no = np.zeros(count), np.zeros(count, bool)
        return {
            "observation": process.first,
            "final": process.first,
            "reward": zeros,
            "own": zeros,
            "terminated": no,
            "truncated": no,
        }
