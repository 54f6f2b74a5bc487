"""How processes that generate start: their threads, and processes of torchrun that are engines of their own."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from weft.generate import start
from weft.layout.layout import Layout
from weft.run import signals


def test_ranks_of_an_engine_keep_to_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv(start.LAUNCHED, raising=False)
    assert start._threads() == 8  # torchrun says 1 to everybody
    monkeypatch.setenv(start.LAUNCHED, "1")
    assert start._threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "12")
    assert start._threads() == 8


def test_processes_of_torchrun_are_engines_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has its own device and an equal share of the cores, and meets nobody."""
    settled = list[tuple[str, int]]()
    monkeypatch.setattr(start, "settle_in", lambda *how: settled.append(how))
    monkeypatch.setattr(
        start, "backend_of", lambda device: ("nccl", torch.device(device, 1))
    )
    monkeypatch.setattr(start, "_threads", lambda: 4)
    with start.as_engine(Layout(), "cuda") as device:
        assert (device, settled) == ("cuda", [])  # started by hand
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with start.as_engine(Layout(), "cuda") as device:
        assert (device, settled) == ("cuda:1", [("cuda", 4)])
    assert not torch.distributed.is_initialized()


def test_signals_are_left_to_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that come after the last step: the rank ends with 0, as the first one does."""
    before = {number: signal.getsignal(number) for number in signals.stop_signals()}
    monkeypatch.setattr(signals, "requests", signals.StopRequests())
    try:
        signals.leave_signals_to_others()
        with signals.noted_signals(signals.stop_signals()) as received:
            signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        signals.requests._since -= signals.REPEAT_S + 1
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
