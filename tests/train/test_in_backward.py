"""Updates within backward: the same as after it, under every layout, with one unit's gradients at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import Case, recipe, write_corpus
from tests.prove.test_equality import difference
from weft.errors import WeftError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.parallel.state import Held, State, Unit
from weft.prove.equality import run_layout
from weft.recipe import Recipe
from weft.rehearse.ledger import AllocationWatch, Ledger
from weft.techniques.phases.in_backward.unit_updates import InBackward
from weft.train.build_step import build_step
from weft.train.setup import build_for_training, prepare
from weft.train.step import StepContext

#: The first two are the quick ones.
CASES: list[Case] = [
    {"layout": {"shard": 2, "tp": 2}, "layout__zero": 3},
    {
        "layout": {"dp": 2},
        "layout__zero": 2,
        "train__micro_batch": 1,
        "optimizer__kind": "muon",
    },
    {
        "layout": {"shard": 3},
        "layout__zero": 1,
        "train__micro_batch": 1,
        "model__tied": True,
    },
    {
        "layout": {"dp": 2, "shard": 2},
        "layout__zero": 3,
        "train__micro_batch": 1,
        "adapter__kind": "dora",
    },
    {"layout": {"cp": 2, "tp": 2}, "train__recompute": "full", "model__kv_heads": 1},
    {
        "layout": {"tp": 2},
        "optimizer__kind": "galore",
        "optimizer__rank": 5,
        "train__recompute": "selective",
    },
    {
        "layout": {"shard": 2},
        "optimizer__state": "8bit",
        "adapter__kind": "qlora",
        "memory__activations": "host",
    },
]
QUICK = 2


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def settings_of(corpus: str, case: Case, in_backward: bool = True) -> Recipe:
    layout = {f"layout__{axis}": size for axis, size in case.get("layout", {}).items()}
    change = {name: value for name, value in case.items() if name != "layout"}
    return recipe(
        corpus,
        optimizer__in_backward=in_backward,
        optimizer__clip=0,
        **layout,
        **change,
    )


def name(case: Case) -> str:
    return "-".join(
        str(Layout(**v)) if k == "layout" else f"{k.partition('__')[2]}:{v}"
        for k, v in case.items()
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=name(c), marks=[pytest.mark.slow] * (i >= QUICK))
        for i, c in enumerate(CASES)
    ],
)
def test_equal_to_one_device(pool: Any, corpus: str, case: Case) -> None:
    settings = settings_of(corpus, case)
    found = pool.run(
        settings.layout.world, difference, settings.model_dump(mode="json")
    )[0]
    assert found.ok, found


@pytest.mark.parametrize(
    "change",
    [{}, {"model__tied": True, "train__micro_batch": 2}, {"optimizer__kind": "lion"}],
)
def test_equal_to_updates_after_backward(corpus: str, change: Case) -> None:
    mine, plain = (
        run_layout(
            prepare(settings := settings_of(corpus, change, way)), Mesh.single(), 3
        )
        for way in (True, False)
    )
    assert settings.optimizer.in_backward is False  # of the second
    assert mine.losses == plain.losses and mine.norms == pytest.approx(
        plain.norms, rel=1e-12
    )
    assert (
        mine.params.keys() == plain.params.keys()
        and mine.slots.keys() == plain.slots.keys()
    )
    for key, part in plain.params.items():
        assert torch.equal(mine.params[key].values, part.values), key
    assert all(step.keys() == plain.grads[0].keys() for step in mine.grads)


def test_gradients_of_one_unit_at_a_time(corpus: str) -> None:
    """At the peak of a step with few tokens the gradients of all units but the two largest are not there."""
    peaks, sizes = {}, {}
    for way in (True, False):
        wide = {
            "model__layers": 8,
            "model__embed": 96,
            "model__ffn": 256,
            "train__batch": 1,
            "train__recompute": "full",
        }
        settings = settings_of(corpus, wide, way)
        job, mesh = prepare(settings), Mesh.single()
        model, state = build_for_training(job.shape, mesh, settings)
        batches = job.loader(job.corpus.train, mesh).step(0)
        assert batches is not None
        stepper, ledger = (
            build_step(StepContext(model, state, mesh), settings),
            Ledger(),
        )
        with AllocationWatch(ledger):
            stepper.take(batches, 1e-3)
        peaks[way] = ledger.peak
        assert all(h.grad is None for h in state.held)
        sizes = sorted(sum(h.local.nbytes for h in unit.held) for unit in state.units)
    assert len(sizes) == 9
    assert peaks[False] - peaks[True] >= 0.9 * sum(sizes[:-2])


def test_a_loss_that_is_not_finite_changes_nothing(corpus: str) -> None:
    settings = settings_of(corpus, {})
    job, mesh = prepare(settings), Mesh.single()
    model, state = build_for_training(job.shape, mesh, settings)
    batches = job.loader(job.corpus.train, mesh).step(0)
    assert batches is not None
    state.held[0].local.fill_(float("nan"))
    before = [h.local.clone() for h in state.held]
    result = build_step(StepContext(model, state, mesh), settings).take(batches, 1e-3)[
        0
    ]
    assert result.skipped and state.updates == 0
    for h, x in zip(state.held, before, strict=True):
        torch.testing.assert_close(h.local, x, rtol=0, atol=0, equal_nan=True)


def test_a_gradient_that_is_not_finite_ends_the_run(corpus: str) -> None:
    settings = settings_of(corpus, {})
    job, mesh = prepare(settings), Mesh.single()
    model, state = build_for_training(job.shape, mesh, settings)
    batches = job.loader(job.corpus.train, mesh).step(0)
    assert batches is not None
    parameter = next(h.parameter for h in state.held if h.name == "blocks.0.ffn.up")
    parameter.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(
        WeftError,
        match="in_backward had updated other parameters by then: go on from the last",
    ):
        build_step(StepContext(model, state, mesh), settings).take(batches, 1e-3)


def test_a_skipped_step_completes_the_sums_of_its_gradients() -> None:
    """Ranks without some of these gradients would else never start sums that other ranks wait for."""
    read, parameter = list[nn.Parameter](), nn.Parameter(torch.ones(2))
    place = Mesh.single().place
    logical = place.logical([], None)
    held = Held(
        "a", logical, place.hold(logical), parameter.detach(), parameter, read.append
    )
    unit = Unit([held])
    skipping: Any = SimpleNamespace(parts={unit: State([unit])}, skipped=True)
    InBackward._update(skipping, unit)
    assert read == [parameter] and parameter.tolist() == [1, 1]
