"""Frames bring weights to other processes bit by bit, and what does not fit is refused."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.rl.test_generation_model import PROMPT, SHAPE, alone, built, generation
from weft.checkpoint.boxes import volume
from weft.errors import WeftError
from weft.generate.engine import Engine
from weft.generate.sampling import GREEDY
from weft.layout.dims import Box, Tensor, part, slices
from weft.layout.mesh import Mesh
from weft.layout.parts import TORCH_DTYPES
from weft.net.wire import Frame
from weft.recipe import ModelShape, Train
from weft.rl.generation_model import model_to_fill, targets_of
from weft.rl.weight_channel import VersionFrames, WeightReceiver
from weft.rl.weight_frames import (
    WeightIntake,
    copied_sources,
    moves_to_others,
    read_needs,
    said_needs,
    weight_frames,
)

TENSORS = {
    "w": Tensor((12, 10), "F32"),
    "bias": Tensor((7,), "BF16"),
    "count": Tensor((), "I64"),
    "cube": Tensor((5, 3, 4), "F64"),
    "codes": Tensor((33,), "U8"),
}
Parts = list[dict[str, dict[Box, torch.Tensor]]]


def boxes(tensor: Tensor, ranks: int, axis: int) -> list[Box]:
    """The boxes of ranks that cut a tensor along one axis; all have it whole if it has no such axis."""
    cut = []
    for rank in range(ranks):
        edges = [(0, size) for size in tensor.shape]
        if axis < len(edges):
            edges[axis] = part(edges[axis][1], ranks, rank)
        cut.append(tuple(edges))
    return cut


def parts(ranks: int, axis: int, whole: dict[str, torch.Tensor]) -> Parts:
    return [
        {
            name: {box: whole[name][slices(box)].clone()}
            for name, tensor in TENSORS.items()
            for box in [boxes(tensor, ranks, axis)[rank]]
        }
        for rank in range(ranks)
    ]


def drawn(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 200, tensor.shape, generator=g).to(
            TORCH_DTYPES[tensor.dtype]
        )
        for name, tensor in TENSORS.items()
    }


def changed(
    whole: dict[str, torch.Tensor], share: float, seed: int
) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(values.shape, generator=g) < share, values + 1, values)
        for name, values in whole.items()
    }  # fmt: skip


def over_a_wire(frame: Frame) -> Frame:
    """The frame as it comes out of JSON and bytes."""
    return Frame(json.loads(json.dumps(frame.head)), memoryview(bytes(frame.payload)))


def boxes_of(side: Parts) -> list[dict[str, list[Box]]]:
    return [{name: list(each) for name, each in rank.items()} for rank in side]


class Both:
    """Ranks that train and ranks that generate, and what each pair exchanges."""

    def __init__(self, train: int, generate: int, axes: tuple[int, int]) -> None:
        self.train, self.axes = train, axes
        nothing = {name: torch.zeros_like(values) for name, values in drawn(0).items()}
        self.generating = parts(generate, axes[1], nothing)
        training = parts(train, axes[0], nothing)
        self.moves = moves_to_others(
            TENSORS, boxes_of(training), boxes_of(self.generating)
        )
        self.intakes = [
            WeightIntake(each, {s for s, t in self.moves if t == rank})
            for rank, each in enumerate(self.generating)
        ]
        self.before: dict[int, Any] = {}
        self.version = -1

    def send(
        self, whole: dict[str, torch.Tensor], version: int, delta: bool, most: int = 200
    ) -> int:
        """Send ``whole``, in any order of frames; return the bytes of all payloads."""
        training = parts(self.train, self.axes[0], whole)
        frames = []
        for source in range(self.train):
            own = [
                m for (s, _), moves in self.moves.items() if s == source for m in moves
            ]
            now = copied_sources(own, TENSORS, training[source])
            before = self.before.get(source) if delta else None
            for (s, target), moves in self.moves.items():
                if s == source:
                    written = weight_frames(moves, TENSORS, now, version, before, self.version, most)  # fmt: skip
                    frames += [(source, target, over_a_wire(f)) for f in written]
            self.before[source] = now
        random.Random(version).shuffle(frames)
        done = [self.intakes[t].take(s, frame) for s, t, frame in frames]
        assert sum(done) == len(self.intakes)
        self.version = version
        assert {intake.version for intake in self.intakes} == {version}
        for rank in self.generating:
            for name, of_tensor in rank.items():
                for box, values in of_tensor.items():
                    assert torch.equal(values, whole[name][slices(box)]), name
        return sum(len(frame.payload) for _, _, frame in frames)


@pytest.mark.parametrize("seed", range(8))
def test_weights_and_their_changes_arrive_bit_by_bit(seed: int) -> None:
    draw = random.Random(seed)
    both = Both(draw.randint(1, 4), draw.randint(1, 4), (draw.randint(0, 2), draw.randint(0, 2)))  # fmt: skip
    whole = drawn(seed)
    size = sum(
        volume(box) * TENSORS[name].itemsize
        for rank in both.generating
        for name, of_tensor in rank.items()
        for box in of_tensor
    )
    assert both.send(whole, 0, delta=True) == size  # nothing was sent before
    for version, share in enumerate((0.02, 0.4, 1.0, 0.0), 1):
        whole = changed(whole, share, version)
        sent = both.send(whole, version, delta=True, most=draw.choice([64, 200, 5000]))
        assert sent <= size and (share > 0.02 or sent < size / 2)
    assert not sent


def spoilt(change: Callable[[dict[str, Any]], None]) -> Callable[[Frame], Frame]:
    def spoil(frame: Frame) -> Frame:
        head = json.loads(json.dumps(frame.head))
        change(head)
        return Frame(head, frame.payload)

    return spoil


@pytest.mark.parametrize(("spoil", "said"), [
    (lambda f: Frame(f.head, memoryview(bytes(f.payload[:-1]) + b"?")), "frame 0 of weights 1 from rank 0 is damaged"),
    (spoilt(lambda h: h.update(base=7)), "changes of weights 7 came, and weights 0 are here; send all of them"),
    (spoilt(lambda h: h["pieces"][0].__setitem__(0, "x")), "weights of x"),
    (spoilt(lambda h: h["pieces"][0].__setitem__(1, [[5, 90]])), "which this rank does not have"),
    (spoilt(lambda h: h["pieces"][0].__setitem__(3, 6)), "6 bytes came for bias"),
])  # fmt: skip
def test_a_frame_that_does_not_fit_is_refused_and_all_elements_mend_it(
    spoil: Callable[[Frame], Frame], said: str
) -> None:
    both = Both(1, 1, (0, 0))
    both.send(drawn(0), 0, delta=False)
    (intake,) = both.intakes
    now = copied_sources(both.moves[0, 0], TENSORS, parts(1, 0, drawn(1))[0])
    frame = next(weight_frames(both.moves[0, 0], TENSORS, now, 1))
    with pytest.raises(WeftError, match=said.replace("[", r"\[")):
        intake.take(0, spoil(frame))
    assert intake.version == -1
    delta = next(weight_frames(both.moves[0, 0], TENSORS, now, 2, now, base=0))
    with pytest.raises(WeftError, match="send all of them"):
        intake.take(0, delta)
    both.send(drawn(1), 1, delta=False)


def test_a_later_version_takes_the_place_of_an_incomplete_one() -> None:
    both = Both(2, 1, (0, 0))
    (intake,) = both.intakes
    old, new = (parts(2, 0, drawn(seed)) for seed in (3, 4))
    frames = {}
    for version, side in ((1, old), (2, new)):
        for source in range(2):
            moves = both.moves[source, 0]
            now = copied_sources(moves, TENSORS, side[source])
            frames[version, source] = list(
                weight_frames(moves, TENSORS, now, version, most=10**6)
            )
    assert not intake.take(0, frames[1, 0][0])
    assert not intake.take(0, frames[2, 0][0])
    assert not intake.take(1, frames[1, 1][0]) and intake.version == -1
    assert intake.take(1, frames[2, 1][0]) and intake.version == 2
    whole = both.generating[0]["w"][((0, 12), (0, 10))]
    assert torch.equal(whole, drawn(4)["w"])
    with pytest.raises(WeftError, match="rank 5, which has none"):
        intake.take(5, frames[2, 1][0])


class Arriving:
    """A connection on which frames have arrived already."""

    def __init__(self, frames: list[Frame]) -> None:
        self.frames = frames

    def receive(self, limit: float) -> Frame:
        frame = self.frames.pop(0)
        return Frame({"kind": "weights", **frame.head}, frame.payload)


@pytest.mark.parametrize("skipping", [0, 1])
def test_changes_of_a_version_that_a_rank_has_skipped_are_not_lost(
    skipping: int,
) -> None:
    """One rank sends the versions 1 and 2, the other one 2 alone, as it was slow."""
    both = Both(2, 1, (0, 0))
    (intake,) = both.intakes
    versions = [drawn(0)]
    for version in (1, 2):
        versions.append(changed(versions[-1], 0.1, version))
    sides = [parts(2, 0, whole) for whole in versions]
    receiver = WeightReceiver.__new__(WeightReceiver)
    receiver.version, receiver._lock = -1, threading.Lock()
    receiver._coming, receiver.senders = {}, dict.fromkeys(range(2), ("", 0))
    taken = list[int]()

    def take(version: VersionFrames) -> None:
        done = [intake.take(rank, frame) for rank, frame in version.frames]
        assert done[-1] and not any(done[:-1])
        taken.append(version.number)

    def send(rank: int, version: int, base: int) -> None:
        moves = both.moves[rank, 0]
        now, before = (
            copied_sources(moves, TENSORS, sides[at][rank]) for at in (version, base)
        )
        known = None if base < 0 else before
        frames = [*weight_frames(moves, TENSORS, now, version, known, base, 200)]
        connection: Any = Arriving([*frames])
        for _ in frames:
            receiver._receive(rank, connection, take)

    for rank in range(2):
        send(rank, 0, -1)
    other = 1 - skipping
    send(other, 1, 0)
    send(skipping, 2, 0)
    assert taken == [0]
    send(other, 2, 1)
    assert taken == [0, 2]
    assert torch.equal(both.generating[0]["w"][((0, 12), (0, 10))], versions[2]["w"])
    send(skipping, 3 - 1, 2)  # an old one, which is not taken
    assert taken == [0, 2]


def test_an_engine_elsewhere_writes_what_the_trained_model_writes() -> None:
    """Frames of a state that is trained bring its weights, then an update in bfloat16, to another model."""
    mesh, shape = Mesh.single(), ModelShape(**SHAPE)
    state = built(SHAPE, mesh)
    own, held = model_to_fill(shape, mesh, Train(), "bfloat16")
    tensors, needed = read_needs(json.loads(json.dumps(said_needs(held))))
    pairs = moves_to_others(tensors, [{h.name: [h.box] for h in state.held}], [needed])
    intake = WeightIntake(targets_of(held), {0})
    engine, before = Engine(own), None
    for version in range(2):
        now = copied_sources(pairs[0, 0], tensors, {h.name: {h.box: h.local} for h in state.held})  # fmt: skip
        sent = [*weight_frames(pairs[0, 0], tensors, now, version, before, version - 1)]
        done = [intake.take(0, over_a_wire(frame)) for frame in sent]
        assert done == [False] * (len(sent) - 1) + [True]
        engine.weights_changed(intake.version)
        (text,) = engine.submit(PROMPT, 6, GREEDY)
        engine.run()
        same = generation(SHAPE, mesh, state, weights="bfloat16")
        same.refresh(version)
        assert text.written == alone(same.model, PROMPT, 6)
        before = now
        for h in state.held:  # too little for most of bfloat16's elements
            h.local.mul_(1 + 2**-11)
    assert sum(len(f.payload) for f in sent) < intake.received / 4
