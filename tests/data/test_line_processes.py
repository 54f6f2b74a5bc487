"""Processes that answer lines: what they get, when they count as still, and that nobody waits for them without end."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from weft.data import line_processes
from weft.data.line_processes import LineProcesses
from weft.errors import WeftError
from weft.net.process import ProcessSight

#: Takes the lock that a line names, and answers with its arguments and its task.
WAITING = """\
import sys
from pathlib import Path
from weft import lock_wait
from weft.cache import locked
from weft.data.line_worker import answer_lines

lock_wait.LOOK_S = 0.05

def begin(task):
    def answer(line):
        with locked(Path(line)):
            return [sys.argv[1:], task]
    return answer

answer_lines(begin)
"""


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_processes, "STILL_S", 0.5)
    monkeypatch.setattr(line_processes, "LOOK_S", 0.05)
    monkeypatch.setattr(line_processes, "END_S", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "waiting_worker.py").write_text(WAITING)
    (tmp_path / "deaf_worker.py").write_text("import time\ntime.sleep(60)\n")


def test_the_task_is_no_argument_and_a_wait_for_a_lock_no_standstill(
    tmp_path: Path, impatient: None
) -> None:
    path = tmp_path / "lock"
    task = {"path": "https://me:word@host/a?sig=1"}
    with LineProcesses("waiting_worker", task, 1) as processes, open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = processes.submit(f'"{path}"', "a.jsonl")
        time.sleep(1.2)
        assert not answer.done()
        lock.close()
        assert answer.result(60) == [[], task]


@pytest.mark.parametrize("watched", [True, False])
def test_a_process_that_no_signal_ends_holds_nobody(
    watched: bool, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a call to a file system that hangs: it is given up by the watch, or as the context ends."""
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: None)
    state = "blocked" if watched else "works"
    monkeypatch.setattr(
        line_processes, "look_at", lambda pid, ticks: ProcessSight(state, 5)
    )
    with LineProcesses("deaf_worker", {}, 1) as processes:
        answer = processes.submit("x" * 2**20, "a.jsonl")  # more than is taken unread
        if watched:
            with pytest.raises(WeftError, match=r"process \d+, which tokenizes a\.jsonl"):  # fmt: skip
                answer.result(60)
        while not processes._started:
            time.sleep(0.01)
    try:
        assert answer.exception(0) is not None
    finally:
        os.kill(processes._started[0].process.pid, signal.SIGKILL)
        processes._started[0].process.wait()
