"""Processes of roles where Ray places them: the same run as on this host, and processes that end or are lost."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.rl.test_rl_loader import TREE, parameters, recipe, records
from weft.api import start as train
from weft.cluster.engine_processes import ending
from weft.errors import UsageError, WeftError
from weft.net.sockets import own_address
from weft.recipe import Recipe
from weft.recipe.roles_section import Roles
from weft.rl import ray_places
from weft.rl.open_places import run_host
from weft.rl.ray_places import (
    LOST,
    ProcessHost,
    RayPlace,
    RayProcess,
    close_ray,
    open_ray_places,
)
from weft.train.setup import prepare

WITH_RAY = "weft[ray] is not installed: pip install 'weft[ray]'"
LOSS = {"start": {"steps": 0}, "loss": {"kl": "k3", "kl_weight": 0.1}}


@pytest.fixture
def ray() -> Iterator[Any]:
    yield pytest.importorskip("ray", reason=WITH_RAY)
    close_ray()


def given(placement: str) -> Recipe:
    """A run of which two processes of one thread each write answers and hold the reference model."""
    roles = {
        "placement": placement,
        "rollout": {"ranks": 1, "threads": 1},
        "reference": {"ranks": 1, "threads": 1},
    }
    steps = TREE["train"] | {"steps": 2}
    return recipe(rl=TREE["rl"] | LOSS, roles=roles, train=steps)


@pytest.mark.slow(60)
def test_a_run_is_the_same_where_ray_places_its_roles(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = RayPlace.start, list[str]()

    def spied(self: RayPlace, command: Any, environment: Any) -> Any:
        started.append(command[1])
        return start(self, command, environment)

    monkeypatch.setattr(RayPlace, "start", spied)
    here = train(given("local"), out=tmp_path / "here")
    placed = train(given("ray"), out=tmp_path / "placed")
    a, b = parameters(here), parameters(placed)
    assert all(torch.equal(a[name], b[name]) for name in a)
    phases = [records(outcome.run, "rollout") for outcome in (here, placed)]
    for own, other in zip(*phases, strict=True):
        for name in ("reward", "weights_bytes", "reference_sent_bytes"):
            assert own[name] == other[name]
    assert sorted(started) == ["weft", "weft.rl.role_process"]
    assert not ray.is_initialized()


@pytest.mark.slow(30)
def test_a_place_is_used_again_after_its_process_or_its_host_is_lost(ray: Any) -> None:
    (place,) = open_ray_places("127.0.0.1", 1, "cpu", 0, 60.0)
    assert place.meeting().port > 1023
    program = (
        "import os, time; time.sleep(0 if 'WEFT_X' in os.environ else 600); exit(7)"
    )
    sleeps = ["-c", program]
    process = place.start(sleeps, {"WEFT_X": "1", "OTHER": "2"})
    assert process.wait(60) == 7 == process.poll()
    process = place.start(sleeps, {})
    assert process.poll() is None
    process.kill()
    assert process.poll() == -9
    process = place.start(sleeps, {})
    ray.kill(place._actor)
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert process.poll() == LOST
    assert place.start(sleeps, {"WEFT_X": "1"}).wait(60) == 7


def test_what_ray_cannot_place_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'weft\[ray\]'"):
        prepare(given("ray"))
    nothing = {"placement": "ray"}
    with pytest.raises(UsageError, match="there are none; set roles"):
        prepare(recipe(rl=TREE["rl"] | LOSS, roles=nothing))
    named = nothing | {"rollout": {"ranks": 1, "device": "cuda:1"}}
    with pytest.raises(UsageError, match="'ray' Ray chooses it; use 'cuda'"):
        prepare(recipe(rl=TREE["rl"] | LOSS, roles=named))


def test_what_ray_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its actor is ended, which could start it later."""

    class RayError(Exception):
        pass

    class RayActorError(RayError):
        pass

    class GetTimeoutError(RayError):
        pass

    answers: list[Exception] = []

    def get(asked: object, timeout: float) -> None:
        raise answers.pop(0)

    kinds = {each.__name__: each for each in (RayError, RayActorError, GetTimeoutError)}
    ended = list[object]()
    faked = SimpleNamespace(get=get, kill=ended.append, exceptions=SimpleNamespace(**kinds))  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", faked)
    monkeypatch.setattr(RayPlace, "_open", lambda self: None)
    place = RayPlace({}, 1.0)
    place._actor = SimpleNamespace(start=SimpleNamespace(remote=lambda *_: None))
    for answers, said in (
        ([GetTimeoutError("it\ntook long")], "of Weft: took long$"),
        ([RayActorError("gone"), RayError("")], "of Weft: RayError$"),
    ):
        with pytest.raises(WeftError, match=said):
            place.start([], {})
        assert not answers and ended.pop() is place._actor


def test_hosts_that_cannot_reach_the_run_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cluster:
        def nodes(self) -> list[dict[str, bool]]:
            return [{"Alive": True}, {"Alive": True}, {"Alive": False}]

    monkeypatch.setattr(ray_places, "_joined_ray", Cluster)
    with pytest.raises(UsageError, match="Ray has 2 hosts, and this run listens at 12"):
        open_ray_places("127.0.0.1", 1, "cpu", 1, 1.0)


def test_a_run_listens_where_the_cluster_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    monkeypatch.setattr(ray_places, "_joined_ray", lambda: SimpleNamespace(util=util))
    placed = Roles(placement="ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert run_host(placed) == own_address()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert run_host(placed) == "10.0.0.1"
    assert run_host(Roles()) == own_address()
    named = Roles.model_validate(
        {"placement": "ray", "rollout": {"listen": "10.0.0.9:7000"}}
    )
    assert run_host(named) == "10.0.0.9"


def test_a_lost_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class RayError(Exception):
        pass

    def get(asked: object, timeout: float) -> None:
        raise RayError

    faked = SimpleNamespace(get=get, exceptions=SimpleNamespace(RayError=RayError))
    monkeypatch.setitem(sys.modules, "ray", faked)
    ask = SimpleNamespace(remote=lambda: None)
    process = RayProcess(SimpleNamespace(poll=ask, kill=ask), 7, "10.0.0.2")
    assert process.poll() == LOST
    assert ending(process, LOST) == "the loss of its Ray actor on the host 10.0.0.2"
    assert ending(SimpleNamespace(), LOST) == "signal 9"
    assert ending(SimpleNamespace(), 3) == "exit code 3"


class FullCluster:
    """A stand-in for the package ray: one actor, and no room for another until ``gives`` says so."""

    class exceptions:
        class RayError(Exception): ...

        class RayActorError(RayError): ...

        class GetTimeoutError(RayError): ...

    def __init__(self) -> None:
        self.gives, self.waits = True, list[float]()
        self.variables = list[dict[str, str]]()
        ask = SimpleNamespace(remote=lambda *words: self.variables.extend(words[1:]))
        actor = SimpleNamespace(meeting=ask, start=ask)
        self._kind = SimpleNamespace(remote=lambda: actor)

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **options: self._kind)

    def get(self, asked: Any, timeout: float) -> Any:
        if self.gives:
            return ("127.0.0.1", 9)
        self.waits.append(timeout)
        assert len(self.waits) < 5, "it waits although the run ends"
        raise self.exceptions.GetTimeoutError


def test_a_place_that_is_closed_waits_for_no_other_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FullCluster()
    monkeypatch.setitem(sys.modules, "ray", cluster)
    place = RayPlace({"num_gpus": 0}, 600.0)
    assert place.meeting() == ("127.0.0.1", 9)
    cluster.gives = False
    place.close()
    with pytest.raises(WeftError, match="Ray has found no place"):
        place._open()
    assert len(cluster.waits) == 1 and cluster.waits[0] < 1


@pytest.mark.parametrize("gpus", [0, 1])
def test_ray_alone_gives_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    cluster = FullCluster()
    monkeypatch.setitem(sys.modules, "ray", cluster)
    place = RayPlace({"num_gpus": gpus}, 600.0)
    place.start(["-c", ""], {"CUDA_VISIBLE_DEVICES": "", "WEFT_X": "1"})
    (variables,) = cluster.variables
    assert ("CUDA_VISIBLE_DEVICES" in variables) is not bool(gpus)
    assert variables["WEFT_X"] == "1"


def test_a_host_ends_the_process_before_it_starts_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = list[str]()

    class Process:
        pid = 1

        def __init__(self, *words: Any, **named: Any) -> None:
            calls.append("start")

        def kill(self) -> None:
            calls.append("kill")

        def wait(self) -> int:
            calls.append("wait")
            return -9

    monkeypatch.setattr(ray_places.subprocess, "Popen", Process)
    host = ProcessHost()
    host.start([], {})
    host.start([], {})
    assert calls == ["start", "kill", "wait", "start"]
