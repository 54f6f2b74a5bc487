"""Processes of this host that do the tasks of a data run; messages are JSON over pipes to own children."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from weft.curation.shard_tasks import TaskSetting, Words, run_task
from weft.curation.work_folder import RESUME
from weft.errors import UsageError, WeftError
from weft.net.child_pipe import (
    Child,
    PipeEnd,
    call_in_child,
    open_child,
    parent_pipe,
    ready_pipes,
)

#: How often a task is given to a process when the process that did the task was ended from outside.
ATTEMPTS = 2

#: Called with the index of a task and its result, as soon as there is one.
OnDone = Callable[[int, Words], None]
#: Does tasks, in any order.
Engine = Callable[[Sequence[Words], OnDone], None]


def setting_words(setting: TaskSetting) -> Words:
    """Convert ``setting`` to JSON values, from which another process builds it by :func:`setting_from`."""
    pipeline = setting.pipeline.model_dump(mode="json", by_alias=True)
    return {"pipeline": pipeline, "work": str(setting.work)}


def setting_from(words: Words) -> TaskSetting:
    """Build a setting from the JSON values that :func:`setting_words` returned, in a process that runs tasks."""
    from weft.curation.read_pipeline import build_pipeline

    return TaskSetting(build_pipeline(words["pipeline"]), Path(words["work"]))


@contextmanager
def local_engine(setting: TaskSetting, workers: int) -> Iterator[Engine]:
    """Yield an engine that does tasks in processes of this host.

    ``workers``: number of processes; 0: this process does the tasks itself.
    """
    if not workers:

        def here(tasks: Sequence[Words], done: OnDone) -> None:
            for index, task in enumerate(tasks):
                done(index, run_task(setting, task))

        yield here
        return
    pool = _Pool(json.dumps(setting_words(setting)).encode(), workers)
    try:
        yield pool.do
    finally:
        pool.close()


@dataclass
class _Busy:
    """A child with the task that it does; ``index`` is None for a child without a task."""

    child: Child
    index: int | None = None


class _Pool:
    """Children that do tasks. They are started when there is something for them to do."""

    def __init__(self, setting: bytes, workers: int) -> None:
        self._setting, self._workers = setting, workers
        self._children: list[_Busy] = []

    def close(self) -> None:
        for busy in self._children:
            _end(busy.child)
        self._children = []

    def do(self, tasks: Sequence[Words], done: OnDone) -> None:
        waiting = deque(range(len(tasks)))
        attempts = [0] * len(tasks)
        left = len(tasks)
        while left:
            self._give(waiting, attempts, tasks)
            pipes = {b.child.pipe: b for b in self._children if b.index is not None}
            for pipe in ready_pipes(pipes):
                busy = pipes[pipe]
                index, busy.index = busy.index, None
                assert index is not None
                try:
                    reply = json.loads(busy.child.pipe.recv_bytes())
                except (EOFError, OSError):
                    self._replace(busy, tasks[index], attempts[index])
                    waiting.appendleft(index)
                    continue
                done(index, replied_result(reply))
                left -= 1

    def _give(
        self, waiting: deque[int], attempts: list[int], tasks: Sequence[Words]
    ) -> None:
        """Give waiting tasks to children that have none."""
        idle = [busy for busy in self._children if busy.index is None]
        while waiting and (idle or len(self._children) < self._workers):
            if idle:
                busy = idle.pop()
            else:
                busy = _Busy(open_child(_start))
                busy.child.pipe.send_bytes(self._setting)
                self._children.append(busy)
            busy.index = waiting.popleft()
            attempts[busy.index] += 1
            with suppress(OSError):  # that it has ended is noticed by reading
                busy.child.pipe.send_bytes(json.dumps(tasks[busy.index]).encode())

    def _replace(self, busy: _Busy, task: Words, attempts: int) -> None:
        """Take a child that has ended out of the pool. Raises :class:`WeftError` if its task has ended others."""
        self._children.remove(busy)
        code = busy.child.process.wait()
        _end(busy.child)
        if attempts >= ATTEMPTS:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            memory = " (no memory left, perhaps: --workers 1 needs less)" if code == -9 else ""  # fmt: skip
            raise WeftError(
                f"the process of {task_name(task)} ended by {how}{memory}, and so did another one; {RESUME}"
            )


def task_name(task: Words) -> str:
    """Return the name of a task in error lines, such as "shard 3 (filter)", from the JSON values that describe the
    task.
    """
    kind: str = task["kind"]
    return f"shard {task['shard']} ({kind})" if "shard" in task else f"the task {kind!r}"  # fmt: skip


def _start(pipe: PipeEnd) -> Any:
    return call_in_child("weft.curation.task_workers", "serve_tasks", pipe)


def _end(child: Child) -> None:
    with suppress(OSError):
        child.process.kill()
    child.process.wait()
    child.pipe.close()


def serve_tasks(handle: int) -> None:
    """Do the tasks that the parent process sends, until the pipe ends. ``handle``: file descriptor of the pipe."""
    # one process for each core: libraries must not take all cores in each
    for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    pipe = parent_pipe(handle)
    try:
        words = json.loads(pipe.recv_bytes())
        setting = cache(lambda: setting_from(words))
        while True:
            task = json.loads(pipe.recv_bytes())
            pipe.send_bytes(json.dumps(reply_to(setting, task)).encode())
    except (EOFError, OSError):  # the parent has ended
        return


def reply_to(setting: Callable[[], TaskSetting], task: Words) -> Words:
    """Run a task, and return the reply to the process that sent it: a result, or the line of an error.

    ``setting``: function that returns the shared settings; an error that it raises is part of the reply, too. ``task``:
    JSON values that describe the task.
    """
    try:
        return {"result": run_task(setting(), task)}
    except Exception as error:
        return {"error": _line_of(error), "usage": isinstance(error, UsageError)}


def replied_result(reply: Words) -> Words:
    """Return the result of a task from the reply of :func:`reply_to`. If the reply holds an error, raise it as
    :class:`WeftError` or :class:`UsageError`.
    """
    if "error" in reply:
        kind = UsageError if reply["usage"] else WeftError
        raise kind(reply["error"])
    result: Words = reply["result"]
    return result


def _line_of(error: Exception) -> str:
    if isinstance(error, WeftError):
        return str(error)
    if os.environ.get("WEFT_DEBUG", "0") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
