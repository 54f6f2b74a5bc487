"""Threads for transfers, of which some cannot wait: what is read is wanted soon, and what is written has time."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

#: A transfer and who waits for it; None ends a thread.
Job = tuple[Callable[[], None], Future[None]] | None


class Jobs:
    """What is to be done: the ``urgent`` jobs first, each kind in its order."""

    def __init__(self) -> None:
        self.urgent: deque[Job] = deque()
        self.others: deque[Job] = deque()
        self._changed = threading.Condition()

    def put(self, job: Job, urgent: bool) -> None:
        with self._changed:
            (self.urgent if urgent else self.others).append(job)
            self._changed.notify()

    def take(self) -> Job:
        with self._changed:
            self._changed.wait_for(lambda: self.urgent or self.others)
            return (self.urgent or self.others).popleft()


class Threads:
    """So many threads that make transfers until nobody can ask for more."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs = Jobs()
        for i in range(count):
            threading.Thread(target=_work, args=(self._jobs,), name=f"{name}-{i}", daemon=True).start()
        weakref.finalize(self, _end, self._jobs, count)

    def submit(self, move: Callable[[], None], urgent: bool = True) -> Future[None]:
        found: Future[None] = Future()
        self._jobs.put((move, found), urgent)
        return found


def _end(jobs: Jobs, count: int) -> None:
    for _ in range(count):
        jobs.put(None, urgent=False)  # behind what has been asked for


def _work(jobs: Jobs) -> None:
    while (job := jobs.take()) is not None:
        move, found = job
        if found.set_running_or_notify_cancel():
            try:
                move()
            except BaseException as error:  # whoever waits gets it
                found.set_exception(error)
            else:
                found.set_result(None)
        del job, move, found  # a buffer is not to live until the next job comes
