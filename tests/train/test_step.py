"""What a step does besides being equal: schedules, mixed precision, compile, steps that are not finite."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import recipe, start, write_corpus
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.recipe import Optimizer
from weft.train.rule_optimizer import learning_rate
from weft.train.setup import build_for_training, prepare
from weft.train.step import accumulate, train_step, update
from weft.train.step_values import StepResult


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def steps(values: dict[str, Any], count: int, poison: int = -1) -> list[StepResult]:
    """On every rank: some steps; for step ``poison`` one rank's part of a parameter is infinite."""
    _, mesh, model, state, loader = start(values)
    victim = next(p.local for p in state.held if p.name == "norm.scale")
    results = []
    for step in range(count):
        kept = victim.clone()
        if step == poison and mesh.is_main:
            victim[0] = math.inf
        results.append(
            train_step(
                model,
                state,
                loader.step(step * 5) or [],
                mesh,
                lr=1e-2,
                clip=1.0,
                stop=step == 2,
            )
        )
        if step == poison:
            if mesh.is_main:
                assert torch.isinf(victim).any()  # nothing was updated
            victim.copy_(kept)
    return results


def tree(corpus: str, layout: dict[str, Any], **change: Any) -> dict[str, Any]:
    axes = {f"layout__{axis}": size for axis, size in layout.items()}
    return recipe(corpus, **axes, **change).model_dump(mode="json")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "layout", [{"shard": 2, "tp": 2}, {"dp": 2}, {"cp": 2}], ids=str
)
def test_non_finite_step_is_skipped_on_all_ranks_alike(
    pool: Any, corpus: str, layout: dict[str, Any]
) -> None:
    ranks = pool.run(Layout(**layout).world, steps, tree(corpus, layout), 4, 1)
    for results in ranks:
        assert [r.skipped for r in results] == [False, True, False, False]
        assert [r.stop for r in results] == [False, False, True, False]
        assert [r.loss for r in results if not r.skipped] == [
            r.loss for r in ranks[0] if not r.skipped
        ]


def test_a_pass_without_the_blocks_that_learn_has_a_loss(corpus: str) -> None:
    """As one of a partial pipeline may be, beside one device."""
    values = tree(
        corpus, {}, train__freeze=["blocks.1.*", "embedding*", "norm*", "head*"]
    )
    _, mesh, model, state, loader = start(values)
    share = accumulate(model, state, loader.step(0) or [], mesh, routes=[(1,)])
    assert 1 < share.item() < 10 and not any(
        grad.any() for grad in state.gradients().values()
    )


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"shard": 2},
        {"tp": 2},
        *(
            pytest.param(layout, marks=pytest.mark.soak)
            for layout in ({"dp": 2, "shard": 2}, {"cp": 2, "tp": 2})
        ),
    ],
    ids=str,
)
def test_bf16_stays_near_fp32(pool: Any, corpus: str, layout: dict[str, Any]) -> None:
    world = Layout(**layout).world
    wide = pool.run(world, steps, tree(corpus, layout, train__dtype="float32"), 6)[0]
    narrow = pool.run(world, steps, tree(corpus, layout, train__dtype="bfloat16"), 6)[0]
    assert [r.loss for r in narrow] == pytest.approx([r.loss for r in wide], rel=0.01)
    assert [r.loss for r in narrow] != [r.loss for r in wide]


@pytest.mark.parametrize(("layout", "recompute"), [
    pytest.param(layout, recompute, marks=mark)
    for layout, recompute, mark in [
        ({}, "selective", pytest.mark.slow), ({"shard": 2, "tp": 2}, "selective", pytest.mark.soak),
        ({"cp": 2}, "none", pytest.mark.soak), ({}, "none", pytest.mark.soak),
        ({"shard": 2, "tp": 2}, "none", pytest.mark.soak), ({"cp": 2}, "selective", pytest.mark.soak),
    ]
], ids=str)  # fmt: skip
def test_compiled_equals_eager(
    pool: Any, corpus: str, layout: dict[str, Any], recompute: str
) -> None:
    world = Layout(**layout).world
    eager = pool.run(world, steps, tree(corpus, layout, train__dtype="float32"), 3)[0]
    values = tree(
        corpus,
        layout,
        train__dtype="float32",
        train__compile=True,
        train__recompute=recompute,
    )
    compiled = pool.run(world, steps, values, 3, timeout=400)[0]
    assert [r.loss for r in compiled] == pytest.approx(
        [r.loss for r in eager], rel=1e-5
    )
    assert [r.grad_norm for r in compiled] == pytest.approx(
        [r.grad_norm for r in eager], rel=1e-4
    )


def test_schedules() -> None:
    cosine = Optimizer(lr=1.0, warmup=10, min_lr=0.1)
    rates = [learning_rate(cosine, s, 100) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert all(a >= b for a, b in pairwise(rates[10:])) and 0.1 < rates[-1] < 0.11
    wsd = Optimizer(lr=1.0, warmup=10, min_lr=0, schedule="wsd", decay=20)
    rates = [learning_rate(wsd, s, 100) for s in range(100)]
    assert (
        set(rates[10:81]) == {1.0}
        and rates[90] == pytest.approx(0.5)
        and rates[-1] == pytest.approx(0.05)
    )
    # shorter than warm-up and decay
    rates = [learning_rate(wsd, s, 20) for s in range(20)]
    assert (
        rates[9] == rates[10] == 1.0
        and rates[15] == pytest.approx(0.5)
        and rates[-1] == pytest.approx(0.1)
    )
    assert {
        learning_rate(Optimizer(lr=1.0, warmup=0, schedule="constant"), s, 9)
        for s in range(9)
    } == {1.0}


def test_decay_is_for_matrices_only(corpus: str, tmp_path: Path) -> None:
    settings = recipe(corpus)
    job = prepare(settings)
    mesh = Mesh.single()
    _, state = build_for_training(job.shape, mesh, settings)
    before = {h.name: h.local.clone() for h in state.held}
    update(state, {h.name: torch.zeros_like(h.local) for h in state.held}, lr=0.5)
    for h in state.held:  # without a gradient, decay alone changes a parameter
        assert torch.equal(
            h.local, before[h.name] * (1 - 0.5 * 0.1 * (h.local.dim() == 2))
        )
