"""Processes of engines: those that have not joined are not waited for."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from service_faults import export_tiny

from tests.cluster.inprocess import alone, asked, until, written_by
from tests.started import Started
from weft.cli.serve import _role_watch, _routed, serve_command
from weft.cluster import engine_processes
from weft.cluster.cluster_settings import ClusterSettings, read_cluster
from weft.cluster.engine_processes import EngineProcesses, gpus_of_engines
from weft.errors import UsageError
from weft.generate.backend import TokenEvent
from weft.generate.open_engine import EngineOptions
from weft.generate.sampling import Sampling
from weft.serve.placement_search import ServiceLimits


def test_engines_that_have_not_joined_are_killed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while engines read their model: nobody waits for them, and none is left."""
    program = tmp_path / "engine"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    processes = EngineProcesses(["", ""], "127.0.0.1:9", {"": []}, 0.4, print)
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
    processes = EngineProcesses(["", ""], "127.0.0.1:9", {"": []}, 0.4, print, 1, gpus)
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


def test_a_start_that_fails_is_one_line_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(engine_processes, "LOOK_S", 0.001)
    monkeypatch.setattr(engine_processes, "AGAIN_S", 0.001)
    said, starts = list[str](), list[str]()

    def start(name: str, command: Sequence[str], variables: Mapping[str, str]) -> SimpleNamespace:  # fmt: skip
        starts.append(name)
        if len(starts) in (2, 3):
            raise RuntimeError("no place\nfor it")
        code = 3 if len(starts) == 1 else None
        return SimpleNamespace(poll=lambda: code, kill=int, wait=int)

    processes = EngineProcesses([""], "127.0.0.1:9", {"": []}, 0.4, said.append, start=start)  # fmt: skip
    processes.await_joined(lambda: 1)
    until(lambda: len(starts) == 4, 5)
    processes.close()
    assert said == [
        "engine-0 has ended with exit code 3; it is started again",
        "engine-0 cannot be started again (no place); this is tried every 0.001 s",
    ]
    assert processes._running["engine-0"].poll() is None


@pytest.mark.sampled(1)
@pytest.mark.slow(6)
def test_a_killed_process_is_started_again_and_its_answers_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The router of ``weft serve --engines 2`` with its processes; one of them is killed in the middle of an answer."""
    export_tiny(tmp_path)
    monkeypatch.setenv("WEFT_SECRET", "s")
    started: dict[str, Started] = {}

    def start(self: EngineProcesses, name: str) -> Started:
        words, env = self._commands[name][3:], self._environment
        started[name] = Started(*words, env=env, start_new_session=True)
        return started[name]

    monkeypatch.setattr(EngineProcesses, "_start", start)
    options = EngineOptions(
        checkpoint=str(tmp_path / "tiny"), requests=8, waiting=8, budget=64, policy="exact-fill", cache=4096,
        adapters=None, models=None, ema=False, weights="float", invariant=True, draft="", ahead=0, early_layer=0,
        plugins=(), layout="",
    )  # fmt: skip
    requests = [asked([i + 1, 5], 200, Sampling(i % 2, seed=i)) for i in range(4)]
    plain = [alone(request, 257)[0].written for request in requests]
    events = 0
    with _routed(ClusterSettings(engines=2), options, "tiny") as routed:
        links, first = routed.router.links, {**started}

        def seen(event: TokenEvent) -> None:
            nonlocal events
            events += 1
            if events == 100:
                assert links["engine-0"].flights
                first["engine-0"].kill()

        assert asyncio.run(written_by(routed.router, requests, seen)) == plain
        assert routed.router.continued
        until(lambda: len(links) == 2, 60)
        assert started["engine-0"] is not first["engine-0"]
        assert asyncio.run(written_by(routed.router, requests[:1])) == plain[:1]
        # as the HTTP server does when it ends; an engine that takes its time, as it may write files, is not killed
        os.kill(started["engine-1"].pid, signal.SIGSTOP)
        routed.router.close()
        until(lambda: not links)
        threading.Timer(1, os.kill, (started["engine-1"].pid, signal.SIGCONT)).start()
    assert [process.wait(20) for process in started.values()] == [0, 0]
    said = capsys.readouterr().err
    assert "engine-0 has ended with signal 9; it is started again" in said
    assert "engine engine-0 is given up: the connection has ended" in said
