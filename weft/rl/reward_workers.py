"""Scores answers in processes of their own, with limits of time and memory.

A reward is a user's code, or judges what a model has written. Neither may stop the run: an answer whose reward fails,
hangs or eats memory has no score, and the others go on. Messages are lines of JSON over pipes to own children.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.encodable import encodable
from weft.errors import WeftError
from weft.recipe.reward_settings import RewardSettings

if TYPE_CHECKING:
    from weft.recipe import Task
    from weft.rl.rollout import RewardQuestion

#: Seconds in which a process must have built its task; a reward model has to be loaded.
START = 300.0
#: How often an answer is given to a new process when the process that scored it was ended from outside.
ATTEMPTS = 2
#: Seconds between two looks at whether the run is asked to end.
LOOK_S = 0.2
#: Processes in turn that may be killed before one is ready.
STARTS = 20
#: What tells a process that it is a rank of a run, which one that scores is not.
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip


class Scored(NamedTuple):
    """The reward of an answer, or why it has none.

    ``value``: the reward; None if there is none. ``why``: why there is none, for example "took longer than 10 s".
    """

    value: float | None
    why: str = ""


def reward_workers(
    settings: Task, seed: int = 0, modules: Sequence[str] = ()
) -> RewardWorkers:
    """Start the processes that score answers to the task of ``settings``, a table ``[[tasks]]`` with the task's limits.

    The other arguments are those of :func:`task_words`.
    """
    words = task_words(settings, seed, modules)
    limits = settings.own(RewardSettings)
    return RewardWorkers(words, limits.workers, limits.seconds, limits.megabytes)


def task_words(
    settings: Task, seed: int = 0, modules: Sequence[str] = ()
) -> dict[str, Any]:
    """Return JSON values from which another process can build the task of ``settings``, a table ``[[tasks]]``.

    ``seed``: seed of the task's questions. ``modules``: plugins to load, from the recipe.
    """
    values = settings.model_dump(mode="json", by_alias=True)
    return {"task": values, "seed": seed, "plugins": [*modules]}


@dataclass
class _Worker:
    """A process that scores. ``item``: index of the answer that it scores now; ``deadline``: time by which it must."""

    process: subprocess.Popen[bytes]
    deadline: float
    ready: bool = False
    item: int | None = None
    to_send: bytes = b""
    received: bytes = b""

    def read(self) -> str | None:
        """Read what has arrived; return a whole line, "" if there is none yet, or None if the process has ended."""
        assert self.process.stdout
        try:
            part = os.read(self.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return ""
        self.received += part
        line, end, self.received = self.received.partition(b"\n")
        if end:
            return line.decode()
        self.received = line
        return "" if part else None

    def write(self) -> None:
        """Write as much of the request as the pipe takes. That the process has ended is noticed by reading."""
        assert self.process.stdin
        try:
            sent = os.write(self.process.stdin.fileno(), self.to_send)
            self.to_send = self.to_send[sent:]
        except BlockingIOError:
            pass
        except OSError:
            self.to_send = b""

    def send(self, message: Mapping[str, Any]) -> None:
        self.to_send = json.dumps(message, default=str).encode() + b"\n"
        self.write()

    def kill(self) -> None:
        """End the process, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                pipe and pipe.close()


class RewardWorkers:
    """Processes that score answers by a task. Use it as a context manager, or call :meth:`close`.

    ``words``: description of the task, from :func:`task_words`. ``processes``: number of processes. ``seconds``:
    longest time for one answer. ``megabytes``: memory that a process may use, beyond what it uses once its task is
    built. ``travelled``: bytes sent to servers of reward models so far, and bytes received from them.
    """

    def __init__(
        self,
        words: Mapping[str, Any],
        processes: int = 2,
        seconds: float = 10.0,
        megabytes: int = 1024,
    ) -> None:
        self.seconds = seconds
        self._words = dict(words) | {"seconds": seconds, "megabytes": megabytes}
        self._workers = [self._start() for _ in range(processes)]
        self._starts = 0  # processes that were killed since the last one was ready
        self.travelled = (0, 0)

    def __enter__(self) -> RewardWorkers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Operating-system ids of the processes that score answers."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End the processes that score answers; :meth:`scores` then raises an error."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def scores(
        self,
        questions: Sequence[RewardQuestion],
        answers: Sequence[str],
        look: Callable[[], None] = lambda: None,
    ) -> list[Scored]:
        """Score ``answers[i]`` as an answer to ``questions[i]``, for all i, and return the scores in this order.

        ``look``: called several times a second meanwhile; an error that it raises ends the scoring.

        The value is None if the reward of an answer raises an error, is not a finite number, or takes more time or
        memory than the limits allow. If a process is killed from outside, another one scores its answer again. Raises
        :class:`WeftError` if the task cannot be built, or if the processes have been closed.
        """
        if not self._workers:
            raise WeftError(f"the processes of the task {self._name} have been closed")
        for number, worker in enumerate(self._workers):
            if worker.item is not None:  # of a call that was interrupted
                self._replace(number)
        asked = list(zip(questions, answers, strict=True))
        scored: dict[int, Scored] = {}
        waiting, attempts = deque(range(len(asked))), [0] * len(asked)
        while len(scored) < len(asked):
            for worker in self._workers:
                if worker.ready and worker.item is None and waiting:
                    worker.item = waiting.popleft()
                    attempts[worker.item] += 1
                    self._ask(worker, *asked[worker.item])
            replies = self._replies()
            look()
            for number, reply in replies:
                worker, item = self._workers[number], self._workers[number].item
                if "ended" in reply or "late" in reply:
                    self._replace(number)
                worker.item = None
                if item is None:
                    continue
                if "ended" in reply and attempts[item] < ATTEMPTS:
                    waiting.appendleft(item)
                else:
                    scored[item] = _scored_of(reply)
                    sent, received = reply.get("travelled", (0, 0))
                    before = self.travelled
                    self.travelled = (before[0] + sent, before[1] + received)
        return [scored[item] for item in range(len(asked))]

    def _ask(self, worker: _Worker, question: RewardQuestion, answer: str) -> None:
        worker.deadline = time.monotonic() + self.seconds
        worker.send({"question": asdict(question), "answer": encodable(answer)})

    def _replies(self) -> list[tuple[int, dict[str, Any]]]:
        """Wait a little until a process has something to say, has ended or is late; return what each such one says.

        The pair has the number of the process, and its reply with one of the keys value, error, ended and late. That a
        process is ready is noted here. Raises :class:`WeftError` for a process that does not get ready.
        """
        busy = [w for w in self._workers if w.item is not None or not w.ready]
        with DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.process.stdout, EVENT_READ)  # type: ignore[arg-type]
                if worker.to_send:
                    selector.register(worker.process.stdin, EVENT_WRITE)  # type: ignore[arg-type]
            first = min(worker.deadline for worker in busy) - time.monotonic()
            selector.select(min(LOOK_S, max(0.0, first)))
        replies = []
        for number, worker in enumerate(self._workers):
            if worker not in busy:
                continue
            if worker.to_send:
                worker.write()
            reply = self._reply_of(worker)
            if worker.ready and reply:
                replies.append((number, reply))
            elif not worker.ready and "ready" in reply:
                worker.ready, self._starts = True, 0
            elif "ended" in reply and self._may_start_again(worker):
                self._replace(number)
            elif reply:
                why = reply.get("error") or f"its process {_ending(worker)}"
                self.close()
                raise WeftError(f"the task {self._name} cannot be built: {why}")
        return replies

    def _may_start_again(self, worker: _Worker) -> bool:
        """Return whether a process that ended before it was ready was killed from outside, and not again and again."""
        self._starts += 1
        return worker.process.wait() < 0 and self._starts < STARTS

    def _reply_of(self, worker: _Worker) -> dict[str, Any]:
        """Return the reply of a process; empty if it has none yet."""
        line = worker.read()
        if line:
            reply: dict[str, Any] = json.loads(line)
            return reply
        if line is None:
            return {"ended": True}
        if time.monotonic() >= worker.deadline:
            limit = self.seconds if worker.ready else START
            return {"late": True, "error": f"took longer than {limit:g} s"}
        return {}

    @property
    def _name(self) -> str:
        return repr(self._words["task"]["reward"])

    def _replace(self, number: int) -> None:
        self._workers[number].kill()
        self._workers[number] = self._start()

    def _start(self) -> _Worker:
        environment = {k: v for k, v in os.environ.items() if k not in OF_RANKS}
        process = subprocess.Popen(
            [sys.executable, "-m", "weft.rl.reward_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert process.stdin and process.stdout
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        worker = _Worker(process, time.monotonic() + START)
        worker.send(self._words)
        return worker


def _scored_of(reply: Mapping[str, Any]) -> Scored:
    if "ended" in reply:
        return Scored(None, "its process ended, and the next one did, too")
    return Scored(reply.get("value"), reply.get("error", ""))


def _ending(worker: _Worker) -> str:
    """Return how a process ended, in words."""
    code = worker.process.wait()
    return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
