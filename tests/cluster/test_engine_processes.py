"""Processes of engines: those that have not joined are not waited for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from weft.cli.serve import serve_command
from weft.cluster.engine_processes import EngineProcesses
from weft.errors import UsageError


def test_engines_that_have_not_joined_are_killed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while engines read their model: nobody waits for them, and none is left."""
    program = tmp_path / "engine"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    processes = EngineProcesses(["", ""], "127.0.0.1:9", [], 0.4, print)
    begun = time.monotonic()
    processes.close()
    assert time.monotonic() - begun < 5
    assert all(process.poll() for process in processes._running.values())


def test_a_policy_that_nobody_would_follow_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--dispatch is for --engines"):
        serve_command("a model", dispatch="session")
    with pytest.raises(UsageError, match="set policy in the file"):
        serve_command("a model", dispatch="session", cluster=tmp_path / "file")
