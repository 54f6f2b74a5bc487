"""Processes that tokenize pieces of a source. They get pieces as lines of JSON, and answer with a line for each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from weft.data.source_piece import SourcePiece
from weft.errors import UsageError, WeftError
from weft.plugins import loaded

if TYPE_CHECKING:
    from weft.recipe import Source


class TokenizeProcesses:
    """Worker processes that tokenize pieces of ``source`` into ``folder``, each one piece at a time.

    ``opening``: ids that begin every document. ``count``: number of processes. Leaving the context ends the processes
    at once.
    """

    def __init__(
        self, folder: Path, source: Source, opening: Sequence[int], count: int
    ) -> None:
        task = {
            "folder": str(folder),
            "source": source.model_dump(mode="json"),
            "opening": [*opening],
            # which may bring the place that the source is read from
            "plugins": sorted(loaded) if "://" in (source.path or "") else [],
        }
        self._task = json.dumps(task)
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

    def submit(self, piece: SourcePiece) -> Future[None]:
        """Begin to tokenize ``piece`` when a process is free. Return a future that is done when all its tokens are
        written, and that raises :class:`WeftError` if that fails.
        """
        return self._threads.submit(self._tokenize, piece)

    def _tokenize(self, piece: SourcePiece) -> None:
        process = self._process()
        assert process.stdin and process.stdout
        try:
            process.stdin.write(json.dumps(asdict(piece)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WeftError(
                f"a process that tokenizes {piece.files[0]} has ended with code {process.wait()}; if memory was short, "
                "set WEFT_TOKENIZE_PROCESSES=1"
            )
        if answer := json.loads(line):
            raise (UsageError if answer["usage"] else WeftError)(answer["error"])

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
                [sys.executable, "-m", "weft.data.tokenize_worker", self._task],
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
