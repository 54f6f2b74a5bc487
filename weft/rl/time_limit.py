"""Calls of a user's code with a limit of time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

R = TypeVar("R")

#: Seconds after which a call that has caught :class:`OutOfTime` is interrupted again.
AGAIN_S = 0.5


class OutOfTime(BaseException):
    """Raised in a call that takes too long.

    It is not an :class:`Exception`, so that ``except Exception`` in the call does not catch it.
    """


def call_within(seconds: float, call: Callable[[], R]) -> R:
    """Return the result of ``call``, or raise :class:`OutOfTime` after ``seconds`` seconds; 0: no limit.

    In the main thread a signal interrupts the call, wherever Python code runs or waits. In another thread the call runs
    in a thread of its own, which is abandoned after the limit and may go on.
    """
    if not seconds:
        return call()
    if threading.current_thread() is threading.main_thread():
        return _interrupted(seconds, call)
    return _left_alone(seconds, call)


def _interrupted(seconds: float, call: Callable[[], R]) -> R:
    over = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not over:
            raise OutOfTime

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, interrupt)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        try:
            return call()
        finally:
            over = True
    finally:  # also if the signal came just then
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # somebody else's alarm
            left -= time.monotonic() - began
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), interval)


def _left_alone(seconds: float, call: Callable[[], R]) -> R:
    results, errors = list[R](), list[BaseException]()

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="weft-limited", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise OutOfTime
    return results[0]
