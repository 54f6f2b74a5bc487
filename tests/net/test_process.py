"""One look at a process: it lives, works, is stopped, is gone, or another has its number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.measured import eventually
from weft.net import process


@pytest.mark.parametrize("proc", ["/proc", "/nowhere"])
def test_a_process_through_its_life(proc: str) -> None:
    """Also as on a system without ``/proc``."""
    with mock.patch.object(process, "PROC", Path(proc)):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
        started = process.started_at(child.pid)
        seen = lambda: process.look_at(child.pid, started).state  # noqa: E731
        assert started and seen() == "works"  # no look before that could tell
        assert process.look_at(child.pid, started + 9).state == "gone"
        child.send_signal(signal.SIGSTOP)
        eventually(lambda: seen() == "stopped")
        child.kill()
        # not waited for yet, it is a zombie
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert seen() == "gone"
        child.wait()
        assert seen() == "gone" and process.started_at(child.pid) == 0


def test_work_is_processor_time_since_the_last_look() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)

    def idle() -> tuple[str, str]:
        first = process.look_at(child.pid)
        return process.look_at(child.pid, None, first.ticks).state, first.state

    eventually(lambda: idle() == ("idle", "works"))
    child.kill()
    child.wait()


def test_a_call_that_hangs_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it idle: whether it ends depends on the disk. The first look cannot tell."""
    monkeypatch.setattr(process, "_states", lambda pid: {"S", "D"})
    monkeypatch.setattr(process, "_stat", lambda pid: process._Stat("S", 7, 1.0))
    seen = [process.look_at(os.getpid(), ticks=ticks).state for ticks in (-1, 6, 7)]
    assert seen == ["works", "works", "blocked"]


def test_processes_of_one_machine_have_its_name() -> None:
    code = "from weft.net.process import machine_id; print(machine_id('pid', 'net'))"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == process.machine_id("pid", "net")
