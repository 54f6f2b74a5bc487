"""A reference model in processes of its own: the same run to the last bit, bytes by formula, faults in one line."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.rl.seeming_process import SeemingProcess
from tests.rl.test_rl_loader import TREE, parameters, recipe, records
from weft.api import start as train
from weft.errors import UsageError, WeftError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.net.endpoint import Endpoint
from weft.net.wire import SealedConnection
from weft.recipe import Recipe
from weft.rl import reference_processes, rl_loader, role_links, role_process
from weft.rl.log_probabilities import token_log_probabilities
from weft.rl.reference_processes import ReferenceProcesses
from weft.rl.role_process import SECRET, role_channel, run_role_process
from weft.rl.role_texts import NUMBER_BYTES, TOKEN_BYTES
from weft.train.setup import build_for_training, prepare

LOSS = {"start": {"steps": 0}, "loss": {"kl": "k3", "kl_weight": 0.1}}


def given(ranks: int = 1, **sections: Any) -> Recipe:
    """A run whose loss has a reference model, in ``ranks`` processes of its own."""
    roles = {"reference": {"ranks": ranks, "threads": 1}} if ranks else None
    steps = TREE["train"] | {"steps": 3, "dtype": "float64"}
    tree: dict[str, Any] = {"rl": TREE["rl"] | LOSS, "roles": roles, "train": steps}
    return recipe(**tree | sections)


def answered(
    layout: dict[str, Any] | None, ranks: int
) -> tuple[list[np.ndarray], list[np.ndarray], Any]:
    """Log-probabilities of two phases' texts by processes with ``layout``, the same by plain passes, and bytes."""
    reference = {"ranks": ranks, "threads": 1} | ({"layout": layout} if layout else {})
    job = prepare(given(roles={"reference": reference}))
    mesh = Mesh.single()
    rng = np.random.default_rng(4)
    texts = []
    for length in (5, 9, 3, 12):
        marks = np.arange(length) >= length // 2
        texts.append((rng.integers(0, 257, length).tolist(), marks.tolist()))
    model, state = build_for_training(job.shape, mesh, given(0))
    wanted = token_log_probabilities(model, state, mesh, texts, 1, 1, 16)
    processes = ReferenceProcesses(job, mesh, lambda: False)  # type: ignore[arg-type]
    try:
        for _ in range(2):
            processes.request(texts)
            got = processes.log_probabilities()
        figures = processes.take_figures()
    finally:
        processes.close()
    tokens, marked = 29, sum(sum(marks) for _, marks in texts)
    assert figures.pop("reference_s") > 0
    assert figures == {
        "reference_sent_bytes": 2 * TOKEN_BYTES * tokens,
        "reference_received_bytes": 2 * NUMBER_BYTES * marked,
    }
    assert set(processes.take_figures().values()) == {0}
    return got, wanted, figures


@pytest.mark.usefixtures("forked_python")  # the soak test below has interpreters
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (None, 1),
        pytest.param(None, 2, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_processes_give_what_the_policys_ranks_would(
    layout: dict[str, Any] | None, ranks: int
) -> None:
    got, wanted, _ = answered(layout, ranks)
    for own, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-10, atol=1e-13)
        assert (own != 0).sum() == (other != 0).sum() > 0


@pytest.mark.soak
@pytest.mark.slow(8)
def test_a_run_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """Without the reference model beside the policy, and with the bytes of every phase in its records."""
    beside = train(given(0), out=tmp_path / "beside")
    apart = train(given(1), out=tmp_path / "apart")
    a, b = parameters(beside), parameters(apart)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert records(apart.run, "policy")[-1]["kl"] > 0
    for phase in records(apart.run, "rollout"):
        tokens = phase["reference_sent_bytes"] / TOKEN_BYTES
        marked = phase["reference_received_bytes"] / NUMBER_BYTES
        assert marked == pytest.approx(16 * phase["length"]) and marked < tokens


@pytest.mark.usefixtures("forked_python")
@pytest.mark.slow(3)
def test_a_process_that_is_killed_ends_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = rl_loader.RlLoader._begin

    def killed(self: Any, phase: int) -> None:
        if phase == 1:
            os.kill(self.reference.links.processes[0].pid, signal.SIGKILL)
        begin(self, phase)

    monkeypatch.setattr(rl_loader.RlLoader, "_begin", killed)
    with pytest.raises(WeftError, match=r"the process 0 of roles.reference has ended"):
        train(given(1), out=tmp_path / "run")


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    def said(**sections: Any) -> str:
        with pytest.raises(WeftError) as error:
            prepare(given(**sections))
        return str(error.value)

    def role(**settings: Any) -> str:
        return said(roles={"reference": {"ranks": 1} | settings})

    assert "[roles.reference] is about processes" in role(ranks=0, threads=2)
    assert "has no reference model" in said(rl=TREE["rl"] | {"start": {"steps": 0}})
    assert "after these steps the reference" in said(
        rl=TREE["rl"] | LOSS | {"start": {"steps": 1}}
    )
    assert "does not divide a model over" in role(layout={"tp": 2})
    assert "no GPU; use 'cpu'" in role(device="cuda:7") or torch.cuda.is_available()
    assert role(model=str(tmp_path / "no")).startswith("roles.reference.model: ")
    with pytest.raises(UsageError, match=r"roles\.reference\.device = 'tpu'"):
        given(roles={"reference": {"device": "tpu"}})
    rollout = {"rollout": {"device": "cpu"}}
    assert "set roles.rollout.ranks, or leave" in said(roles=rollout)
    rollout["rollout"] |= {"ranks": 1, "device": "cuda:9"}
    assert "no GPU; use 'cpu'" in said(roles=rollout) or torch.cuda.is_available()
    assert given(2).roles.reference.process_layout == Layout(dp=2)


class Played:
    """Reference processes, ``count`` of them, all of which the test plays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.placed = [SeemingProcess() for _ in range(count)]

        def start(
            name: str, roles: Any, endpoint: Endpoint, secret: str, wait: float
        ) -> Any:
            self.address = endpoint.address
            self.channel = Endpoint("127.0.0.1").join(role_channel(name), secret)
            return self.placed

        monkeypatch.setattr(role_links, "start_role_processes", start)
        monkeypatch.setattr(
            reference_processes, "reference_about", lambda job: {"shape": "small"}
        )
        rollout = SimpleNamespace(address=("127.0.0.1", 0))
        job: Any = SimpleNamespace(
            recipe=SimpleNamespace(train=SimpleNamespace(timeout=40)),
            roles=SimpleNamespace(rollout=rollout),
        )
        self.run = ReferenceProcesses(job, Mesh.single(), lambda: False)

    def join(self, rank: int) -> SealedConnection:
        """The link of the process ``rank``, which has learned its model before the run asks it for anything.

        The first request comes after a whole phase of answers.
        """
        link = self.channel.dial(self.address, {"rank": rank}, 5.0)
        assert link.receive(limit=5.0).head == {"shape": "small"}
        return link

    def said(self) -> str:
        """What the run says of its reference model, after it has asked."""
        begun = time.monotonic()
        self.run.request([([1, 2], [False, True])])
        with pytest.raises(WeftError) as error:
            self.run.log_probabilities()
        # of the limit of 30 s
        assert time.monotonic() - begun < 15
        return str(error.value)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    opened = list[Played]()

    def play(count: int) -> Played:
        opened.append(Played(monkeypatch, count))
        return opened[-1]

    yield play
    for each in opened:
        each.run.close()
        each.channel.endpoint.close()


def test_the_cause_of_a_failure_is_told_at_once(played: Any) -> None:
    two = played(2)
    first, second = two.join(0), two.join(1)
    second.send({"kind": "error", "why": "no memory"})
    assert two.said() == "the process 1 of roles.reference: no memory"
    first.close()
    second.close()


def test_a_cause_that_comes_with_the_end_is_told_and_not_the_exit_code(
    played: Any,
) -> None:
    alone = played(1)
    alone.join(0).send({"kind": "error", "why": "no memory"})
    alone.placed[0].code = 1
    assert alone.said() == "the process 0 of roles.reference: no memory"


def test_a_process_that_ends_without_a_word_is_named(played: Any) -> None:
    two = played(2)
    two.placed[1].code = 0
    assert "the process 1 of roles.reference has ended with exit code 0" in two.said()


def test_a_model_that_is_late_is_named_and_nothing_more_is_awaited(played: Any) -> None:
    alone = played(1)
    link = alone.join(0)
    alone.run.links.limit = 0.3
    alone.run.request([([1, 2], [False, True])])
    link.send({"kind": "ready"})  # too late: it has got no texts
    with pytest.raises(WeftError, match=r"has not built its model for 0\.3 s"):
        alone.run.log_probabilities()


@pytest.mark.parametrize(
    "error", [RuntimeError("no memory"), FileNotFoundError("no memory")], ids=repr
)
def test_a_process_tells_why_it_fails_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*words: Any) -> None:
        raise error

    def leave(code: int) -> None:
        raise SystemExit(code)

    links = Queue[SealedConnection]()

    def serve(link: SealedConnection) -> None:
        link.send({"layout": {}, "device": "cpu", "threads": 1})
        links.put(link)

    monkeypatch.setattr(role_process, "reference_of", fail)
    monkeypatch.setattr(role_process, "settle_in", lambda *words: None)
    monkeypatch.setattr(role_process.os, "_exit", leave)
    monkeypatch.setattr(SealedConnection, "drain", lambda *words: None)
    monkeypatch.setenv(SECRET, "known")
    run = Endpoint("127.0.0.1")
    run.open(role_channel("reference"), "known", serve)
    try:
        with pytest.raises(SystemExit) as left:
            run_role_process(run.address, "reference")
        head = links.get(timeout=5).receive(limit=5.0).head
    finally:
        run.close()
    assert left.value.code == 1 and head == {"kind": "error", "why": "no memory"}
