"""Neurons in a file: exactly the resident model's tokens by its gates, nearly by a predictor; few neurons are read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.generate.one_text import OneText
from tests.generate.test_resting import DRAWN, FOLLOWING, PROMPT_IDS, SMALL
from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.leader import follow_leader, mesh_of_rank
from weft.generate.predictor_training import train_predictors
from weft.generate.sampling import GREEDY
from weft.layout.dims import Box, Logical
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.memory import neuron_slots, resting_neurons
from weft.memory.kept_records import keep_records
from weft.memory.nameless_file import TierError
from weft.memory.neuron_predictor import KIND, gate_hashes, write_predictor
from weft.memory.neuron_slots import NeuronSlots, StagedNeurons
from weft.memory.resting_layers import RestingLayers
from weft.memory.resting_neurons import RestingNeurons
from weft.memory.tier_file import PAGE
from weft.models.products import read_only
from weft.models.transformer import Transformer
from weft.models.values import Values
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.shapes.origin_shape import begun_shape

RELU = SMALL | {"activation": "relu", "ffn": 96}


def built(
    *resting: Any, layout: str = "", values: Values = DRAWN, **shape: Any
) -> Transformer:
    def lift(model: Transformer) -> None:
        for each in resting:
            each.lift(model, values)

    mesh = mesh_of_rank(Layout.parse(layout), "cpu") if layout else Mesh.single()
    model = parallelize(
        ModelShape(**RELU | shape), mesh, Train(), values, lift=lift, summed=False
    )[0]
    read_only(model)
    return model


@torch.inference_mode()
def logits(model: Transformer) -> torch.Tensor:
    reader = OneText(model)
    pieces = (PROMPT_IDS, *([i] for i in FOLLOWING))
    return torch.stack([reader.read(ids) for ids in pieces])


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.fixture
def predictor(tmp_path: Path) -> Any:
    """Writes a predictor of the model with some rank, for the ids of a text; how it does on each layer."""

    def write(rank: int, recall: float = 0.99, ids: int = 1600) -> Any:
        model = parallelize(ModelShape(**RELU), Mesh.single(), Train(), DRAWN)[0]
        drawn = random.Random(1)
        text = [drawn.randrange(61) for _ in range(ids)]
        trained = train_predictors(model, text, rank, recall, 1)
        write_predictor(
            tmp_path / "predictor", trained.layers, gate_hashes(model, DRAWN)
        )
        return trained

    return write


def test_gates_in_memory_give_the_resident_models_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(built())
    for share, staged in ((0.6, 8 << 20), (0.9, 7 * PAGE), (1.0, PAGE)):
        monkeypatch.setattr(neuron_slots, "STAGED", staged)
        if share == 0.9:  # as on a machine without a compiler
            monkeypatch.setattr(resting_neurons, "kernel_for", lambda x, stored: None)
        neurons = RestingNeurons(tmp_path, share)
        close(logits(built(neurons)), expected)
        staged_neurons = neurons.staged
        counts = staged_neurons.counts
        assert staged_neurons.kept.file.bytes["read"] == counts["read"] * PAGE
        assert counts["used"] < 3 * 6 * 96, "not all are active"
        if share == 1:
            assert counts["read"] <= 3 * 96, "each is read once"
        else:
            assert counts["read"] < counts["used"], "some are there already"
    assert len([*tmp_path.iterdir()]) == 1


def test_a_predictor_that_names_all_neurons_is_exact(
    tmp_path: Path, predictor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = predictor(4)
    all_of_them = {
        i: p._replace(bias=torch.full_like(p.bias, 1e9))
        for i, p in trained.layers.items()
    }
    model = built()
    write_predictor(tmp_path / "all", all_of_them, gate_hashes(model, DRAWN))
    expected = logits(model)
    for _ in range(2):
        neurons = RestingNeurons(tmp_path, 0.5, tmp_path / "all")
        close(logits(built(neurons)), expected)
        # then as on a machine without a compiler
        monkeypatch.setattr(resting_neurons, "kernel_for", lambda x, stored: None)
    assert neurons.staged.counts["used"] == 3 * 6 * 96
    assert neurons.staged.counts["ahead"] > 0, "the next layer's are read before"


@pytest.mark.soak
def test_a_trained_predictor_finds_what_is_asked_and_reads_less(
    tmp_path: Path, predictor: Any
) -> None:
    expected = logits(built())
    differences = []
    for rank, recall in ((32, 0.999), (16, 0.99), (4, 0.7)):
        trained = predictor(rank, recall, 6000)
        for score in trained.scores:
            assert abs(score.recall - recall) < 0.02
            assert score.active * recall < score.predicted
            assert rank < 16 or score.predicted < 0.9
        neurons = RestingNeurons(tmp_path, 0.7, tmp_path / "predictor")
        found = logits(built(neurons))
        differences.append(float((found - expected).norm() / expected.norm()))
    assert differences[0] < 0.05 and differences == sorted(differences)


@pytest.mark.soak
def test_what_a_request_gets_does_not_depend_on_others(
    tmp_path: Path, predictor: Any
) -> None:
    predictor(8, 0.8)
    texts = [PROMPT_IDS, FOLLOWING * 5, [7], [2, 3] * 9]

    def written(some: list[list[int]], *more: Any) -> list[list[int]]:
        neurons = RestingNeurons(tmp_path, 0.7, tmp_path / "predictor")
        engine = Engine(built(neurons, *more), 512, budget=16)
        requests = [engine.submit(ids, 9, GREEDY)[0] for ids in some]
        engine.run()
        return [request.written for request in requests]

    together = written(texts)
    assert together == [ids for text in texts for ids in written([text])]
    layers = RestingLayers(tmp_path / "layers", 1)
    assert written(texts, layers) == together
    assert not any(".ffn." in w.path for w in layers._layers[0].weights)


def test_half_the_bytes_are_stored_as_such(tmp_path: Path) -> None:
    def narrow(name: str, logical: Logical, box: Box) -> torch.Tensor:
        return DRAWN(name, logical, box).bfloat16()

    neurons = RestingNeurons(tmp_path, 0.8)
    close(logits(built(neurons, values=narrow)), logits(built(values=narrow)))
    assert neurons.layers[0].stored == torch.bfloat16


def test_what_cannot_be_is_said(tmp_path: Path, predictor: Any) -> None:
    predictor(4, recall=0.0)
    for shape, said in (
        (
            {"activation": "silu"},
            "this one has activation silu; leave it out, or train one",
        ),
        ({"experts": 4, "experts_per_token": 1}, "this one has experts"),
        ({"small_ffn": 16}, "this one has small feed-forwards beside"),
        ({"adapter": {"rank": 2}}, "merge it first"),
    ):
        with pytest.raises(UsageError, match=said):
            built(RestingNeurons(tmp_path, 0.5), **shape)
    with pytest.raises(
        UsageError, match=r"--neurons 0.3 has no room for the gates, which take 0.33"
    ):
        built(RestingNeurons(tmp_path, 0.3))
    path = tmp_path / "predictor"
    with pytest.raises(
        UsageError, match="was trained for another model; train one for this"
    ):
        built(RestingNeurons(tmp_path, 0.5, path), ffn=64)
    with pytest.raises(UsageError, match="cannot be read"):
        built(RestingNeurons(tmp_path, 0.5, tmp_path / "none"))
    with pytest.raises(UsageError, match="cannot be read"):
        built(RestingNeurons(tmp_path, 0.5, Path(__file__)))
    model = built()
    gates = json.dumps(gate_hashes(model, DRAWN))
    for more in ({}, {"gates": gates}):
        save_file({}, path, {"kind": KIND} | more)
        with pytest.raises(UsageError, match="is damaged; train it again"):
            built(RestingNeurons(tmp_path, 0.5, path))
    for ids, rank, said in (
        ([3] * 99, 4, "99 tokens, and predictors need"),
        ([3] * 9999, 99, "--rank 99 is more"),
    ):
        with pytest.raises(UsageError, match=said):
            train_predictors(model, ids, rank, 0.9, 1)
    with pytest.raises(UsageError, match="predictors are for dense models"):
        train_predictors(built(activation="silu"), [3] * 9999, 4, 0.9, 1)
    built(RestingNeurons(tmp_path / "f", 0.5))
    [file] = (tmp_path / "f").iterdir()
    damaged = bytearray(file.read_bytes())
    for neuron in range(3 * 96):
        damaged[neuron * PAGE + 9] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(TierError, match=f"damaged; remove {file}"):
        logits(built(RestingNeurons(tmp_path / "f", 0.5)))


def test_slots_hold_what_was_used_last(tmp_path: Path) -> None:
    """Whatever is asked for comes, with the right content, and the last steps' neurons are not read again."""

    def fill(index: int, record: torch.Tensor) -> None:
        record.view(torch.int32).fill_(index)

    cpu = torch.device("cpu")
    kept = keep_records(
        tmp_path, "--neurons-in", "neurons-x", 2 * 40, PAGE, fill, cpu, compared=False
    )
    drawn = random.Random(3)
    for count in (1, 7, 20, 40):
        staged = StagedNeurons(kept)
        staged.room = 5
        slots = NeuronSlots(staged, 40, 40, count, cpu)
        recent = list[int]()  # by their last use
        for _ in range(60):
            wanted = np.array(sorted(drawn.sample(range(40), drawn.randint(0, 9))), int)
            before, held = staged.counts["read"], {*slots._neuron.tolist()} - {-1}
            got = list[int]()
            for neurons, memory, records in slots.using(wanted):
                numbers = memory[torch.from_numpy(records)].view(torch.int32)
                assert (numbers == torch.from_numpy(neurons + 40)[:, None]).all()
                got += neurons.tolist()
            assert sorted(got) == wanted.tolist()
            assert staged.counts["read"] - before == len({*wanted.tolist()} - held)
            recent = [n for n in recent if n not in wanted] + wanted.tolist()
            if len(wanted) <= count:
                assert {*wanted.tolist()} <= {*slots._neuron.tolist()}
        if count == 40:
            assert staged.counts["read"] == len({*recent})


def test_what_is_read_ahead_comes_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right and wrong guesses, for layers in any order, also while another layer uses what was guessed."""

    def fill(index: int, record: torch.Tensor) -> None:
        record.view(torch.int32).fill_(index)

    monkeypatch.setattr(neuron_slots, "TRIED", 1000)
    cpu, drawn = torch.device("cpu"), random.Random(4)
    kept = keep_records(
        tmp_path, "--neurons-in", "neurons-y", 3 * 40, PAGE, fill, cpu, compared=False
    )
    staged = StagedNeurons(kept)
    layers = [NeuronSlots(staged, 40 * i, 40, 9, cpu) for i in range(3)]

    def some(near: int) -> np.ndarray:
        return np.array(sorted(drawn.sample(range(near, near + 15), 6)), int)

    for step in range(80):
        layer = drawn.choice(layers)
        wanted = some(step % 25)
        got = list[int]()
        for neurons, memory, records in layer.using(wanted):
            for other in drawn.sample(layers, drawn.randint(0, 2)):
                other.expect(some(step % 25))
            numbers = memory[torch.from_numpy(records)].view(torch.int32)
            expected = torch.from_numpy(neurons + layer.first)[:, None]
            assert (numbers == expected).all()
            got += neurons.tolist()
        assert sorted(got) == wanted.tolist()
    assert staged.counts["ahead"] > 20
    monkeypatch.setattr(neuron_slots, "TRIED", 5)
    slots = NeuronSlots(staged, 0, 40, 9, cpu)
    assert slots.guessing
    slots.expect(np.arange(6))
    assert [*slots.using(np.arange(30, 36))] and not slots.guessing, "all were wrong"


def test_a_model_starts_as_a_relu_model_from_one_that_is_not() -> None:
    base = ModelShape(**SMALL)
    given = ModelShape.model_validate({"from": "m", "activation": "relu"})
    assert begun_shape(given, base).activation == "relu"
    silu = ModelShape.model_validate({"from": "m", "activation": "silu"})
    with pytest.raises(UsageError, match="'silu', but"):
        begun_shape(silu, ModelShape(**RELU))


def layered(layout: str, folder: str, predictor: str | None) -> list[list[int]]:
    """On every rank: an engine whose neurons rest in a file; on the first, what it writes."""
    neurons = RestingNeurons(Path(folder), 0.8, predictor and Path(predictor))
    model = built(neurons, layout=layout)
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank():
        follow_leader(model)
        return []
    engine = Engine(model, 512, ranks=bool(layout))
    requests = [engine.submit(ids, 9, GREEDY)[0] for ids in (PROMPT_IDS, FOLLOWING)]
    engine.run()
    engine.close()
    return [request.written for request in requests]


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["tp=2", "pp=2"])
def test_every_rank_reads_its_own_neurons(
    pool: Any, layout: str, tmp_path: Path, predictor: Any
) -> None:
    predictor(8, 0.9)
    for file in (None, str(tmp_path / "predictor")):
        expected = layered("", str(tmp_path), file)
        found, *_ = pool.run(Layout.parse(layout).world, layered, layout, str(tmp_path), file)  # fmt: skip
        assert found == expected
