"""Zeroth-order steps with weights in files: each unit comes and goes once per step, and no bit is another."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cases import Case, recipe, start, write_corpus
from tests.checkpoint.test_resume import go, series, state_of
from tests.memory.test_tiers import disk_that_fails, regions
from tests.prove.test_equality import difference
from weft.layout.mesh import Mesh
from weft.memory.nameless_file import TierError
from weft.memory.resting import RestingGroup
from weft.memory.tier_file import BufferPool
from weft.parallel.state import State
from weft.parallel.units import TableUnit
from weft.recipe import Recipe
from weft.techniques.phases.zeroth_order.two_points import ZerothOrder
from weft.train.build_step import build_step
from weft.train.setup import build_for_training, prepare
from weft.train.step import StepContext
from weft.train.step_values import StepResult

LAYOUTS: list[Case] = [
    {"pairs": 1, "dp": 2, "shard": 2}, {"dp": 2, "shard": 2}, {"pp": 2}, {"tp": 2, "cp": 2},
    {"pp": 2, "shard": 2, "vocab_barriers": 1}, {"pp": 2, "schedule": "interleaved-1f1b"},
    {"pp": 2, "schedule": "dualpipe"}, {"shard": 4, "secondary": 2}, {"pairs": 1, "dp": 2, "pp": 2},
]  # fmt: skip
QUICK = 1


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def streamed(corpus: str, folder: Path, **change: Any) -> Recipe:
    given = {
        "optimizer__estimate": "zeroth-order",
        "optimizer__kind": "sgd",
        "train__micro_batch": 2,
    }
    return recipe(
        corpus,
        memory__weights="file",
        memory__folder=str(folder),
        **{**given, **change},
    )


def run(
    settings: Recipe, steps: int, finish: bool = True, seen: list[State] | None = None
) -> tuple[list[StepResult], State]:
    """Some steps on one device; ``seen`` gets the state before the first, also if they fail."""
    job, mesh = prepare(settings), Mesh.single()
    model, state = build_for_training(job.shape, mesh, settings)
    if seen is not None:
        seen.append(state)
    stepper, loader = (
        build_step(StepContext(model, state, mesh), settings),
        job.loader(job.corpus.train, mesh),
    )
    results: list[StepResult] = []
    for step in range(steps):
        results += stepper.take(loader.step(step * settings.train.batch) or [], 1e-3)
    return results + (stepper.finish() if finish else []), state


def in_memory(settings: Recipe) -> Recipe:
    return settings.model_copy(update={"memory": Recipe(name="x").memory})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", [
    {"train__seed": 0},
    {"optimizer__kind": "adamw", "optimizer__ema": 0.5, "train__dtype": "float32", "train__micro_batch": 1},
    {"optimizer__kind": "muon", "model__tied": True, "train__freeze": ["blocks.0.*"]},
    {"adapter__rank": 2, "adapter__kind": "lora", "optimizer__kind": "lion"},
], ids=str)  # fmt: skip
def test_deferred_updates_are_immediate_ones(
    corpus: str, tmp_path: Path, change: dict[str, Any]
) -> None:
    """To the last bit; and whoever looks before the next visit sees them made."""
    settings = streamed(corpus, tmp_path, **change)
    plain, resident = run(in_memory(settings), 3)
    wanted = {name: part.values.clone() for name, part in resident.tensors().items()}
    for finish in (True, False):
        found, state = run(settings, 3, finish)
        assert found == plain and state.updates == 3 and bool(state.due) is not finish
        tensors = state.tensors()
        assert not state.due and tensors.keys() == wanted.keys()
        for name, part in tensors.items():
            assert torch.equal(part.values, wanted[name]), name


def test_an_update_without_a_slope_decays_weights(corpus: str, tmp_path: Path) -> None:
    settings = streamed(corpus, tmp_path, optimizer__weight_decay=0.1)
    states = []
    for each in (settings, in_memory(settings)):
        _, state = run(each, 0)
        job, mesh = prepare(each), Mesh.single()
        stepper = build_step(
            StepContext(*build_for_training(job.shape, mesh, each), mesh), each
        )
        assert isinstance(stepper.update, ZerothOrder)
        stepper.update._update(0.0, 0, lr=0.5)
        stepper.finish()
        before, after = state.tensors(), stepper.state.tensors()
        weight, norm = "model.blocks.0.attention.wq", "model.norm.scale"
        assert torch.allclose(
            after[weight].values, before[weight].values * 0.95, rtol=1e-12
        )
        assert torch.equal(after[norm].values, before[norm].values)
        states.append(after)
    assert all(
        torch.equal(states[0][name].values, part.values)
        for name, part in states[1].items()
    )


def test_a_step_reads_and_writes_each_unit_once(corpus: str, tmp_path: Path) -> None:
    """Whatever the microbatches; a tied embedding is used at both ends, and so read twice."""
    for change in (
        {"train__micro_batch": 1},
        {"optimizer__kind": "adamw"},
        {"model__tied": True},
    ):
        _, state = run(streamed(corpus, tmp_path, **change), 3)
        size = regions(state)
        tied = sum(
            groups["weights"].region.size  # type: ignore[union-attr]
            for unit, groups in state.tiers.groups.items()
            if "model__tied" in change
            and any(h.name.startswith("embedding") for h in unit.held)  # type: ignore[attr-defined]
        )
        assert "gradients" not in size and ("moments" in size) == (
            "optimizer__kind" in change
        )
        # Three passes with two updates on the way, and the last update at the end.
        every, moments = size["weights"], size.get("moments", 0)
        assert state.tiers.bytes == {
            "read": 3 * (every + tied) + every + 3 * moments,
            "written": 3 * (every + moments),
        }


def test_two_units_are_in_memory(corpus: str, tmp_path: Path) -> None:
    """Buffers of the one that is computed and the one that comes; one of them is gathered, at both points."""
    most: dict[str, int] = {"buffers": 0, "gathered": 0}
    with ExitStack() as stack:
        taken: list[Any] = []
        gathered: set[Any] = set()
        take, give, gather, release = (
            BufferPool.take,
            BufferPool.give,
            TableUnit.gather_at,
            TableUnit.release,
        )

        def taking(pool: BufferPool, size: int) -> torch.Tensor:
            taken.append(buffer := take(pool, size))
            most["buffers"] = max(most["buffers"], sum(b.numel() for b in taken))
            return buffer

        def giving(pool: BufferPool, buffer: torch.Tensor) -> None:
            taken[:] = [b for b in taken if b is not buffer]
            give(pool, buffer)

        def gathering(unit: TableUnit, points: Any) -> None:
            gather(unit, points)
            gathered.add(unit)
            most["gathered"] = max(most["gathered"], len(gathered))

        def releasing(unit: TableUnit, drop: bool) -> None:
            gathered.discard(unit)
            release(unit, drop)

        for target, name, by in ((BufferPool, "take", taking), (BufferPool, "give", giving),
                                 (TableUnit, "gather_at", gathering), (TableUnit, "release", releasing)):  # fmt: skip
            stack.enter_context(mock.patch.object(target, name, by))
        change = {"model__layers": 6, "optimizer__kind": "adamw"}
        _, state = run(streamed(corpus, tmp_path, **change), 3, finish=False)
        largest = sorted(
            sum(g.region.size for g in groups.values())
            for groups in state.tiers.groups.values()
        )  # type: ignore[union-attr]
        assert most["gathered"] == 1 and 0 < most["buffers"] <= sum(largest[-2:])
    assert all(
        isinstance(g, RestingGroup)
        for groups in state.tiers.groups.values()
        for g in groups.values()
    )


@pytest.mark.slow
def test_a_disk_that_fails_leaves_no_half_made_update_to_see(
    corpus: str, tmp_path: Path
) -> None:
    """At points of three steps and the update after them: the folder is named, and nobody can look at the state."""
    settings = streamed(corpus, tmp_path, optimizer__kind="adamw")
    seen: list[State] = []
    with disk_that_fails(at=0) as calls:
        run(settings, 3)
    for at in sorted({1 + calls["made"] * i // 12 for i in range(12)}):
        seen.clear()
        with (
            disk_that_fails(at),
            pytest.raises(TierError, match=r"memory\.folder = .*Input/output error"),
        ):
            run(settings, 3, seen=seen)
        with pytest.raises(TierError):
            seen[0].tensors()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", [
    pytest.param(v, id=" ".join(map(str, v.values())), marks=[pytest.mark.slow] * (i >= QUICK))
    for i, v in enumerate(LAYOUTS)
])  # fmt: skip
def test_equal_to_one_device(
    pool: Any, corpus: str, tmp_path: Path, layout: Case
) -> None:
    axes = {f"layout__{axis}": size for axis, size in layout.items() if axis != "pairs"}
    settings = streamed(
        corpus, tmp_path, optimizer__pairs="pairs" in layout, model__layers=4, **axes
    )
    found = pool.run(
        settings.layout.world, difference, settings.model_dump(mode="json")
    )[0]
    assert found.ok, found


def weights_after(values: dict[str, Any], slopes: list[float]) -> dict[str, Any]:
    """Every part of the weights after updates by these slopes, each but the last made on a visit."""
    settings, mesh, model, state, loader = start(values)
    stepper = build_step(StepContext(model, state, mesh), settings)
    zeroth = stepper.update
    assert isinstance(zeroth, ZerothOrder)
    for number, slope in enumerate(slopes):
        batches = loader.step(number * settings.train.batch) or []
        zeroth._shares(batches, number)
        zeroth._update(slope, number, 1e-2)
    return {
        h.name: (h.part(h.local.clone()).index, h.local.clone())
        for h in state.held
        if not state.expose()
    }


@pytest.mark.parametrize(
    "layout",
    [{"shard": 2}, pytest.param({"dp": 2, "shard": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_ranks_make_the_same_update_to_the_last_bit(
    pool: Any, corpus: str, tmp_path: Path, layout: Case
) -> None:
    slopes = [0.7, -1.3, 0.0, 2.1]
    alone = pool.run(
        1, weights_after, streamed(corpus, tmp_path).model_dump(mode="json"), slopes
    )[0]
    settings = streamed(
        corpus, tmp_path, **{f"layout__{axis}": size for axis, size in layout.items()}
    )
    for found in pool.run(
        settings.layout.world, weights_after, settings.model_dump(mode="json"), slopes
    ):
        for name, (index, values) in found.items():
            assert torch.equal(alone[name][1][index], values), name


@pytest.mark.slow
def test_runs_save_validate_and_go_on_as_in_memory(
    pool: Any, corpus: str, tmp_path: Path
) -> None:
    """What is validated and saved, averages of the parameters too, has every update; a run goes on from any tier."""
    change = {"checkpoint__every": 3, "validation__every": 2, "validation__batches": 1, "optimizer__kind": "adamw",
              "optimizer__ema": 0.5, "optimizer__use_ema": True}  # fmt: skip
    away = streamed(corpus, tmp_path, **change)
    resident, runs = in_memory(away).model_dump(mode="json"), {}
    for name, values, resume in (
        ("resident", resident, None),
        ("streamed", away.model_dump(mode="json"), None),
        ("on", away.model_dump(mode="json"), "resident"),
    ):
        runs[name] = tmp_path / name
        start_from = (
            str(runs[resume] / "checkpoints" / "step-000003") if resume else None
        )
        assert pool.run(1, go, values, str(runs[name]), start_from)[0][0] == 6
    wanted = {kind: series(runs["resident"], kind) for kind in ("train", "validation")}
    last = state_of(runs["resident"] / "checkpoints" / "step-000006", resident)
    for name in ("streamed", "on"):
        for kind, losses in wanted.items():
            assert series(runs[name], kind) == {
                s: x for s, x in losses.items() if s > 3 or name != "on"
            }
        found = state_of(runs[name] / "checkpoints" / "step-000006", resident)
        assert found.keys() == last.keys() and all(
            torch.equal(found[key], last[key]) for key in last
        )
