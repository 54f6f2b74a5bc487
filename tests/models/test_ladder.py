"""Ladder models: each part reads the residual stream without the part before it, over every layout as on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import Case, write_corpus
from tests.generate.test_many import NEW, PROMPTS, alone
from tests.models.test_shared_weights import empty, random_weights, tuned, values_of
from tests.prove.test_equality import difference, name, tree
from weft.checkpoint.convert.peft import write_adapter
from weft.errors import UsageError, WeftError
from weft.generate.decode_step import repeat_pass
from weft.generate.engine import Engine
from weft.generate.reader import PagedReader
from weft.generate.sampling import GREEDY
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.rope import angles
from weft.models.shared_weights import SharedWeights
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.planner.cost import Plan, passes
from weft.planner.engine_constants import ENGINES
from weft.planner.machine import DEVICES, machine_of
from weft.planner.memory import layer_bytes
from weft.prove.types import check_types
from weft.recipe import Adapter, ModelShape, Train
from weft.shapes.config import config_from_shape
from weft.shapes.origin_shape import begun_shape
from weft.shapes.shape import shape_of
from weft.techniques.drafters.small_model import DraftModel

T = torch.Tensor
WEFT = ENGINES["weft"]

TINY: dict[str, Any] = {
    "vocab": 31, "layers": 3, "embed": 24, "heads": 6, "kv_heads": 2, "ffn": 32, "init_std": 0.3, "residual": "ladder",
}  # fmt: skip
LADDER = {"residual": "ladder", "layers": 3}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


CASES: list[Case] = [
    {"layout": {"tp": 2}, "recompute": "full"},
    {"layout": {"pp": 2, "tp": 2}, "micro_batch": 2, "model": {"ladder_from": 1}},
]
MORE: list[Case] = [
    {"layout": {"dp": 2, "tp": 2}, "tied": True},
    {"layout": {"shard": 2, "tp": 2}, "recompute": "selective"},
    {"layout": {"shard": 2, "tp": 2}, "zero": 2, "model": {"ladder_from": 2}},
    {"layout": {"cp": 2, "tp": 2}, "recompute": "selective"},
    {"layout": {"cp": 3}, "recompute": "full"},
    {"layout": {"tp": 3}, "model": {"norm_after": True}, "recompute": "full"},
    {"layout": {"pp": 3}, "model": {"layers": 4, "ladder_from": 2}, "micro_batch": 1},
    {"layout": {"pp": 2, "vocab_barriers": 2, "tp": 2}, "micro_batch": 1},
    {"layout": {"pp": 2, "schedule": "zb-h1", "tp": 2}, "micro_batch": 1, "recompute": "full"},
    {"layout": {"pp": 2, "schedule": "dualpipe", "tp": 2}, "micro_batch": 1, "model": {"layers": 4}},
    {"layout": {"pp": 3, "skip": 0.2}, "micro_batch": 1, "model": {"layers": 6, "ladder_from": 2}},
    {"layout": {"tp": 2}, "model": {"experts": 4, "first_dense": 1, "router_early": True}, "recompute": "selective"},
    {"layout": {"dp": 2, "tp": 2, "ep": 4}, "model": {"experts": 4, "shared_experts": 1}},
    {"layout": {"tp": 2}, "mixer": "retention", "dtype": "float32"},
    {"layout": {"tp": 2}, "model": {"kv_rank": 5}},
    {"layout": {"tp": 2}, "memory": {"weights": "file", "moments": "file", "activations": "host"}},
    {"layout": {"shard": 2, "tp": 2}, "memory": {"activations": "file"}, "recompute": "full"},
    {"layout": {"shard": 2, "tp": 2}, "adapter": {"kind": "lora", "rank": 2, "dropout": 0.3}, "recompute": "full"},
    {"layout": {"tp": 2}, "optimizer": {"estimate": "zeroth-order"}},
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.soak) for case in MORE)],
    ids=name,
)
def test_every_layout_equals_one_device_of_the_ladder_model(
    pool: Any, corpus: str, case: Case
) -> None:
    case = case | {"model": LADDER | case.get("model", {})}
    values = tree(corpus, case)
    for section in ("memory", "adapter", "optimizer"):
        values[section] = (values.get(section) or {}) | case.get(section, {}) or None
    result = pool.run(Layout(**case["layout"]).world, difference, values)[0]
    assert result.ok, result


def build(**change: Any) -> Transformer:
    shape = ModelShape(**TINY | change)
    return parallelize(shape, Mesh.single(), Train(seed=2, dtype="float64"))[0]


@torch.no_grad()
@pytest.mark.parametrize("first", [0, 1])
def test_the_stream_is_that_of_the_paper(first: int) -> None:
    """Each part after the first of the ladder reads what the part before it has read, and that part's predecessor."""
    model = build(ladder_from=first)
    tokens, positions = torch.arange(9)[None] * 5 % 31, torch.arange(9)[None]
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    x = model.embedding(tokens)
    rope = angles(positions, model.freq, x.dtype)
    parts: list[Callable[[T], T]] = []
    for block in model.blocks.values():
        parts.append(lambda x, b=block: b.attention(b.attention_norm(x), rope, ends))
        parts.append(lambda x, b=block: b.ffn.share(b.ffn_norm(x)))
    for part in parts[: 2 * first]:
        x = x + part(x)
    before = x
    for part in parts[2 * first :]:
        before, x = x, x + part(before)
    torch.testing.assert_close(model.hidden(tokens, positions, ends), model.norm(x))
    standard = build(residual="standard", ladder_from=0)
    plain = standard.hidden(tokens, positions, ends)
    assert not torch.allclose(plain, model.norm(x), rtol=0.1)


@pytest.mark.parametrize(("change", "recompute"), [
    ({"experts": 4, "first_dense": 1}, "selective"),
    *(pytest.param(change, recompute, marks=pytest.mark.soak)
      for change in ({}, {"norm_after": True}) for recompute in ("none", "selective")),
], ids=str)  # fmt: skip
def test_types_hold(change: dict[str, Any], recompute: Any) -> None:
    layout = Layout(tp=2, dp=2, cp=2)
    shape = ModelShape(**TINY | {"ladder_from": 1} | change)
    assert check_types(shape, layout, Train(recompute=recompute)) is None


def test_steps_that_are_recorded_guesses_and_early_exits_write_the_same() -> None:
    model, other = build(ladder_from=1), build(ladder_from=1)
    expected = [alone(model, prompt, GREEDY).written for prompt in PROMPTS]
    for p in other.parameters():
        p.data *= 1.02
    recording = Engine(model, size=4)
    assert isinstance(recording.reader, PagedReader)
    assert recording.reader.record_decoding(repeat_pass) == ""
    drafters = [DraftModel(other, 3, 2, early_layer=2), DraftModel(model, 2)]
    for engine in (recording, *(Engine(model, size=4, drafter=d) for d in drafters)):
        texts = [
            engine.submit(prompt, len(written), GREEDY)[0]
            for prompt, written in zip(PROMPTS, expected, strict=True)
        ]
        engine.run()
        assert [text.written for text in texts] == expected


def test_models_that_share_blocks_are_computed_together() -> None:
    shape = ModelShape(**TINY, ladder_from=1)
    base = random_weights(shape)
    weights = {"": base, "a": tuned(base, "blocks.1"), "b": tuned(base, "blocks.2")}
    shared, models = SharedWeights("float"), dict[str, Transformer]()
    for key, values in weights.items():
        models[key] = empty(shape)
        shared.fill(models[key], values_of(values))
    engine = Engine(models[""])
    for key in ("a", "b"):
        engine.add_model(key, models[key])
    texts = {
        key: engine.submit(PROMPTS[1], NEW, GREEDY, adapter=key)[0] for key in models
    }
    engine.run()
    for key, model in models.items():
        assert texts[key].written == alone(model, PROMPTS[1], GREEDY).written


def test_what_is_refused() -> None:
    with pytest.raises(
        WeftError, match=r"no Hugging Face architecture has residual = 'ladder'"
    ):
        config_from_shape(ModelShape(**TINY))
    adapted = ModelShape(**TINY, adapter=Adapter(rank=2))
    with pytest.raises(WeftError, match=r"the adapter's model, whose residual = 'lad"):
        write_adapter({}, adapted, None, Path("nowhere"))
    with pytest.raises(ValueError, match=r"ladder_from = 3 .* layers = 3"):
        ModelShape(**TINY, ladder_from=3)
    with pytest.raises(ValueError, match=r"ladder_from = 1 .* 'standard'"):
        ModelShape(**TINY | {"residual": "standard"}, ladder_from=1)


def test_a_standard_model_is_converted_and_a_ladder_stays_one() -> None:
    given = ModelShape(**{"from": "there", "residual": "ladder", "ladder_from": 4})
    standard = ModelShape(**TINY | {"layers": 6, "residual": "standard"})
    shape = begun_shape(given, standard)
    assert (shape.layers, shape.residual, shape.ladder_from) == (6, "ladder", 4)
    ladder = shape.model_copy(update={"origin": None})
    assert begun_shape(ModelShape(**{"from": "there"}), ladder).ladder_from == 4
    with pytest.raises(
        UsageError, match=r"model\.ladder_from = 4, but .* has 3 layers"
    ):
        begun_shape(given, standard.model_copy(update={"layers": 3}))
    other = ModelShape(**{"from": "there", "residual": "ladder", "ladder_from": 2})
    with pytest.raises(UsageError, match=r"model\.ladder_from = 2, but"):
        begun_shape(other, ladder)


def test_plans_hide_its_sums_and_hold_the_whole_stream() -> None:
    layers = {"layers": 8, "embed": 4096, "heads": 32, "vocab": 32_000}
    standard = shape_of(ModelShape(**layers))
    ladder = shape_of(ModelShape(**layers, residual="ladder"))
    half = shape_of(ModelShape(**layers, residual="ladder", ladder_from=4))
    assert (standard.ladder, half.ladder, ladder.ladder) == (0, 0.5, 1)
    plan = Plan(tp=8, batch=8, seq=4096)
    machine = machine_of(DEVICES["H100-80GB"])
    exposed = [
        passes(each, machine, plan, WEFT).tp for each in (standard, half, ladder)
    ]
    assert exposed[0] > exposed[1] > exposed[2] == 0
    # where a sum takes longer than a layer computes, the rest shows
    slow = replace(machine, link=machine.link / 100)
    slower = [passes(each, slow, plan, WEFT).tp for each in (standard, ladder)]
    assert slower[0] > slower[1] > 0
    kept = [layer_bytes(each, plan, WEFT)[0] for each in (standard, half, ladder)]
    assert kept[0] < kept[1] < kept[2]
