"""The model that generates has the weights that are trained, under every layout, and the engine knows their version."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoint.test_experts import numbers, part_of
from weft.checkpoint.boxes import intersection, volume
from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.leader import follow_leader
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh, from_all
from weft.parallel.build import parallelize
from weft.parallel.state import State
from weft.recipe import Memory, ModelShape, Train
from weft.rl import generation_model
from weft.rl.generation_model import GenerationModel, changes

SHAPE: dict[str, Any] = {
    "vocab": 31,
    "layers": 4,
    "embed": 24,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 32,
    "init_std": 0.3,
}
TIED = SHAPE | {"tied": True}
EXPERTS = SHAPE | {
    "experts": 4,
    "expert_ffn": 8,
    "router": "sigmoid",
    "bias_rate": 0.05,
}
LORA = SHAPE | {"adapter": {"rank": 2, "targets": ["wq", "wo"]}}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def built(
    shape: dict[str, Any], mesh: Mesh, dtype: str = "float32", **change: Any
) -> State:
    train = Train(dtype=dtype, seed=4, freeze=change.pop("freeze", []))
    return parallelize(ModelShape(**shape), mesh, train, **change).state


def generation(
    shape: dict[str, Any], mesh: Mesh, state: State, layout: str = "", **change: Any
) -> GenerationModel:
    train = Train(dtype=change.pop("dtype", "float32"))
    return GenerationModel(
        ModelShape(**shape), mesh, Layout.parse(layout), state, train, **change
    )


def change_all(state: State, round: int) -> None:
    """Give every element that may change in training a value of its own, which differs between rounds."""
    for h in state.held:
        if changes(h) or not round:
            part = h.part(h.local)
            whole = numbers(h.name, part.tensor) + round
            h.local.copy_(part_of(whole, h.box))


def check_all(own: GenerationModel, frozen: dict[str, torch.dtype], last: int) -> None:
    """Each element is that of its round: the first one if it is ``frozen``, in the type in which it rests."""
    for h in own.held:
        whole = numbers(h.name, h.part(h.parameter.data.float()).tensor)
        expected = part_of(whole, h.box) + (0 if h.name in frozen else last)
        expected = expected.to(frozen.get(h.name, torch.float32))
        assert torch.equal(h.parameter.data, expected.to(h.parameter.dtype)), h.name


def lacking(own: GenerationModel, state: State) -> dict[str, int]:
    """The elements that this rank needs and has no part of in training, by name."""
    trained = {h.name: h.box for h in state.held}
    lacks = {}
    for h in own.held:
        box = trained.get(h.name)
        common = None if box is None else intersection(h.box, box)
        lacks[h.name] = volume(h.box) - (0 if common is None else volume(common))
    return lacks


def moved_under(
    training: str, layout: str, shape: dict[str, Any], options: dict[str, Any]
) -> int:
    """On every rank: weights move twice, arrive bit by bit, and no byte travels that a rank has."""
    mesh = Mesh.create(Layout.parse(training), "cpu")
    freeze = options.pop("freeze", ["*.ffn.*"])
    state = built(shape, mesh, options.pop("dtype", "float32"), freeze=freeze)
    own = generation(shape, mesh, state, layout, **options)
    kinds = {h.name: None if changes(h) else h.local.dtype for h in state.held}
    kinds = dict(item for each in from_all(kinds) for item in each.items())
    frozen = {name: kind for name, kind in kinds.items() if kind is not None}
    lacks = lacking(own, state)
    size = {h.name: h.parameter.element_size() for h in own.held}
    for round in range(3):
        change_all(state, round)
        moved = own.refresh(round)
        check_all(own, frozen, round)
        moving = lacks if not round else lacks.keys() - frozen.keys()
        assert moved.received == sum(lacks[name] * size[name] for name in moving)
        assert moved.buffer <= own.bucket
    return len(lacks)


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("shard=2,tp=2", SHAPE, {"bucket": 1000}),
    ("pp=2,cp=2", TIED, {}),
    ("dp=2,shard=2,zero=1", TIED, {"dtype": "bfloat16"}),
    ("pp=2,dp=2", LORA, {"freeze": [], "bucket": 300}),
    ("cp=2,tp=2", SHAPE, {"weights": "bfloat16", "bucket": 2000}),
    ("dp=4,ep=2", EXPERTS, {}),
]  # fmt: skip


def moved_in_turn(cases: list[Any], layout: str) -> list[int]:
    return [
        moved_under(training, layout, shape, dict(options))
        for training, shape, options in cases
    ]


@pytest.mark.soak
@pytest.mark.slow(4)
def test_weights_of_any_layout_generate_on_each_rank(pool: Any) -> None:
    pool.run(4, moved_in_turn, CASES, "")


OF_GROUPS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("tp=4", "tp=2", SHAPE, {"bucket": 1000}),
    ("dp=2,tp=2", "pp=2", LORA, {"freeze": []}),
    ("shard=4", "cp=2,ep=2", EXPERTS, {}),
    ("pp=4", "pp=2", TIED, {}),
]  # fmt: skip


def train_a_little(state: State) -> None:
    state.expose()
    for h in state.held:
        if changes(h):
            h.local.mul_(-1.5)
    state.release()


def texts_in_turn(cases: list[Any]) -> list[list[list[int]]]:
    """On every rank: weights come, texts are written over several ranks, weights change, and the texts go on."""
    written = []
    for training, layout, shape, options in cases:
        moved_under(training, layout, shape, dict(options))
        mesh = Mesh.create(Layout.parse(training), "cpu")
        state = built(shape, mesh)
        own = generation(shape, mesh, state, layout)
        own.refresh(1)
        texts: list[Generation] = []
        reader, engine = None, None
        if own.leads:
            engine = Engine(own.model, size=4, ranks=True)
            engine.weights_changed(1)
            texts += engine.submit(PROMPT, 8, GREEDY)
            while len(texts[0].written) < 3:
                engine.step()
            engine.rest()
        else:
            reader = follow_leader(own.model)
        train_a_little(state)
        own.refresh(2)
        if engine is not None:
            engine.weights_changed(2)
            texts += engine.submit(PROMPT, 8, GREEDY)
            engine.run()
            engine.close()
            assert texts[0].versions[0] == (0, 1) and texts[0].versions[1][1] == 2
        else:
            follow_leader(own.model, reader)
        written.append([text.written for text in texts])
    return written


@pytest.mark.soak
@pytest.mark.slow(6)
def test_ranks_generate_together_in_turn_with_training(pool: Any) -> None:
    per_rank = pool.run(4, texts_in_turn, OF_GROUPS)
    for case, (_, _, shape, _) in enumerate(OF_GROUPS):
        state = built(shape, Mesh.single())
        own = generation(shape, Mesh.single(), state)
        own.refresh(1)
        first = alone(own.model, PROMPT, 8)
        train_a_little(state)
        for texts in filter(None, (rank[case] for rank in per_rank)):
            going, late = texts
            common = [a == b for a, b in zip(going, first, strict=False)]
            count = max(3, common.index(False) if False in common else 8)
            assert (
                going[count:]
                == alone(own.model, PROMPT + going[:count], 8)[: 8 - count]
            )
            assert going[:3] == first[:3] and late == alone(own.model, PROMPT, 8)
        assert sum(bool(rank[case]) for rank in per_rank) == 2


def alone(model: Any, prompt: list[int], count: int) -> list[int]:
    engine = Engine(model, budget=1000)
    (text,) = engine.submit(prompt, count, GREEDY)
    engine.run()
    return text.written


@pytest.mark.parametrize("shape", [SHAPE, TIED, LORA, EXPERTS])
def test_on_one_device_every_tensor_is_shared(shape: dict[str, Any]) -> None:
    mesh = Mesh.single()
    state = built(shape, mesh)
    own = generation(shape, mesh, state)
    moved = own.refresh(0)
    assert own.shared == {h.name for h in state.held} and not moved.received
    trained = {h.name: h.local.data_ptr() for h in state.held}
    assert {h.name: h.parameter.data_ptr() for h in own.held} == trained


@pytest.mark.parametrize("place", ["device", "file"])
def test_texts_go_on_with_new_weights_and_nothing_old_is_found(
    place: str, tmp_path: Path
) -> None:
    mesh, memory = Mesh.single(), Memory(weights=place, folder=str(tmp_path))
    state = built(SHAPE, mesh, memory=memory)
    own = generation(SHAPE, mesh, state)
    own.refresh(5)
    assert bool(own.shared) == (place == "device")
    engine = Engine(own.model, size=4)
    engine.weights_changed(5)
    (early,) = engine.submit(PROMPT, 6, GREEDY)
    engine.run()
    (running,) = engine.submit(PROMPT, 8, GREEDY)
    for _ in range(3):
        engine.step()
    before = running.written
    assert running.hits and before == early.written[:3]
    change_all_a_little(state)
    own.refresh(6)
    assert not engine.weights_changed(6)
    (late,) = engine.submit(PROMPT, 6, GREEDY)
    engine.run()
    other = parallelize(ModelShape(**SHAPE), mesh, Train(seed=4)).state
    change_all_a_little(other)
    model = generation(SHAPE, mesh, other)
    model.refresh(0)
    assert late.written == alone(model.model, PROMPT, 6) != early.written
    assert running.written == before + alone(model.model, PROMPT + before, 5)
    assert running.versions == [(0, 5), (3, 6)] and late.versions == [(0, 6)]
    assert own.fingerprint() == model.fingerprint()
    state.held[3].local.flatten()[0] += 1
    own.refresh(7)
    assert own.fingerprint() != model.fingerprint()


def change_all_a_little(state: State) -> None:
    state.expose()
    for h in state.held:
        h.local.copy_(h.local.flip(0) * 1.5)


def test_a_version_that_comes_again_finds_no_blocks_of_the_first_time() -> None:
    mesh = Mesh.single()
    state = built(SHAPE, mesh)
    own = generation(SHAPE, mesh, state)
    own.refresh(3)
    engine = Engine(own.model, size=4)
    engine.weights_changed(3)
    engine.submit(PROMPT, 2, GREEDY)
    engine.run()
    change_all_a_little(state)
    own.refresh(3)
    engine.weights_changed(3)
    (late,) = engine.submit(PROMPT, 6, GREEDY)
    engine.run()
    assert not late.hits and late.written == alone(own.model, PROMPT, 6)


@pytest.mark.parametrize(("layout", "options", "said"), [
    ("tp=2", {}, "1 ranks train, and 2 would generate together under tp=2; give a layout whose number of ranks"),
    ("dp=2", {}, "generation goes over tp, cp, pp and ep, and has no use for dp"),
    ("tp=2,sum=star", {}, "leave them out of roles.rollout.layout"),
    ("tp=2,tp_shares=auto", {}, "leave them out of roles.rollout.layout"),
    ("", {"weights": "int8"}, "cannot generate with weights 'int8'; choose from: float, bfloat16"),
])  # fmt: skip
def test_what_cannot_generate_is_refused(
    layout: str, options: dict[str, Any], said: str
) -> None:
    mesh = Mesh.single()
    state = built(SHAPE, mesh)
    with pytest.raises(UsageError) as refused:
        generation(SHAPE, mesh, state, layout, **options)
    assert said in str(refused.value)


def test_large_copies_of_weights_move_to_huge_pages_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = list[int]()
    monkeypatch.setattr(generation_model, "use_huge_pages", lambda: moved.append(1))
    copies: Any = SimpleNamespace(model=torch.nn.Linear(2, 2))
    for least, times in ((generation_model.LARGE, 0), (1, 1)):
        monkeypatch.setattr(generation_model, "LARGE", least)
        for copies.renewed in range(4):
            generation_model.use_huge_copies(copies)
        assert len(moved) == times
