"""Engines in other processes have the weights of every rank that trains, bit by bit, whatever the layout."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cluster.inprocess import until
from tests.rl.test_generation_model import CASES, SHAPE, built, change_all, check_all
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh, from_all
from weft.net.endpoint import Endpoint
from weft.recipe import ModelShape, Train
from weft.rl.generation_model import changes, model_to_fill, targets_of
from weft.rl.weight_channel import VersionFrames, WeightReceiver, WeightSender
from weft.rl.weight_frames import WeightIntake


class Engine:
    """The end of an engine, without the engine: it takes the weights as soon as a version is complete."""

    def __init__(self, run: Endpoint, shape: dict[str, Any], dtype: str, weights: str) -> None:  # fmt: skip
        self.endpoint = Endpoint("127.0.0.1")
        self.receiver = WeightReceiver(self.endpoint, run.address, "s")
        train = Train(dtype=dtype)
        model = model_to_fill(ModelShape(**shape), Mesh.single(), train, weights)
        self.held = model.held
        self.intake = WeightIntake(targets_of(model.held), self.receiver.senders)
        self.errors: list[Exception] = []
        self.versions: list[int] = []
        self.receiver.start(self.take, self.errors.append)

    def take(self, version: VersionFrames) -> None:
        for rank, frame in version.frames:
            self.intake.take(rank, frame)
        assert self.intake.version == version.number
        self.versions.append(version.number)

    def close(self) -> None:
        self.receiver.close()
        self.endpoint.close()


def sent_under(training: str, shape: dict[str, Any], options: dict[str, Any]) -> None:
    mesh = Mesh.create(Layout.parse(training), "cpu")
    freeze = options.pop("freeze", ["*.ffn.*"])
    dtype, weights = options.get("dtype", "float32"), options.get("weights", "float")
    state = built(shape, mesh, dtype, freeze=freeze)
    endpoint = Endpoint("127.0.0.1")
    sender = WeightSender(mesh, state, endpoint, "s", weights)
    sender.about = {"run": "this"}
    assert len(sender.senders) > 1
    kinds = {h.name: None if changes(h) else h.local.dtype for h in state.held}
    kinds = dict(item for each in from_all(kinds) for item in each.items())
    frozen = {name: kind for name, kind in kinds.items() if kind is not None}
    first = sender.rank == 0
    engines = [Engine(endpoint, shape, dtype, weights)] if first else []
    for round in range(3):
        change_all(state, round)
        sender.publish(round)
        if round == 2 and first:  # gets all, also what did not change since the first
            engines.append(Engine(endpoint, shape, dtype, weights))
        for engine in engines:
            until(lambda own=engine, at=round: own.receiver.version == at or own.errors)
            assert not engine.errors
            check_all(SimpleNamespace(held=engine.held), frozen, round)  # type: ignore[arg-type]
        from_all(None)
    for engine in engines:
        engine.close()
    sender.close()
    endpoint.close()


def sent_in_turn(cases: list[Any]) -> int:
    for training, shape, options in cases:
        sent_under(training, shape, dict(options))
    return len(cases)


@pytest.mark.slow(4)
def test_every_rank_sends_its_parts(pool: Any) -> None:
    assert pool.run(4, sent_in_turn, CASES)[0] == len(CASES)


def alone() -> tuple[Endpoint, WeightSender, Any]:
    state = built(SHAPE, Mesh.single())
    endpoint = Endpoint("127.0.0.1")
    sender = WeightSender(Mesh.single(), state, endpoint, "s")
    sender.about = {"run": "this"}
    return endpoint, sender, state


def test_lost_connection_is_made_again_and_nothing_is_missed() -> None:
    endpoint, sender, state = alone()
    engine = Engine(endpoint, SHAPE, "float32", "float")
    for round in range(6):
        change_all(state, round)
        for sock in [*sender._channel._sockets]:
            with suppress(OSError):  # one that has ended already
                sock.shutdown(2)
        sender.publish(round)
        until(lambda at=round: engine.receiver.version == at or engine.errors)
        check_all(SimpleNamespace(held=engine.held), {}, round)  # type: ignore[arg-type]
    assert not engine.errors
    sender.close()
    endpoint.close()
    engine.close()


def test_version_is_a_copy_that_training_does_not_change() -> None:
    endpoint, sender, state = alone()
    change_all(state, 0)
    sender.publish(0)
    with torch.no_grad():
        for held in state.held:
            held.local.fill_(-1)
    engine = Engine(endpoint, SHAPE, "float32", "float")
    until(lambda: engine.receiver.version == 0)
    check_all(SimpleNamespace(held=engine.held), {}, 0)  # type: ignore[arg-type]
    sender.close()
    endpoint.close()
    engine.close()


def test_damaged_weights_are_not_used() -> None:
    endpoint, sender, state = alone()
    sender.publish(0)
    engine = Engine(endpoint, SHAPE, "float32", "float")
    until(lambda: engine.receiver.version == 0)
    take = engine.intake.take

    def damaged(rank: int, frame: Any) -> bool:
        payload = bytearray(frame.payload)
        payload[0] ^= 1
        return take(rank, frame._replace(payload=memoryview(payload)))

    engine.intake.take = damaged  # type: ignore[method-assign]
    change_all(state, 1)
    sender.publish(1)
    until(lambda: engine.errors)
    assert "is damaged" in str(engine.errors[0])
    assert engine.versions == [0]
    sender.close()
    endpoint.close()
    engine.close()


def test_changes_alone_are_sent_to_who_has_the_version_before() -> None:
    state = built(SHAPE, Mesh.single())
    endpoint = Endpoint("127.0.0.1")
    sender = WeightSender(Mesh.single(), state, endpoint, "s", delta=True)
    sender.about = {"run": "this"}
    whole = sum(held.local.nbytes for held in state.held)
    engine = Engine(endpoint, SHAPE, "float32", "float")
    sizes = list[int]()
    for round in range(4):
        with torch.no_grad():
            for number, held in enumerate(state.held):
                if round != 3 or number == 0:  # at last a single element
                    place = held.local.view(-1)[: 1 if round == 3 else None]
                    place.add_(0.5 + number)
        before = sender.sent
        sender.publish(round)
        until(lambda at=round: engine.receiver.version == at or engine.errors)
        until(lambda at=before: sender.sent > at)
        assert not engine.errors
        sizes.append(engine.intake.received)
        theirs = targets_of(engine.held)
        for held in state.held:
            assert torch.equal(theirs[held.name][held.box], held.local)
        if round == 1:  # one that has nothing gets all
            late = Engine(endpoint, SHAPE, "float32", "float")
            until(lambda own=late: own.receiver.version == 1)
            assert late.intake.received == whole
            late.close()
    assert sizes[:3] == [whole, 2 * whole, 3 * whole]  # all elements have changed
    assert sizes[3] == 3 * whole + 8  # a place and a value
    until(lambda: sender.spared == whole - 8)
    engine.close()
    sender.close()
    endpoint.close()
