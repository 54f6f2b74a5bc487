"""A critic in processes of its own: the same run to the last bit, other layouts, bytes by formula, faults."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rl.seeming_process import SeemingProcess
from tests.rl.test_rl_loader import records
from tests.train.test_own_critic import TREE, recipe, tensors
from weft.api import start as train
from weft.errors import WeftError
from weft.layout.mesh import Mesh
from weft.models.policy_loss import PolicyFigures
from weft.net.endpoint import Endpoint
from weft.net.wire import Frame
from weft.rl import rl_loader, role_links
from weft.rl.critic_processes import MOST_DUE, CriticProcesses, critic_about
from weft.rl.critic_work import serve_critic
from weft.rl.role_process import role_channel
from weft.rl.role_texts import NUMBER_BYTES, TOKEN_BYTES, packed_numbers, shared_returns
from weft.train.own_critic import copied_critic
from weft.train.runs import checkpoint_size
from weft.train.setup import build_for_training, prepare
from weft.train.training import train_job

OWN = TREE["roles"]["critic"]
#: Without shared prompts, as a critic on the policy's ranks prevents these, so that both compute the same sums.
SHORT: dict[str, Any] = {
    "rl": TREE["rl"] | {"start": {"steps": 1}, "share_prompts": False},
    "model": {"layers": 1},
}


def roles(ranks: int, **settings: Any) -> dict[str, Any]:
    apart = {"ranks": ranks, "threads": 1} if ranks else {}
    return {"critic": OWN | apart | settings}


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SeemingProcess]]:
    """The process of a critic as a thread of this one, which has imported PyTorch already."""
    placed, endpoints = list[SeemingProcess](), list[Endpoint]()

    def start(
        name: str, roles: Any, endpoint: Endpoint, secret: str, wait: float
    ) -> Any:
        endpoints.append(Endpoint("127.0.0.1"))
        channel = endpoints[-1].join(role_channel(name), secret)

        def serve() -> None:
            link = channel.dial(endpoint.address, {"rank": 0}, 5.0)
            with suppress(OSError):  # the run has ended
                serve_critic(link, link.receive().head, Mesh.single())

        threading.Thread(target=serve, daemon=True).start()
        placed.append(SeemingProcess())
        return placed[-1:]

    monkeypatch.setattr(role_links, "start_role_processes", start)
    yield placed
    for endpoint in endpoints:
        endpoint.close()


def policy_numbers(run: Path) -> list[tuple[float, ...]]:
    names = ("tokens", "value", "value_loss", "value_clipped")
    return [tuple(row[name] for name in names) for row in records(run, "policy")]


@pytest.mark.slow(3)
def test_a_run_and_its_checkpoints_are_the_same_to_the_last_bit(
    tmp_path: Path, in_threads: Any
) -> None:
    """Half of a run with the critic elsewhere, resumed so, and then with the critic on the policy's ranks."""
    # the first phases, in which the critic begins as the policy is after its start
    whole = train(recipe(**SHORT, train={"steps": 5}), out=tmp_path / "whole")
    apart = SHORT | {"roles": roles(1)}
    half = train(recipe(**apart, train={"steps": 3}), out=tmp_path / "half")
    assert policy_numbers(half.run) == policy_numbers(whole.run)[:1] != []
    assert records(whole.run, "policy")[0]["value_loss"] > 0
    read = tensors(half.checkpoint)
    assert sum(values.nbytes for values in read.values()) == checkpoint_size(
        prepare(recipe(**apart))
    )
    first, second = records(half.run, "rollout")
    of_critic = {name: v for name, v in read.items() if name.startswith("critic.")}
    state_bytes = sum(values.nbytes for values in of_critic.values())
    assert (first["critic_state_bytes"], second["critic_state_bytes"]) == (
        state_bytes,
        0,
    )
    for phase in (first, second):
        marked = phase["critic_received_bytes"] / NUMBER_BYTES
        assert marked == pytest.approx(8 * phase["length"]) and marked > 0
        texts = phase["critic_sent_bytes"] - phase["critic_received_bytes"]
        assert texts % TOKEN_BYTES == 0 and texts / TOKEN_BYTES > marked
        assert phase["critic_s"] > 0
    train(recipe(**apart, train={"steps": 4}), resume=str(tmp_path / "half"))
    again = train(recipe(**SHORT, train={"steps": 5}), resume=str(tmp_path / "half"))
    a, b = tensors(whole.checkpoint), tensors(again.checkpoint)
    assert a.keys() == b.keys() and "model.value_head" not in a
    assert sum(name.startswith("critic.optimizer.") for name in a) > 3
    assert all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(WeftError, match="value_head"):
        train(recipe(**SHORT, roles=None), resume=str(tmp_path / "half"))
    other = SHORT | {"rl": SHORT["rl"] | {"method": "grpo"}}
    with pytest.raises(WeftError, match="has a critic of its own, and this run has"):
        train(recipe(**other, roles=None), resume=str(tmp_path / "half"))


TEXTS = [([3, 5, 7, 9], [False, False, True, True]), ([4, 6, 8], [False, True, True])]


@pytest.fixture
def critic(in_threads: list[SeemingProcess]) -> Iterator[CriticProcesses]:
    job, mesh = prepare(recipe(roles=roles(1))), Mesh.single()
    built = build_for_training(job.shape, mesh, job.recipe)
    copy = copied_critic(built.state)
    assert copy is not None
    run = CriticProcesses(job, mesh, lambda: False, copy, PolicyFigures())  # type: ignore[arg-type]
    yield run
    run.close()


def begin(critic: CriticProcesses) -> None:
    critic.request(TEXTS)
    dues = [values + 1.0 for values in critic.values()]
    critic.learn_from(dues)
    critic.begin_step(np.array([1, 0] * 4), 0, 0)


def said(work: Callable[[], object]) -> str:
    with pytest.raises(WeftError) as error:
        work()
    return str(error.value)


def test_a_process_that_ends_is_named_before_answers_are_written_and_saves_nothing(
    critic: CriticProcesses, in_threads: list[SeemingProcess]
) -> None:
    begin(critic)
    critic.fetch()
    critic.check()
    in_threads[-1].code = -9
    critic.fetch()  # nothing has changed
    line = said(critic.check)
    assert line.startswith("the process 0 of roles.critic has ended with signal 9")
    critic.begin_step(np.array([1, 0] * 4), 1, 1)  # nobody can be told yet
    assert said(critic.fetch) == said(critic.check) == line
    critic.request(TEXTS)
    assert said(critic.values) == line


def test_a_process_that_hangs_is_named_where_it_is_awaited(
    critic: CriticProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(critic)
    critic.fetch()
    monkeypatch.setattr(critic.links, "send", lambda *words, **named: None)
    critic.links.limit = 0.3
    critic.begin_step(np.array([1, 0] * 4), 1, 1)
    late = "the process 0 of roles.critic does not answer for 0.3 s"
    assert said(critic.fetch).startswith(late)
    critic._failure, critic._due = None, []
    critic.request(TEXTS)
    assert said(critic.values).startswith(late)


def test_the_run_is_few_steps_ahead_of_the_critic(
    critic: CriticProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for many steps at once; values are awaited for what the request has left of the time."""
    begin(critic)
    for number in range(1, 5):
        critic.begin_step([1, 0] * 4, number, number)
        assert len(critic._due) <= MOST_DUE
    critic.fetch()
    monkeypatch.setattr(critic.links, "send", lambda *words, **named: None)
    critic.links.limit = 0.2
    for number in range(5, 8):
        critic.begin_step([1, 0] * 4, number, number)
    line = "the process 0 of roles.critic does not answer for 0.2 s"
    assert said(critic.check).startswith(line)
    critic._failure, critic._due, critic.links.limit = None, [], 600.0
    critic.request(TEXTS)
    critic._left = 0.0
    assert "does not answer" in said(critic.values)


def test_an_endpoint_of_its_own_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's endpoint listens at another address here."""
    elsewhere: Any = Endpoint("127.0.0.2")
    monkeypatch.setattr(role_links, "process_endpoint", lambda host: elsewhere)
    monkeypatch.setattr(role_links, "start_role_processes", lambda *_: iter(()))
    job: Any = prepare(recipe(roles=roles(1)))
    about = critic_about(job)
    links = role_links.RoleLinks(
        "critic", job.roles, about, 5.0, lambda: False, lambda *_: None
    )
    own: Any = links._own_endpoint
    assert not own.closed
    links.close()
    assert own.closed and not elsewhere.closed
    elsewhere.close()


def test_texts_without_a_marked_token_have_returns() -> None:
    texts = [([3, 5], [False, False]), ([4], [False])]
    payload = packed_numbers([np.zeros(2), np.zeros(1)], texts)
    frame = Frame({"kind": "returns"}, payload)
    returns = shared_returns(frame, texts, Mesh.single())
    assert [len(each) for each in returns] == [2, 1]


def test_what_does_not_fit_is_one_line() -> None:
    def refused(**settings: Any) -> str:
        return said(
            lambda: prepare(recipe(roles={"critic": {"trunk": "own"} | settings}))
        )

    assert "set trunk = 'own', or leave" in refused(trunk="shared", ranks=1)
    assert "set roles.critic.ranks, or" in refused(layout={"tp": 2})
    assert "set roles.critic.ranks, or" in refused(device="cuda")
    assert "does not divide a model over" in refused(ranks=1, layout={"tp": 2})
    assert "without pp and island" in refused(ranks=2, layout={"pp": 2})
    assert "leave placement and skip out" in refused(
        ranks=2, layout={"dp": 2, "ep": 2, "placement": "moving"}
    )
    assert "tp=3" in refused(ranks=3, layout={"tp": 3})
    assert "no GPU; use 'cpu'" in refused(ranks=1, device="cuda:7") or (
        torch.cuda.is_available()
    )
    refused_before = {"memory": {"moments": "host"}, "roles": roles(1)}
    assert prepare(recipe(**refused_before)).roles.critic.elsewhere


def trained(out: str, layout: dict[str, Any], settings: dict[str, Any]) -> str:
    """The checkpoint of a run on these ranks."""
    given = recipe(**SHORT, layout=layout, roles=settings, train={"steps": 4})
    mesh = Mesh.create(given.layout, "cpu")
    return str(train_job(prepare(given), mesh, Path(out)).checkpoint)


@pytest.mark.slow(40)
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "ranks", "own"),
    [
        ({"dp": 2}, 2, {"layout": {"tp": 2}}),
        pytest.param({"shard": 2}, 2, {}, marks=pytest.mark.soak),
        pytest.param({"tp": 2}, 1, {}, marks=pytest.mark.soak),
        pytest.param({"pp": 2}, 2, {"layout": {"shard": 2}}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_layouts_of_both_equal_one_device(
    pool: Any, tmp_path: Path, layout: dict[str, Any], ranks: int, own: dict[str, Any]
) -> None:
    """Processes of their own under one layout, policy's ranks under another, in float64."""
    one = trained(str(tmp_path / "one"), {}, roles(0))
    several = roles(ranks, **own)
    (saved, *_) = pool.run(2, trained, str(tmp_path / "several"), layout, several)
    a, b = tensors(one), tensors(saved)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-10, atol=1e-12)
    assert any(not torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow(20)
def test_a_process_of_its_own_gives_the_bits_of_these_ranks(tmp_path: Path) -> None:
    begun = SHORT | {"train": {"steps": 4}}
    beside = train(recipe(**begun), out=tmp_path / "beside")
    apart = train(recipe(**begun, roles=roles(1)), out=tmp_path / "apart")
    a, b = tensors(beside.checkpoint), tensors(apart.checkpoint)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow(30)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_frozen_ends_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    begin = rl_loader.RlLoader._begin

    def ended(self: Any, phase: int) -> None:
        if phase == 1:
            os.kill(self.critic.links.processes[0].pid, number)
        begin(self, phase)

    monkeypatch.setattr(rl_loader.RlLoader, "_begin", ended)
    given = recipe(**SHORT, roles=roles(1), train={"steps": 4, "timeout": 20})
    line = said(lambda: train(given, out=tmp_path / "run"))
    assert line.startswith("the process 0 of roles.critic ")
    how = "has ended with signal 9" if number == signal.SIGKILL else "does not answer"
    assert how in line
