"""Processes of engines: those that have not joined are not waited for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from weft.cli.serve import _role_watch, serve_command
from weft.cluster.cluster_settings import ClusterSettings, read_cluster
from weft.cluster.engine_processes import EngineProcesses, gpus_of_engines
from weft.errors import UsageError
from weft.serve.placement_search import ServiceLimits


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


def test_gpus_are_dealt_to_the_ranks_of_engines_in_turn() -> None:
    assert gpus_of_engines(2, 2, ["0", "1", "2", "3"]) == ["0,1", "2,3"]
    assert gpus_of_engines(3, 1, ["4", "7"]) == ["4", "7", "4"]
    assert gpus_of_engines(2, 2, ["0", "1", "2"]) == ["0,1", "2,0"]
    assert gpus_of_engines(1, 4, ["0"]) == ["0"]  # which the engine itself refuses
    assert gpus_of_engines(2, 2, []) == []


@pytest.mark.parametrize(
    ("gpus", "share"), [([], "0.2"), (["0", "1"], "0.4"), (["0"], "0.2")]
)
def test_engines_share_the_memory_of_their_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[str], share: str
) -> None:
    program = tmp_path / "engine"
    program.write_text(
        f'#!/bin/sh\necho "$* $CUDA_VISIBLE_DEVICES" > {tmp_path}/said-$$\nexec sleep 60\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    processes = EngineProcesses(["", ""], "127.0.0.1:9", [], 0.4, print, 1, gpus)
    try:
        deadline = time.monotonic() + 20
        while not all(text := [p.read_text() for p in tmp_path.glob("said-*")]) or len(text) < 2:  # fmt: skip
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        processes.close()
    assert all(f"--share={share} " in line for line in text)
    seen = sorted(line.split()[-1] for line in text)
    if gpus:
        assert seen == sorted((gpus * 2)[:2])


@pytest.mark.parametrize(
    ("roles", "said"),
    [("{ ttft = 0.5 }", "give both or neither"), ("{ prefill = 3 }", "has 3 engines")],
)
def test_roles_that_cannot_be_are_refused(
    tmp_path: Path, roles: str, said: str
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f"[cluster]\nengines = 2\nroles = {roles}\n")
    with pytest.raises(UsageError, match=said):
        read_cluster(file).parts()


def test_limits_of_latency_let_roles_follow_the_load(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[cluster]\nroles = { ttft = 0.5, tpot = 0.05 }\n")
    watch = _role_watch(read_cluster(file))
    assert watch is not None and watch.limits == ServiceLimits(0.5, 0.05)  # type: ignore[attr-defined]
    assert _role_watch(ClusterSettings(engines=2)) is None
