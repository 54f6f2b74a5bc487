"""Processes that answer lines of JSON with lines of JSON, for work that Python does on one core only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weft.errors import UsageError, WeftError


class LineProcesses:
    """Processes that run ``python -m module TASK``, each of which answers one line at a time.

    ``module``: module that reads lines from the standard input, and answers each with ``null``, with a result, or with
    ``{"error": ..., "usage": ...}``. ``task``: what all processes get as JSON when they start. ``count``: number of
    processes, which start when they are needed. Leaving the context ends the processes at once.
    """

    def __init__(self, module: str, task: Mapping[str, Any], count: int) -> None:
        self._module, self._task = module, json.dumps(task)
        self._own = threading.local()
        self._started: list[subprocess.Popen[str]] = []
        self._closed = threading.Event()
        # Ctrl-C is for this process: the others have SIGINT blocked from their first instant, as these threads do
        self._threads = ThreadPoolExecutor(
            count,
            initializer=signal.pthread_sigmask,
            initargs=(signal.SIG_BLOCK, {signal.SIGINT}),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all processes. What they have not finished is lost."""
        self._closed.set()
        for process in self._started:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            process.communicate()

    def submit(self, line: str, about: str) -> Future[Any]:
        """Send ``line``, a JSON text, to a process when one is free; the future has the process's answer.

        The future raises :class:`WeftError` if that is an error, or if the process has ended. ``about``: what errors
        say that the process works on.
        """
        return self._threads.submit(self._answer, line, about)

    def _answer(self, line: str, about: str) -> Any:
        process = self._process()
        assert process.stdin and process.stdout
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answered = process.stdout.readline()
        except BrokenPipeError:
            answered = ""
        if not answered.endswith(
            "\n"
        ):  # it was killed, perhaps in the middle of a line
            raise WeftError(
                f"a process that tokenizes {about} has ended with code {process.wait()}; if memory was short, "
                "set WEFT_TOKENIZE_PROCESSES=1"
            )
        answer = json.loads(answered)
        if answer and "error" in answer:
            raise (UsageError if answer["usage"] else WeftError)(answer["error"])
        return answer

    def _process(self) -> subprocess.Popen[str]:
        """Return the process of this thread, which is started when it is first needed."""
        if not hasattr(self._own, "process"):
            if self._closed.is_set():
                raise WeftError("the tokenization has ended")
            root = str(Path(__file__).parents[2])
            path = os.pathsep.join(
                [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            )
            process = subprocess.Popen(
                [sys.executable, "-m", self._module, self._task],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                # one thread each, as there is a process for every core
                env={**os.environ, "PYTHONPATH": path, "RAYON_NUM_THREADS": "1"},
            )
            self._started.append(process)
            if self._closed.is_set():  # meanwhile
                process.kill()
            self._own.process = process
        return self._own.process
