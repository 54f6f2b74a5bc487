"""Futures of what an engine's thread is asked to do."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from weft.errors import WeftError
from weft.generate.engine_thread import EngineThread


@pytest.mark.parametrize("cancels", [False, True])
def test_a_cancelled_future_takes_no_error(
    caplog: pytest.LogCaptureFixture, cancels: bool
) -> None:
    """Else a traceback is logged when the engine stops."""
    first: Future[None] = Future()
    thread: Any = SimpleNamespace(_look=print, call=lambda action: first)
    future = EngineThread.call_until(thread, lambda: None)
    if cancels:
        future.cancel()
    first.set_exception(WeftError("the engine has stopped"))
    assert cancels or isinstance(future.exception(0), WeftError)
    assert not caplog.records
