"""Adapters under every layout: equal to one device, alone in the state that learns, and nothing at the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import Case, recipe, write_corpus
from tests.prove.test_equality import difference
from weft.checkpoint.resume_check import model_differences
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.adapters import merged_parameters
from weft.prove.equality import run_layout
from weft.prove.types import check_types
from weft.recipe import Adapter, ModelShape, Recipe, Train, build_recipe
from weft.rehearse.ledger import AllocationWatch, Ledger
from weft.train.setup import build_for_training, prepare

KINDS = ["lora", "dora", "qlora"]
#: What each kind is tried under; the first three are the quick ones.
TOKENS = [0, 7, 97, 98, 101, 128, 129, 256]
CASES: list[Case] = [
    {"layout": {"shard": 2, "tp": 3}, "layout__zero": 3, "adapter__tokens": TOKENS},
    {"layout": {"shard": 2, "cp": 2, "tp": 2}, "adapter__dropout": 0.4, "adapter__rank_pattern": {"wq": 2, "down": 5}},
    {"layout": {"shard": 2, "tp": 2}, "layout__zero": 3},
    {"layout": {"pp": 2, "shard": 2}, "layout__schedule": "zb-h1", "layout__zero": 2},
    {"layout": {"cp": 2, "tp": 2}, "train__recompute": "selective", "adapter__rank": 1},
    {"layout": {"tp": 2}, "model__kv_heads": 1, "model__qkv_bias": True, "train__recompute": "full"},
    {"layout": {"tp": 4}, "model__heads": 6, "model__kv_heads": 3, "adapter__rank_stabilised": True},
    {"layout": {"shard": 3}, "layout__zero": 1, "train__micro_batch": 1, "adapter__targets": ["q_proj", "down"]},
    {"layout": {"dp": 2, "shard": 2}, "layout__zero": 2, "train__micro_batch": 1},
    {"layout": {"pp": 2, "tp": 2}, "layout__schedule": "zb-v", "train__recompute": "full", "model__layers": 4},
    {"layout": {"pp": 2, "cp": 2}, "layout__schedule": "dualpipe", "model__layers": 4},
    {"layout": {"pp": 2, "tp": 2}, "layout__schedule": "zb-v", "train__recompute": "full", "model__layers": 4,
     "adapter__dropout": 0.4, "adapter__alpha_pattern": {"w*": 2}},
    {"layout": {"pp": 2, "tp": 2}, "layout__schedule": "zb-h1", "adapter__tokens": TOKENS, "model__tied": True},
    {"layout": {"pp": 2, "shard": 2}, "layout__schedule": "dualpipe", "model__layers": 4, "adapter__tokens": TOKENS},
    {"layout": {"pp": 2, "tp": 2}, "adapter__whole": ["embed_tokens"], "model__tied": True},
    {"layout": {"tp": 3}, "adapter__tokens": [97, 98]},
    {"layout": {"shard": 2, "tp": 2, "cp": 2}, "adapter__whole": ["lm_head"], "adapter__tokens": TOKENS,
     "adapter__tokens_of": ["embed_tokens"]},
    {"layout": {"pp": 2}, "layout__vocab_barriers": 1, "adapter__whole": ["embed_tokens", "lm_head"]},
    {"layout": {"shard": 3, "tp": 2}, "layout__balance": "greedy", "layout__zero": 1, "adapter__dropout": 0.5},
    {"layout": {"pp": 2, "shard": 2}, "train__micro_batch": 1, "memory__activations": "host", "adapter__dropout": 0.5},
    {"layout": {"pp": 2}, "layout__vocab_barriers": 1, "adapter__targets": ["blocks.1.*"]},
    {"layout": {"shard": 2}, "memory__weights": "host", "memory__activations": "host"},
    {"layout": {"pp": 2, "dp": 2}, "memory__weights": "host", "optimizer__post_validation": True},
]  # fmt: skip
QUICK = 5


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def adapted(corpus: str, kind: str, case: Case) -> Recipe:
    layout = {f"layout__{axis}": size for axis, size in case.get("layout", {}).items()}
    change = {name: value for name, value in case.items() if name != "layout"}
    return recipe(
        corpus, **{"adapter__kind": kind, "adapter__rank": 3, **layout, **change}
    )


def name(case: Case) -> str:
    return "-".join(
        str(Layout(**v)) if k == "layout" else f"{k.partition('__')[2]}:{v}"
        for k, v in case.items()
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=name(c), marks=[pytest.mark.slow] * (i >= QUICK))
        for i, c in enumerate(CASES)
    ],
)
def test_equal_to_one_device(pool: Any, corpus: str, case: Case, kind: str) -> None:
    settings = adapted(corpus, kind, case)
    found = pool.run(
        settings.layout.world, difference, settings.model_dump(mode="json")
    )[0]
    assert found.ok, found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(shard=2, cp=2, tp=2)], ids=str)
def test_types(corpus: str, kind: str, layout: Layout) -> None:
    shape = prepare(adapted(corpus, kind, {})).shape
    assert check_types(shape, layout, Train()) is None


def test_dropout_is_for_learning_alone(corpus: str) -> None:
    """Losses of steps change by it; a loss without a gradient does not. Resuming with another share is said."""
    plain, drops = (
        adapted(corpus, "lora", {"adapter__dropout": share, "optimizer__lr": 0.1})
        for share in (0.0, 0.5)
    )
    losses = {}
    for settings in (plain, drops):
        job, mesh = prepare(settings), Mesh.single()
        model, state = build_for_training(job.shape, mesh, settings)
        # else the second factor is zero, and there is nothing to drop
        for h in state.learning:
            h.local += 0.1
        (batch, *_) = job.loader(job.corpus.train, mesh).step(0) or []
        assert (batch.draws is None) == (settings is plain)
        again = [
            model(batch.tokens, batch.positions, batch.cu_seqlens, batch).item()
            for _ in range(2)
        ]
        assert again[0] == again[1]
        with torch.no_grad():
            silent = model(
                batch.tokens, batch.positions, batch.cu_seqlens, batch
            ).item()
        losses[settings.adapter and settings.adapter.dropout] = again[0], silent
        assert job.corpus.validation is not None
        (held, *_) = job.loader(job.corpus.validation, mesh).step(0) or []
        assert held.draws is None
    assert losses[0.0][0] == losses[0.0][1] == losses[0.5][1] != losses[0.5][0]


def test_another_share_of_dropout_is_the_same_model() -> None:
    one, other = (ModelShape(adapter=Adapter(dropout=share)) for share in (0.1, 0.3))
    assert not model_differences(one, other) and one != other
    assert model_differences(one, ModelShape(adapter=Adapter(rank=3, dropout=0.1)))


def logits(
    settings: Recipe, weights: dict[str, torch.Tensor] | None = None
) -> torch.Tensor:
    job = prepare(settings)
    values = (lambda name, logical, box: weights[name]) if weights else None
    model, _ = build_for_training(job.shape, Mesh.single(), settings, values)
    tokens = torch.arange(38).view(2, 19) % 257
    ends = torch.tensor([0, 19, 38], dtype=torch.int32)
    with torch.no_grad():
        return model(tokens, torch.arange(19).expand(2, 19), ends)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_new_adapter_changes_nothing(corpus: str, kind: str, dtype: str) -> None:
    plain = logits(recipe(corpus, train__dtype=dtype))
    assert torch.equal(logits(adapted(corpus, kind, {"train__dtype": dtype})), plain)


def test_a_new_adapter_changes_nothing_of_weights_in_four_bits(corpus: str) -> None:
    settings = adapted(corpus, "qlora", {"train__dtype": "float32"})
    job = prepare(settings)
    model, _ = build_for_training(job.shape, Mesh.single(), settings)
    assert torch.equal(
        logits(settings),
        logits(recipe(corpus, train__dtype="float32"), merged_parameters(model)),
    )


def test_recomputation_keeps_no_more_of_weights_in_four_bits(corpus: str) -> None:
    """Between forward and backward blocks keep their inputs alone, whatever form their weights have."""
    kept = {}
    for kind in ("lora", "qlora"):
        settings = adapted(
            corpus, kind, {"train__recompute": "full", "model__layers": 4}
        )
        job, mesh, ledger = prepare(settings), Mesh.single(), Ledger()
        model, _ = build_for_training(job.shape, mesh, settings)
        batch = (job.loader(job.corpus.train, mesh).step(0) or [])[0]
        with AllocationWatch(ledger):
            loss = model(batch.tokens, batch.positions, batch.cu_seqlens, batch)
            kept[kind] = ledger.level
        assert loss.requires_grad
    assert kept["qlora"] < 1.02 * kept["lora"]


def test_only_the_adapter_learns_and_is_saved(corpus: str) -> None:
    settings = adapted(corpus, "lora", {})
    job = prepare(settings)
    _, state = build_for_training(job.shape, Mesh.single(), settings)
    assert {h.name for h in state.held if h.learns} == {
        h.name for h in state.held if ".adapters." in h.name
    }
    assert not any(h.slots for h in state.held if not h.learns)
    assert state.gradients().keys() == {h.name for h in state.learning}
    saved = state.saved()
    assert saved and all(".adapters." in name for name in saved)
    # a and b of seven projections of two layers, and two moments of each
    assert len(saved) == 3 * 2 * 7 * 2


def test_frozen_by_pattern(pool: Any, corpus: str) -> None:
    for layout in ({"shard": 2}, {"pp": 2, "layout__tied": True}):
        change = {
            f"layout__{axis}": size for axis, size in layout.items() if "__" not in axis
        }
        settings = recipe(
            corpus,
            train__freeze=["embedding.*", "blocks.0.*"],
            model__tied="pp" in layout,
            **change,
        )
        found = pool.run(2, difference, settings.model_dump(mode="json"))[0]
        assert found.ok, found
        found = pool.run(2, learned, settings.model_dump(mode="json"))
        assert all(
            names and not any(n.startswith(("embedding", "blocks.0.")) for n in names)
            for names in found
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [{"shard": 2}, {"pp": 2}], ids=str)
def test_frozen_weights_are_held_in_bfloat16(
    pool: Any, corpus: str, layout: dict[str, int], kind: str
) -> None:
    settings = adapted(corpus, kind, {"layout": layout, "train__dtype": "bfloat16"})
    losses, types = pool.run(2, in_bfloat16, settings.model_dump(mode="json"))[0]
    assert all(4.5 < loss < 6 for loss in losses)
    assert types == {
        (True, torch.float32),
        (False, torch.bfloat16),
        *[(False, torch.uint8)][: kind == "qlora"],
    }


def in_bfloat16(
    values: dict[str, Any],
) -> tuple[list[float], set[tuple[bool, torch.dtype]]]:
    """The losses of two steps, and in which types the state is held of what learns and of what does not."""
    settings = build_recipe(values)
    types: set[tuple[bool, torch.dtype]] = set()
    mesh = Mesh.create(settings.layout, "cpu")
    trace = run_layout(
        prepare(settings),
        mesh,
        2,
        lambda _, state: types.update((h.learns, h.local.dtype) for h in state.held),
    )
    return trace.losses, types


def learned(values: dict[str, Any]) -> list[str]:
    settings = build_recipe(values)
    job = prepare(settings)
    _, state = build_for_training(
        job.shape, Mesh.create(settings.layout, "cpu"), settings
    )
    # there is no other place that has them
    assert state.saved().keys() >= {f"model.{h.name}" for h in state.held}
    return [h.name for h in state.learning]


@pytest.mark.parametrize(("change", "said"), [
    ({"adapter__targets": ["q_prj"]}, "'q_prj' matches no weight of this model; did you mean 'q_proj'"),
    ({"adapter__targets": ["blocks.7.*"]}, "adapter.targets: 'blocks.7.*' matches no weight"),
    ({"adapter__rank_pattern": {"q_prj": 4}}, "matches no weight that has an adapter; did you mean 'q_proj'"),
    ({"adapter__alpha_pattern": {"up": 4}, "adapter__targets": ["w*"]}, "alpha_pattern: 'up' matches no weight"),
    ({"train__freeze": ["embeding.*"]}, "train.freeze: 'embeding.*' matches no parameter"),
    ({"train__freeze": ["*"]}, "train.freeze leaves nothing to learn"),
])  # fmt: skip
def test_names_that_match_nothing_are_one_line(
    corpus: str, change: Case, said: str
) -> None:
    with pytest.raises(UsageError, match=said.replace("*", r"\*")) as refused:
        prepare(recipe(corpus, **change))
    assert "\n" not in str(refused.value)
