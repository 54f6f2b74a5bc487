"""Rollouts on other processes: those of one engine alone, whatever weights change and whichever engine is lost."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.cluster.inprocess import until
from weft.data.sample_ledger import VersionSpan
from weft.errors import WeftError
from weft.generate.engine import Engine
from weft.generate.sampling import Sampling
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.net.endpoint import Endpoint
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.rl.remote_rollouts import RemoteRollouts, RemoteSettings
from weft.rl.rollout import AnswerGroup, GroupRequest, RewardQuestion, WrittenAnswer
from weft.rl.rollout_engine import RolloutEngine
from weft.rl.weight_channel import WeightSender

SHAPE = ModelShape(
    vocab=31, layers=2, embed=32, heads=4, kv_heads=2, ffn=48, init_std=0.5
)
STOP = 7
MOST = 24


class Policy:
    """A policy on one rank that is 'trained' by a rule that depends on all that its rollouts say."""

    def __init__(self) -> None:
        self.model, self.state = parallelize(SHAPE, Mesh.single(), Train(seed=2))

    @torch.no_grad()
    def train(self, groups: Sequence[AnswerGroup]) -> None:
        """Move every parameter by an amount that any other token or log-probability would change."""
        said = [p for group in groups for answer in group.answers for p in answer.log_probabilities]  # fmt: skip
        ids = [i for group in groups for answer in group.answers for i in answer.ids]
        amount = float(np.tanh(sum(said) / 100)) + 1e-3 * (sum(ids) % 97)
        for held in self.state.held:
            generator = torch.Generator().manual_seed(held.local.numel() + len(ids))
            held.local += 0.01 * amount * torch.randn(held.local.shape, generator=generator)  # fmt: skip


def group(number: int, answers: int = 3) -> GroupRequest:
    prompt = tuple((5 * number + 3 * i) % 31 for i in range(3 + number % 4))
    return GroupRequest(number, RewardQuestion(""), prompt, answers, 1000 * number)


def settings(**more: Any) -> RemoteSettings:
    values: dict[str, Any] = {
        "bound": 0,
        "batch": 2,
        "group": 3,
        "most": MOST,
        "stops": frozenset({STOP}),
        "how": Sampling(),
        "requests": 8,
        "cache": 4096,
        "patience": 600.0,
        "stall": 600.0,
    }
    return RemoteSettings(**values | more)


class InThread:
    """An engine for rollouts in threads of this process. ``slow``: seconds that each step takes longer.

    ``turn``: a lock; whoever holds it knows that no step is computed. ``gone``: whether it was killed or frozen.
    """

    def __init__(
        self, run: Endpoint, name: str, slow: float = 0.0, secret: str = "s"
    ) -> None:
        self.secret = secret
        self.endpoint, self.run, self.name = Endpoint("127.0.0.1"), run, name
        self.slow, self.said = slow, list[str]()
        self.error: Exception | None = None
        self.turn, self.gone = threading.Lock(), False
        self.engine: RolloutEngine | None = None
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            self.engine = RolloutEngine(
                self.endpoint, self.run.address, self.secret, self.name, self.said.append, patience=120.0
            )  # fmt: skip
            plain = self.engine.engine.step

            def step() -> Any:
                time.sleep(self.slow)
                with self.turn:
                    return plain()

            self.engine.engine.step = step  # type: ignore[method-assign]
            self.engine.work(redial=2.0)
        except Exception as error:
            self.error = error

    def kill(self) -> None:
        assert self.engine is not None
        self.gone = True
        self.engine.member.leave()
        self.engine.weights.close()

    def freeze(self) -> threading.Event:
        """Stop all sending and receiving, as a stopped process does, until the event is set."""
        assert self.engine is not None
        self.gone = True
        thaw, current = threading.Event(), self.engine.member._current
        assert current is not None
        connection = current.outbox.connection
        send, receive = connection.send, connection.receive
        connection.send = lambda *frame: (thaw.wait(60), send(*frame))[1]  # type: ignore[method-assign]
        connection.receive = lambda **limit: (thaw.wait(60), receive(**limit))[1]  # type: ignore[method-assign]
        return thaw


class Run:
    """The trainer's side with engines in threads, for a ``with`` statement."""

    def __init__(self, engines: int = 2, slow: float = 0.0, **more: Any) -> None:
        self.endpoint, self.policy = Endpoint("127.0.0.1"), Policy()
        self.said: list[str] = []
        sender = WeightSender(Mesh.single(), self.policy.state, self.endpoint, "s")
        self.rollouts = RemoteRollouts(
            self.endpoint, "s", SHAPE, sender, settings(**more), self.said.append
        )
        self.engines = [self.add(f"e{i}", slow) for i in range(engines)]

    def add(self, name: str, slow: float = 0.0) -> InThread:
        return InThread(self.endpoint, name, slow)

    def joined(self, count: int) -> None:
        until(lambda: len(self.rollouts.router.links) == count)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.rollouts.close()
        self.endpoint.close()
        for each in self.engines:
            each.thread.join(20)
            assert not each.thread.is_alive()
            each.endpoint.close()


def written_alone(
    model: Transformer, request: GroupRequest, version: int = 0
) -> AnswerGroup:
    """What an engine writes that has nothing else to do."""
    engine = Engine(model, 4096, invariant=True)
    how = Sampling(seed=request.seed)
    texts = engine.submit(request.prompt, MOST, how, (), request.answers, 0)
    engine.run()
    answers = []
    for text in texts:
        ids, finished = text.written, "length"
        if STOP in ids:
            ids, finished = ids[: ids.index(STOP) + 1], "stop"
        said = [p for p, _ in text.log_probabilities[: len(ids)]]
        spans = (VersionSpan(0, version),)
        answers.append(WrittenAnswer(tuple(ids), tuple(said), spans, finished))
    return AnswerGroup(request, tuple(answers))


def written_by_turns(steps: int) -> tuple[list[AnswerGroup], Policy]:
    """The synchronous loop: two groups are written, then trained, and so on."""
    policy, groups = Policy(), list[AnswerGroup]()
    for step in range(steps):
        for number in (2 * step, 2 * step + 1):
            groups.append(written_alone(policy.model, group(number), step))
        policy.train(groups[-2:])
    return groups, policy


def same_state(run: Policy, other: Policy) -> bool:
    pairs = zip(run.state.held, other.state.held, strict=True)
    return all(torch.equal(a.local, b.local) for a, b in pairs)


def test_staleness_zero_streamed_is_the_synchronous_loop_bit_for_bit() -> None:
    expected, policy = written_by_turns(5)
    finishes = {answer.finished for each in expected for answer in each.answers}
    assert finishes == {"stop", "length"}
    with Run(invariant=True) as run:
        run.rollouts.take_weights(0)
        run.joined(2)
        run.rollouts.request([group(i) for i in range(10)])  # all at once
        for step in range(5):
            groups = run.rollouts.finished(2)
            assert groups == expected[2 * step : 2 * step + 2]
            run.policy.train(groups)
            run.rollouts.take_weights(step + 1)
        assert same_state(run.policy, policy)
        assert run.rollouts.lags == {0: 30}
        # both have written
        assert all(link.tokens for link in run.rollouts.router.links.values())


@pytest.mark.soak
@pytest.mark.slow(3)
def test_answers_go_on_with_new_weights_and_never_become_too_old() -> None:
    with Run(bound=1, slow=0.004, invariant=True) as run:
        models = {0: copy.deepcopy(run.policy.model)}
        run.rollouts.take_weights(0)
        run.rollouts.request([group(i) for i in range(10)])
        groups = []
        for step in range(5):
            groups.append(run.rollouts.finished(2))
            run.policy.train(groups[-1])
            models[step + 1] = copy.deepcopy(run.policy.model)
            run.rollouts.take_weights(step + 1)
        assert {*run.rollouts.lags} == {0, 1}
        assert sum(run.rollouts.lags.values()) == 30
    answers = [
        (step, each.request, i, answer)
        for step, batch in enumerate(groups)
        for each in batch
        for i, answer in enumerate(each.answers)
    ]
    assert any(len(answer.versions) > 1 for *_, answer in answers)
    for step, request, index, answer in answers:
        assert all(0 <= step - span.version <= 1 for span in answer.versions)
        ends = [span.first for span in answer.versions[1:]] + [len(answer.ids)]
        for span, end in zip(answer.versions, ends, strict=True):
            engine = Engine(models[span.version], 4096, invariant=True)
            how = Sampling(seed=request.seed + index)
            [text] = engine.submit(
                request.prompt, end, how, (), 1, 0, written=answer.ids[: span.first]
            )
            engine.run()
            assert tuple(text.written) == answer.ids[:end]
            said = tuple(p for p, _ in text.log_probabilities)
            assert said == answer.log_probabilities[span.first : end]


@contextmanager
def writing(run: Run) -> Iterator[InThread]:
    """An engine that has begun an answer, and that ends none within the context."""
    held: list[InThread] = []

    def finds() -> bool:
        for each in run.engines:
            if each.engine is None or each.gone:
                continue
            each.turn.acquire()
            if each.engine.engine.scheduler.running:
                held.append(each)
                return True
            each.turn.release()
        return False

    until(finds)
    try:
        yield held[0]
    finally:
        held[0].turn.release()


@pytest.mark.slow(3)
def test_killed_and_frozen_engines_change_no_sample() -> None:
    expected, policy = written_by_turns(5)
    with Run(engines=3, slow=0.004, invariant=True) as run:
        run.rollouts.take_weights(0)
        run.joined(3)
        run.rollouts.request([group(i) for i in range(10)])
        thaw, stopped = threading.Event(), ""
        for step in range(5):
            if step in (1, 2):
                with writing(run) as engine:
                    if step == 1:
                        engine.kill()
                    else:
                        thaw, stopped = engine.freeze(), engine.name
            if step == 3:
                run.engines.append(run.add("late"))
            groups = run.rollouts.finished(2)
            assert [replace_versions(g) for g in groups] == [
                replace_versions(g) for g in expected[2 * step : 2 * step + 2]
            ]
            run.policy.train(groups)
            run.rollouts.take_weights(step + 1)
        assert same_state(run.policy, policy)
        thaw.set()
        assert run.rollouts.router.continued > 0
    said = "\n".join(run.said)
    assert said.count("is given up") >= 2
    assert f"engine {stopped} is given up: no sign of life" in said


def replace_versions(group: AnswerGroup) -> list[tuple[object, ...]]:
    return [(a.ids, a.log_probabilities, a.finished) for a in group.answers]


def test_an_engine_that_has_hung_up_may_end_by_itself() -> None:
    """It was asked to end, and its connection has ended before the run looks which engines there are."""
    ended: list[set[str]] = []
    with Run(engines=0) as run:
        run.rollouts._ended = lambda names: ended.append({*names})
        run.rollouts.router.let_go.add("e0")
    assert ended == [{"e0"}]


def test_run_without_engines_ends_with_a_line() -> None:
    with Run(engines=1, slow=0.05, patience=0.5) as run:
        run.rollouts.take_weights(0)
        run.joined(1)
        run.rollouts.request([group(0), group(1)])
        with writing(run) as engine:
            engine.kill()
        with pytest.raises(WeftError, match="rollouts have ended: no engine"):
            run.rollouts.finished(2)


def test_engine_that_gets_no_new_weights_stalls_the_run_with_a_line() -> None:
    with Run(engines=1) as run:
        run.rollouts.take_weights(0)
        run.rollouts.request([group(i) for i in range(4)])
        run.policy.train(run.rollouts.finished(2))
        engine = run.engines[0].engine
        assert engine is not None
        engine.weights.close()
        run.rollouts.settings = settings(stall=1.0)
        run.rollouts.take_weights(1)
        with pytest.raises(WeftError, match=r"no token .* for 1 s; joined: e0 \(weights 0\)"):  # fmt: skip
            run.rollouts.finished(2)


def test_more_groups_than_were_asked_for_are_refused() -> None:
    with Run(engines=1) as run:
        run.rollouts.take_weights(0)
        run.joined(1)
        run.rollouts.request([group(0)])
        with pytest.raises(ValueError, match="2 groups are wanted, and 1 asked for"):
            run.rollouts.finished(2)
