"""For tests of what takes time: others that take it away are measured again, a mistake takes it each time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

M = TypeVar("M")


def until_true(
    measure: Callable[[], M], holds: Callable[[M], bool], tries: int = 4
) -> M:
    """The first of at most ``tries`` measurements of which ``holds`` is true; with none the test fails and shows all.

    For what is said of times alone. Whatever else is asserted belongs into ``measure``, where once is enough to fail.
    """
    found = []
    for _ in range(tries):
        found.append(measure())
        if holds(found[-1]):
            return found[-1]
    return pytest.fail(f"measured {tries} times, and never as it should be: {found}")


def eventually(what: Callable[[], object], limit: float = 60) -> None:
    """Wait until ``what`` is true."""
    until = time.monotonic() + limit
    while not what():
        assert time.monotonic() < until, "it has not come to that"
        time.sleep(0.05)
