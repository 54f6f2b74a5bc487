"""Threads for transfers: reads go before writes, because callers wait for reads."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

#: A transfer, and who waits for it.
Job = tuple[Callable[[], None], Future[None]]


class Threads:
    """Pool of threads that run transfers: first urgent ones, otherwise in the order of submission.

    ``count``: number of threads; ``name``: prefix of the threads' names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(count, name)
        self._urgent: deque[Job] = deque()
        self._others: deque[Job] = deque()

    def submit(self, move: Callable[[], None], urgent: bool = True) -> Future[None]:
        """Queue a transfer, and return its future.

        ``move``: function that makes the transfer; ``urgent``: whether it runs before all queued transfers that are not
        urgent.
        """
        future: Future[None] = Future()
        (self._urgent if urgent else self._others).append((move, future))
        # without a reference to this object
        self._executor.submit(_make_next, self._urgent, self._others)
        return future


def _make_next(urgent: deque[Job], others: deque[Job]) -> None:
    """Run the next transfer; there is at least one for every call."""
    try:
        move, future = urgent.popleft()
    except IndexError:
        move, future = others.popleft()
    if not future.set_running_or_notify_cancel():
        return
    try:
        move()
    except BaseException as error:  # whoever waits gets it
        future.set_exception(error)
    else:
        future.set_result(None)
