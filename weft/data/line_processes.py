"""Processes that answer lines of JSON with lines of JSON, for work that Python does on one core only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weft.data.line_worker import WAITS
from weft.errors import UsageError, WeftError
from weft.net.line_process import LineProcess
from weft.net.process import look_at

#: Seconds after which a process without any processor time is given up; seconds between two looks at the processes;
#: and seconds within which a killed process ends.
STILL_S, LOOK_S, END_S = 120.0, 2.0, 10.0


@dataclass
class Work:
    """What the last look has seen of a process that has a line to answer.

    ``ticks``: processor time of the process at that look; -1 before the first. ``still``: number of looks in a row at
    which it did not work.
    """

    ticks: int = -1
    still: int = 0


class LineProcesses:
    """Processes that run ``python -m module``, each of which answers one line at a time.

    ``module``: module that reads lines from the standard input, and answers each but the first with ``null``, with a
    result, or with ``{"error": ..., "usage": ...}`` (:func:`weft.data.line_worker.answer_lines`). ``task``: what all
    processes get as JSON in the first line; not as an argument, which every user of the machine sees, as it may have
    secrets. ``count``: number of processes, which start when they are needed. Leaving the context ends the processes at
    once. A process that is given work, has no processor time for :data:`STILL_S` seconds, such as a stopped one, and
    does not say that it waits for a lock, is ended, and named in the error of its work.
    """

    def __init__(self, module: str, task: Mapping[str, Any], count: int) -> None:
        self._module, self._task = module, json.dumps(task)
        self._own = threading.local()
        self._started: list[LineProcess] = []
        self._closed, self._starting = threading.Event(), threading.Lock()
        self._busy: dict[LineProcess, Work] = {}
        self._still: set[LineProcess] = set()  # which were ended as they stood still
        # Ctrl-C is for this process: the others have SIGINT blocked from their first instant, as these threads do
        self._threads = ThreadPoolExecutor(
            count,
            initializer=signal.pthread_sigmask,
            initargs=(signal.SIG_BLOCK, {signal.SIGINT}),
        )

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="weft-lines", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all processes. What they have not finished is lost."""
        with self._starting:  # no other is started from here on
            self._closed.set()
        for each in self._started:
            each.end()
        # none of the threads waits for an answer any more
        self._threads.shutdown(cancel_futures=True)
        until = time.monotonic() + END_S
        for each in self._started:
            each.close(max(0.0, until - time.monotonic()))

    def submit(self, line: str, about: str) -> Future[Any]:
        """Send ``line``, a JSON text, to a process when one is free; the future has the process's answer.

        The future raises :class:`WeftError` if that is an error, or if the process has ended. ``about``: what errors
        say that the process works on.
        """
        return self._threads.submit(self._answer, line, about)

    def _answer(self, line: str, about: str) -> Any:
        each, work = self._process(), Work()
        self._busy[each] = work
        try:
            each.send(line)
            while (answered := each.answers.readline()) == f'"{WAITS}"\n':
                work.still = 0
        except ConnectionError:
            answered = ""
        finally:
            del self._busy[each]
        # it was killed, perhaps in the middle of a line
        if not answered.endswith("\n"):
            raise WeftError(self._why(each, about))
        answer = json.loads(answered)
        if answer and "error" in answer:
            raise (UsageError if answer["usage"] else WeftError)(answer["error"])
        return answer

    def _why(self, each: LineProcess, about: str) -> str:
        """Return why a process has not answered."""
        process = each.process
        if each in self._still:
            return (
                f"process {process.pid}, which tokenizes {about}, has had no processor time for {STILL_S:g} seconds "
                "and was ended; if nobody has stopped it, look at the file system that it reads"
            )
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        return (
            f"a process that tokenizes {about} has ended with code {process.returncode}; if memory was short, "
            "set WEFT_TOKENIZE_PROCESSES=1"
        )

    def _watch(self) -> None:
        """End every process that has work and has stood still for :data:`STILL_S` seconds, until the context ends."""
        while not self._closed.wait(LOOK_S):
            # looks are counted, as this process may have been stopped for a while, too
            for each, work in [*self._busy.items()]:
                state, work.ticks = look_at(each.process.pid, ticks=work.ticks)
                work.still = 0 if state == "works" else work.still + 1
                if work.still * LOOK_S > STILL_S:
                    self._still.add(each)
                    each.end()

    def _process(self) -> LineProcess:
        """Return the process of this thread, which is started when it is first needed."""
        if not hasattr(self._own, "process"):
            root = str(Path(__file__).parents[2])
            path = os.pathsep.join(
                [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            )
            # one thread each, as there is a process for every core
            own = {"PYTHONPATH": path, "RAYON_NUM_THREADS": "1"}
            command = [sys.executable, "-m", self._module]
            with self._starting:
                if self._closed.is_set():
                    raise WeftError("the tokenization has ended")
                process = LineProcess(command, {**os.environ, **own}, self._task)
                self._started.append(process)
            self._own.process = process
        return self._own.process
