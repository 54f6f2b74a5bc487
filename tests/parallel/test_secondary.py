"""Secondary partitions: equal to one device, and backward's gathers stay among the nearest ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.cases import Case, recipe, start, write_corpus
from tests.prove.test_equality import difference, name, tree
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.parallel import units
from weft.prove.equality import Difference
from weft.recipe import Data, ModelShape, Recipe, Train
from weft.rehearse.rehearsed_step import plain_batches, rehearse
from weft.train.step import evaluate, train_step


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [
    {"layout": {"shard": 4, "secondary": 2}},
    {"layout": {"shard": 4, "secondary": 2}, "micro_batch": 1, "recompute": "full"},
    pytest.param(
        {"layout": {"shard": 2, "cp": 2, "tp": 2, "secondary": 2}, "micro_batch": 1, "recompute": "selective"},
        marks=pytest.mark.soak,
    ),
    {"layout": {"dp": 2, "shard": 4, "secondary": 2}, "tied": True},
    # backward never reaches the first block
    {"layout": {"shard": 4, "secondary": 2}, "micro_batch": 1, "freeze": ["blocks.0.*", "embed*"]},
    # 41 and 257 rows over 6 ranks
    {"layout": {"shard": 6, "secondary": 3}, "dtype": "float32", "extras": True},
    {"layout": {"cp": 4, "tp": 2, "secondary": 2, "order": "tp cp"}, "context": "zigzag"},
], ids=name)  # fmt: skip
def test_equal_to_one_device(pool: Any, corpus: str, case: Case) -> None:
    found = pool.run(Layout(**case["layout"]).world, difference, tree(corpus, case))[0]
    assert found.ok, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "pp=2,shard=4,secondary=2",
        pytest.param(
            "pp=2,shard=4,secondary=2,schedule=interleaved-1f1b", marks=pytest.mark.soak
        ),
    ],
)
def test_pipelines_gather_nearby_from_the_second_time_on(
    pool: Any, corpus: str, layout: str
) -> None:
    values = recipe(corpus, model__layers=4, train__batch=16, train__micro_batch=1)
    values = values.model_copy(update={"layout": Layout.parse(layout)})
    found, calls = pool.run(8, pipelined, values.model_dump(mode="json"))[0]
    assert found.ok, found
    far, near = calls[4], calls[2]
    # of rank 0: its chunks, with the embedding in the first
    owned = 2 if "interleaved" in layout else 1
    assert far == 3 * owned and (near > 0) is ("interleaved" in layout)


def pipelined(values: dict[str, Any]) -> tuple[Difference | None, Counter[int]]:
    """Difference to one device, and this rank's gathers by the number of ranks."""
    calls: Counter[int] = Counter()
    real = units.all_gather

    def gather(out: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> Any:
        calls[group.size()] += 1
        return real(out, mine, group=group)

    with mock.patch.object(units, "all_gather", gather):
        found = difference(values)
    return found, calls


LAYERS, EMBED, FFN, VOCAB = 3, 32, 48, 96


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("near", "passes", "tp"), [(0, 1, 1), (2, 1, 1), (4, 2, 1), (2, 2, 2)]
)
def test_gathers_go_to_whom_the_formula_says(near: int, passes: int, tp: int) -> None:
    """Per block and pass: one gather over all ranks, one over ``near``; gradients are reduced over all."""
    layout = Layout(shard=8, tp=tp, secondary=near)
    model = ModelShape(
        layers=LAYERS, embed=EMBED, heads=4, kv_heads=2, ffn=FFN, vocab=VOCAB, tied=True
    )
    train = Train(batch=8 * passes, micro_batch=1)
    settings = Recipe(model=model, layout=layout, data=Data(seq_len=8), train=train)
    events = rehearse(settings, model, plain_batches(settings, model), rank=5).events
    gathers: Counter[tuple[int, ...]] = Counter()
    moved: Counter[tuple[int, ...]] = Counter()
    for event in events:
        along_tp = len({rank % tp for rank in event.ranks}) > 1
        if event.kind == "collective" and event.name == "gather" and not along_tp:
            gathers[event.ranks] += 1
            moved[event.ranks] += event.bytes
    first = 5 % tp
    everyone = tuple(range(first, 8 * tp, tp))
    nearby = everyone[5 // tp // near * near :][:near] if near else everyone
    # wq, wk, wv, wo; gate, up, down; two norms
    block = (EMBED * EMBED * 3 + 3 * EMBED * FFN) // tp + 2 * EMBED
    root = VOCAB * EMBED // tp + EMBED
    expected = {everyone: passes * (4 * LAYERS * block + 4 * root)}
    expected[nearby] = expected.get(nearby, 0) + passes * 4 * LAYERS * block
    assert gathers == (
        Counter({everyone: passes * (LAYERS + 1)}) + Counter({nearby: passes * LAYERS})
    )
    assert dict(moved) == expected


def stale(values: dict[str, Any]) -> tuple[float, float]:
    """Validation loss after all parameters are set to zero, before and after an earlier validation."""
    _, mesh, model, state, loader = start(values)
    batches = loader.step(0) or []
    train_step(model, state, batches, mesh, lr=1e-3, clip=1.0)
    before = evaluate(model, state, [batches], mesh)
    with torch.no_grad():
        for part in state.held:
            part.local.zero_()
    return before, evaluate(model, state, [batches], mesh)


def test_a_validation_keeps_no_old_values(pool: Any, corpus: str) -> None:
    values = recipe(corpus, layout__shard=4, layout__secondary=2).model_dump(
        mode="json"
    )
    before, after = pool.run(4, stale, values)[0]
    assert after == pytest.approx(
        float(torch.tensor(257.0).log()), rel=1e-6
    ) and before != pytest.approx(after)


@pytest.mark.parametrize(("given", "message"), [
    ({"shard": 4, "zero": 2, "secondary": 2}, "use zero = 3 or leave secondary out"),
    ({"shard": 8, "secondary": 3}, "does not cut the ranks of shard=8 x cp=1 into groups; use one of 2, 4"),
    ({"shard": 4, "cp": 2, "secondary": 8}, "use one of 2, 4"),
    ({"dp": 4, "secondary": 2}, "leave it out"),
])  # fmt: skip
def test_what_cannot_be_is_said(given: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Layout.parse(",".join(f"{name}={value}" for name, value in given.items()))
