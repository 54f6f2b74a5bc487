"""Layers in a file: the tokens of the resident run with any window, and memory for the window and one layer more."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cli.test_mixtures import PROMPT, folder_of
from tests.conftest import Command
from tests.generate.one_text import OneText
from tests.generate.test_phase_options import PLAIN
from tests.generate.test_resting import DRAWN, FOLLOWING, PROMPT_IDS, SHAPES, SMALL
from weft.errors import UsageError, WeftError
from weft.generate.engine import Engine
from weft.generate.leader import follow_leader, mesh_of_rank
from weft.generate.lookup import Lookup
from weft.generate.open_engine import EngineOptions
from weft.generate.sampling import GREEDY
from weft.generate.weights_elsewhere import WeightsElsewhere, lift_of
from weft.layout.dims import Box, Logical
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.memory.nameless_file import TierError
from weft.memory.resting_experts import RestingExperts
from weft.memory.resting_layers import RestingLayers, spread_evenly
from weft.memory.tier_file import TierFile
from weft.models.products import read_only
from weft.models.transformer import Transformer
from weft.models.values import Values, with_adapter
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

DEEP = SMALL | {"layers": 6, "qk_norm": True, "qkv_bias": True}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "mixtral": SHAPES["mixtral"],
    "deepseek": SHAPES["deepseek"] | {"kv_rank": 16, "rope_dim": 4, "head_dim": 8, "kv_heads": 4, "qkv_bias": False,
                                      "qk_norm": False},
    "adapter": {"adapter": {"rank": 4}},
    "qlora": {"adapter": {"rank": 4, "kind": "qlora"}, "embed": 64, "ffn": 64},
    "hybrid": {"mixer": "retention", "softmax_every": 3},
}  # fmt: skip


def shape_of(kind: str) -> ModelShape:
    return ModelShape.model_validate(DEEP | KINDS[kind])


def built(kind: str, *resting: Any, values: Values = DRAWN) -> Transformer:
    shape = shape_of(kind)
    of_all = with_adapter(values, shape, 3)

    def lift(model: Transformer) -> None:
        for each in resting:
            each.lift(model, of_all)

    model = parallelize(shape, Mesh.single(), Train(), of_all, lift=lift)[0]
    read_only(model)
    return model


def narrow(name: str, logical: Logical, box: Box) -> torch.Tensor:
    return DRAWN(name, logical, box).bfloat16()


@torch.inference_mode()
def logits(model: Transformer) -> torch.Tensor:
    reader = OneText(model)
    pieces = (PROMPT_IDS, *([i] for i in FOLLOWING))
    return torch.stack([reader.read(ids) for ids in pieces])


RARE = [
    pytest.param(kind, marks=pytest.mark.soak)
    for kind in KINDS
    if kind not in ("dense", "mixtral")
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["dense", "mixtral", *RARE])
def test_any_window_computes_what_the_resident_model_does(
    kind: str, tmp_path: Path
) -> None:
    expected = logits(built(kind))
    for window, hold in ((1, True), (3, True), (3, False), (6, True)):
        layers = RestingLayers(tmp_path, window, hold=hold)
        found = logits(built(kind, layers))
        if window == 6:
            assert torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
        check_what_was_read(layers, passes=1 + len(FOLLOWING))
    assert len([*tmp_path.iterdir()]) == 1, "the first start's file serves all others"


def check_what_was_read(layers: RestingLayers, passes: int) -> None:
    """Bytes and memory are those of the formulas: a window of N layers has N - 1 that stay, and two places."""
    if layers.window == 6:
        assert not layers.held and not layers.resident_bytes
        return
    size, counts = layers.slots.records.size, layers.slots.counts
    held = layers.window - 1 if layers.hold else 0
    assert len(layers.held) == held and len(layers.streamed) == 6 - held
    assert layers.slots.count == (2 if layers.hold else layers.window + 1)
    assert layers.resident_bytes == (layers.window + 1) * size + layers._widened.numel()
    # each pass reads what does not stay, and the places have what comes next
    assert counts["read"] == passes * len(layers.streamed) + layers.slots.count - 1
    assert layers.file.bytes["read"] == (counts["read"] + held) * size


def test_weights_of_half_the_bytes_are_read_as_such(tmp_path: Path) -> None:
    expected = logits(built("dense", values=narrow))
    layers = RestingLayers(tmp_path, 2)
    found = logits(built("dense", layers, values=narrow))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    whole = RestingLayers(tmp_path, 2)
    built("dense", whole)
    assert layers.slots.records.size < 0.6 * whole.slots.records.size
    assert layers._widened.numel() and not whole._widened.numel()
    # in bytes of the resident run's layers, which are float32
    assert layers.resident_bytes <= 3 * whole.slots.records.size
    assert any("also keeps 1 such file" in line for line in whole.lines), whole.lines


@torch.inference_mode()
def test_a_model_in_bfloat16_computes_with_what_is_stored(tmp_path: Path) -> None:
    layers = RestingLayers(tmp_path, 1, dtype=torch.bfloat16)

    def narrow_model(*resting: Any) -> Transformer:
        lift = lift_of(resting)
        of_all = lift and partial(lift, values=DRAWN)
        model = parallelize(shape_of("dense"), Mesh.single(), Train(), DRAWN, lift=of_all)[0]  # fmt: skip
        read_only(model, "bfloat16")
        return model

    expected = logits(narrow_model())
    torch.testing.assert_close(logits(narrow_model(layers)), expected, rtol=0.02, atol=0.1)  # fmt: skip
    assert not layers._widened.numel()


def test_many_requests_get_the_tokens_of_the_resident_engine(tmp_path: Path) -> None:
    """Prompts in pieces, decode steps and new requests in one engine, with drafts from the text."""
    texts = [PROMPT_IDS, FOLLOWING * 5, [7], [2, 3] * 9]

    def written(model: Transformer) -> list[list[int]]:
        with_drafts = Engine(model, 512, budget=16, limit=3, drafter=Lookup())
        requests = [with_drafts.submit(ids, 9, GREEDY)[0] for ids in texts]
        with_drafts.run()
        return [request.written for request in requests]

    expected = written(built("dense"))
    for window in (1, 4):
        assert written(built("dense", RestingLayers(tmp_path, window))) == expected


def test_experts_may_rest_beside_the_layers(tmp_path: Path) -> None:
    experts, layers = RestingExperts(tmp_path / "e", 0.5), RestingLayers(tmp_path, 2)
    found = logits(built("mixtral", experts, layers))
    torch.testing.assert_close(found, logits(built("mixtral")), rtol=1e-4, atol=1e-4)
    assert not any("experts" in w.path for w in layers._layers[0].weights)
    assert experts.slots.counts["read"] and layers.slots.counts["read"]


def test_a_layer_that_fails_leaves_the_next_pass_right(tmp_path: Path) -> None:
    model = built("dense", RestingLayers(tmp_path, 1))
    expected = logits(model)
    handle = model.blocks["3"].ffn.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model)
    handle.remove()
    assert torch.equal(logits(model), expected)


def test_what_cannot_be_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="--window 7 is more than the 6 layers"):
        built("dense", RestingLayers(tmp_path, 7))
    with pytest.raises(
        WeftError,
        match=r"each token needs [\d,]+ MB, which is .* tokens/s; give a larger",
    ):
        built("dense", RestingLayers(tmp_path, 1, least_rate=1e9))
    built("dense", layers := RestingLayers(tmp_path, 1, least_rate=1e-3))
    assert any("this disk reads" in line and "at most" in line for line in layers.lines)
    [file] = tmp_path.iterdir()
    kept, damaged = file.read_bytes(), bytearray(file.read_bytes())
    damaged[5] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(
        TierError, match=rf"damaged; remove {file}, which the next start writes"
    ):
        built("dense", RestingLayers(tmp_path, 1))
    file.write_bytes(kept[:-4096])
    with pytest.raises(
        TierError, match=r"bytes where .* were written: it is damaged; remove it"
    ):
        built("dense", RestingLayers(tmp_path, 1))
    file.unlink()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        TierError, match=r"no room for [\d,]+ bytes in --layers-in .*No space"
    ):
        built("dense", RestingLayers(tmp_path, 1))
    assert not [*tmp_path.iterdir()]


def test_a_start_that_is_ended_while_it_writes_leaves_no_file(tmp_path: Path) -> None:
    if (child := os.fork()) == 0:
        # all is written, but it has no name yet
        TierFile.keep = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
        built("dense", RestingLayers(tmp_path, 1))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not [*tmp_path.iterdir()]


def layered(text: str, folder: str, window: int) -> list[list[int]]:
    """On every rank: an engine whose layers rest in a file; on the first, what it writes."""
    layout = Layout.parse(text)
    mesh = mesh_of_rank(layout, "cpu")
    layers = RestingLayers(Path(folder), window)
    model, _ = parallelize(
        shape_of("dense"), mesh, Train(), DRAWN, lift=partial(layers.lift, values=DRAWN), summed=False
    )  # fmt: skip
    read_only(model)
    if layout.world > 1 and dist.get_rank():
        follow_leader(model)
        return []
    engine = Engine(model, 512, ranks=layout.world > 1)
    requests = [engine.submit(ids, 9, GREEDY)[0] for ids in (PROMPT_IDS, FOLLOWING)]
    engine.run()
    engine.close()
    return [request.written for request in requests]


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "pp=2", "tp=2,pp=2"])
def test_every_rank_has_a_window_over_its_part(
    pool: Any, layout: str, tmp_path: Path
) -> None:
    expected = layered("", str(tmp_path), 6)
    for window in (1, 2):
        found, *_ = pool.run(
            Layout.parse(layout).world, layered, layout, str(tmp_path), window
        )
        assert found == expected


@pytest.mark.soak
def test_generate_writes_the_same(command: Command, tmp_path: Path) -> None:
    folder, _ = folder_of("mixtral", tmp_path / "model")
    words = ("generate", "--checkpoint", folder, "--prompt", PROMPT, "--tokens", "7", "--temperature", "0")  # fmt: skip
    code, expected, err = command(*words)
    assert code == 0, err
    where = ("--layers-in", tmp_path / "layers")
    code, out, err = command(*words, *where, "--window", "1")
    assert code == 0, err
    assert out == expected
    assert "weights rest in" in err and "layers were read from" in err
    for more, said in (
        ((*where, "--window", "99"), "--window 99 is more than the"),
        (where, "and --window N how many have room in memory; give both"),
        (("--layers-in", folder / "config.json", "--window", "1"), "cannot be used"),
    ):
        code, _, err = command(*words, *more)
        assert code in (1, 2) and said in err, (more, err)
        assert len(err.strip().splitlines()) == 1, err


@pytest.mark.parametrize(
    ("given", "weights", "layout", "said"),
    [
        ({"layers_in": "f"}, "float", "", "--window N how many have room in memory; give both"),
        ({"window": 2}, "float", "", "--window N how many have room in memory; give both"),
        ({"least_rate": 2.0}, "float", "", "--least-rate is for --layers-in FOLDER"),
        ({"neurons": 0.5}, "float", "", "--neurons is for --neurons-in FOLDER"),
        ({"predictor": "p"}, "float", "", "--predictor is for --neurons-in FOLDER"),
        ({"neurons_in": "f"}, "int4", "", "not in int4"),
        ({"layers_in": "f", "window": 1}, "int8", "", "not in int8"),
        ({"layers_in": "f", "window": 1}, "float", "ep=2,dp=2", "or ep in --layout"),
        ({"layers_in": "f", "window": 1}, "float", "tp=2,overlap=tokens", "or overlap in --layout"),
        ({"neurons_in": "f"}, "float", "tp=2,overlap=tokens", "or overlap in --layout"),
        ({"layers_in": "", "window": 1}, "float", "", "--layers-in is empty"),
        ({"layers_in": "s3://b/x", "window": 1}, "float", "", "is no folder of this computer"),
    ],
)  # fmt: skip
def test_options_that_conflict_are_said(
    given: dict[str, Any], weights: str, layout: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        WeightsElsewhere(**given).check(weights, Layout.parse(layout), {})


def test_engines_of_a_router_get_the_options() -> None:
    options = EngineOptions(**PLAIN, layers_in="f", window=2)
    options.check()
    assert {"--layers-in=f", "--window=2"} <= {*options.words()}
    for more in ({"phases": "split"}, {"models": Path(__file__).parent}):
        with pytest.raises(UsageError):
            EngineOptions(**PLAIN | more, layers_in="f", window=2).check()


def test_layers_that_stay_are_spread() -> None:
    assert spread_evenly([*range(6)], 0) == []
    assert spread_evenly([*range(6)], 2) == [2, 5]
    assert spread_evenly([*range(6)], 6) == [*range(6)]
