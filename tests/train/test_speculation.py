"""Updates before the norm is known: the waiting run's bits, whatever is clipped, skipped or fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.cases import recipe, start, write_corpus
from tests.checkpoint.test_resume import go, state_of
from tests.checkpoint.test_resume import tree as save_tree
from tests.memory.test_tiers import disk_that_fails
from weft.memory.nameless_file import TierError
from weft.memory.step_traffic import Sizes, choose_early, step_traffic
from weft.parallel.state import State
from weft.techniques.phases.speculation.early_updates import Speculation
from weft.train.build_step import build_step
from weft.train.step import Step, StepContext
from weft.train.step_values import StepResult

FILES = {"weights": "file"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


class Ran(NamedTuple):
    """What some steps came to."""

    results: list[StepResult]
    state: State
    stepper: Step


def spoiled(block: Any, given: Any, output: torch.Tensor) -> None:
    """Has the gradient of a block's output not be finite."""
    if output.requires_grad:
        output.register_hook(lambda grad: grad * float("inf"))


def run(
    values: dict[str, Any], clips: list[float], seen: list[State] | None = None
) -> Ran:
    """A step with each of these limits of the norm; NaN: not finite. ``seen`` gets the state before them."""
    settings, mesh, model, state, loader = start(values)
    if seen is not None:
        seen.append(state)
    stepper = build_step(StepContext(model, state, mesh), settings)
    results: list[StepResult] = []
    for step, clip in enumerate(clips):
        stepper.clip = clip if clip == clip else 0.0
        broken = [
            block.register_forward_hook(spoiled)
            for block in model.blocks.values()
            if clip != clip
        ]
        results += stepper.take(loader.step(step * settings.train.batch) or [], 1e-3)
        for hook in broken:
            hook.remove()
    return Ran(results + stepper.finish(), state, stepper)


def tree(corpus: str, memory: dict[str, str], **change: Any) -> dict[str, Any]:
    settings = recipe(
        corpus, **{f"memory__{key}": value for key, value in memory.items()}, **change
    )
    return settings.model_dump(mode="json", by_alias=True)


def same(found: State, wanted: State) -> None:
    theirs = wanted.tensors()
    for name, part in found.tensors().items():
        assert torch.equal(part.values, theirs[name].values), name
    assert found.updates == wanted.updates
    for mine, other in zip(found.learning, wanted.learning, strict=True):
        assert mine.updates.item() == other.updates.item(), mine.name


#: Limits of some steps' norms, which are near 2: kept, clipped, not finite, clipped twice, kept.
CLIPS = [9.0, 1e-3, float("nan"), 0.5, 1e-2, 0.0, 9.0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", [
    {"train__micro_batch": 1},
    {"optimizer__kind": "muon", "optimizer__ema": 0.9, "train__micro_batch": 2},
    {"optimizer__state": "4bit", "model__ffn": 42, "train__recompute": "full", "model__tied": True},
    {"optimizer__kind": "adafactor", "train__freeze": ["blocks.0.*"]},
    {"adapter__rank": 2, "adapter__kind": "lora", "train__micro_batch": 3},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("memory", [
    {"speculate": "all"}, {"moments": "file", "speculate": "all"}, FILES | {"speculate": "all"},
    FILES | {"speculate": "even"}, FILES | {"moments": "host", "gradients": "host", "speculate": "all"},
], ids=lambda memory: "+".join(memory.values()))  # fmt: skip
def test_no_bit_is_that_of_another_run(
    corpus: str, tmp_path: Path, memory: dict[str, str], change: dict[str, Any]
) -> None:
    memory = {"folder": str(tmp_path), **memory}
    plain, waiting, _ = run(
        tree(corpus, memory | {"speculate": "none"}, **change), CLIPS
    )
    found, state, stepper = run(tree(corpus, memory, **change), CLIPS)
    assert [repr(r[:4]) for r in found] == [repr(r[:4]) for r in plain]
    same(state, waiting)
    speculation = stepper.update
    assert isinstance(speculation, Speculation) and len(speculation.early) > 0
    assert [r.undone for r in found] == [not c > 0.6 and c != 0.0 for c in CLIPS]
    assert (
        speculation.undone == 4
        and f"4 of {len(CLIPS)} steps were undone" in stepper.summary()
    )


def beside(values: dict[str, Any], clips: list[float]) -> tuple[float, int, list[bool]]:
    """On every rank: how much of the waiting run differs, how many units are early, and which steps were undone."""
    plain, waiting, _ = run(
        values | {"memory": values["memory"] | {"speculate": "none"}}, clips
    )
    found, state, stepper = run(values, clips)
    theirs = waiting.tensors()
    pairs = [
        (part.values.double(), theirs[name].values.double())
        for name, part in state.tensors().items()
    ]
    worst = max(
        ((a - b).norm() / b.norm().clamp_min(1e-9)).item()
        for a, b in pairs
        if a.numel()
    )
    losses = max(
        abs(a.loss - b.loss)
        for a, b in zip(found, plain, strict=True)
        if b.loss == b.loss
    )
    assert [r.skipped for r in found] == [r.skipped for r in plain]
    assert isinstance(stepper.update, Speculation)
    early = len(stepper.update.early)
    return max(worst, losses), early, [r.undone for r in found]


#: The first two are the quick ones.
LAYOUTS: list[tuple[dict[str, int | str], dict[str, str], dict[str, Any]]] = [
    ({"shard": 2, "tp": 2}, {"speculate": "all"}, {"train__micro_batch": 1}),
    (
        {"pp": 2, "shard": 2},
        FILES | {"speculate": "all"},
        {"train__micro_batch": 1, "model__tied": True},
    ),
    ({"dp": 2, "shard": 2}, FILES | {"speculate": "even"}, {"train__micro_batch": 1}),
    (
        {"tp": 2},
        FILES | {"speculate": "all"},
        {"optimizer__kind": "muon", "train__recompute": "full"},
    ),
    (
        {"dp": 2},
        {"speculate": "all"},
        {"layout__zero": 1, "optimizer__state": "8bit", "train__micro_batch": 1},
    ),
    (
        {"dp": 2, "pp": 2},
        {"moments": "file", "speculate": "all"},
        {"train__micro_batch": 1},
    ),
    ({"pp": 2, "schedule": "zb-h1"}, {"speculate": "all"}, {"train__micro_batch": 1}),
    (
        {"cp": 2, "shard": 2},
        {"weights": "host", "moments": "file", "speculate": "all"},
        {"layout__zero": 2},
    ),
    (
        {"dp": 2, "ep": 2},
        FILES | {"speculate": "all"},
        {"model__experts": 4, "train__micro_batch": 1},
    ),
]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "memory", "change"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (i >= 2))
        for i, case in enumerate(LAYOUTS)
    ],
    ids=lambda value: "-".join(
        map(str, value.items() if isinstance(value, dict) else [value])
    ),
)
def test_ranks_agree_on_what_is_undone(
    pool: Any,
    corpus: str,
    tmp_path: Path,
    layout: dict[str, Any],
    memory: dict[str, str],
    change: dict[str, Any],
) -> None:
    """The norm is that of all ranks: what is over the limit nowhere may be so together."""
    more = {f"layout__{key}": value for key, value in layout.items()}
    values = tree(
        corpus, {"folder": str(tmp_path), **memory}, model__layers=4, **more, **change
    )
    values["train"]["batch"] = 8
    world = recipe(corpus, **more).layout.world
    for worst, early, undone in pool.run(world, beside, values, CLIPS):
        assert worst < 1e-10 and early
        assert undone == [not c > 0.6 and c != 0.0 for c in CLIPS]


@pytest.mark.parametrize("how", ["even", "all"])
def test_bytes_are_those_of_the_formula(corpus: str, tmp_path: Path, how: str) -> None:
    """An early unit reads its weights twice and its moments once; where a pass turns two stages' weights stay."""
    steps, values = (
        3,
        tree(
            corpus, FILES | {"folder": str(tmp_path), "speculate": how}, model__layers=6
        ),
    )
    _, state, stepper = run(values, [0.0] * steps)
    assert isinstance(stepper.update, Speculation)
    units, updated_early = list(state.units), stepper.update.early
    read = written = 0
    for i, unit in enumerate(units):
        size = {
            kind: group.region.size
            for kind, group in state.tiers.groups[unit].items()
            if group.region
        }
        every, weights = sum(size.values()), size["weights"]
        early, first, last = unit in updated_early, i < 2, i >= len(units) - 2
        read += weights * (
            1 if early and first else steps if early else 1
        ) + weights * steps * (not last)
        read += steps * (size["moments"] if early else every)
        written += steps * every
    assert state.tiers.bytes == {"read": read, "written": written}
    assert len(updated_early) == (len(units) if how == "all" else 6)


def test_buffers_do_not_grow_with_blocks(corpus: str, tmp_path: Path) -> None:
    for layers in (4, 12):
        memory = FILES | {"folder": str(tmp_path), "speculate": "all"}
        _, state, _ = run(tree(corpus, memory, model__layers=layers), [0.0, 0.0])
        units = [
            sum(g.region.size for g in groups.values() if g.region)
            for groups in state.tiers.groups.values()
        ]
        assert state.tiers.pool.most <= 5 * max(units)


def test_even_units_are_those_that_balance_the_halves() -> None:
    """Of alike blocks, whose backward takes twice as long, seven in ten: forward has a third of the bytes then."""
    blocks = [Sizes(4, 4, 8, learns=True, free=True)] * 100
    early = choose_early(blocks, 2.0)
    found = step_traffic(blocks, early)
    assert sum(early) == pytest.approx(48 / 68 * 100, abs=1) and early[0]
    assert found.backward / found.forward == pytest.approx(2, rel=0.05)
    assert sum(choose_early(blocks, 3.0)) > sum(early)
    assert not any(choose_early([unit._replace(free=False) for unit in blocks], 2.0))
    runs = "".join("-+"[now] for now in early).split("-")
    assert max(map(len, runs)) - min(map(len, runs[1:-1])) <= 2, (
        "those that wait are not spread"
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("memory", [
    FILES | {"speculate": "all"}, FILES | {"speculate": "even"}, {"moments": "file", "speculate": "all"},
], ids=lambda memory: "+".join(memory.values()))  # fmt: skip
@pytest.mark.parametrize("points", [4, pytest.param(200, marks=pytest.mark.soak)])
def test_a_disk_that_fails_leaves_nothing_half_updated(
    corpus: str, tmp_path: Path, memory: dict[str, str], points: int
) -> None:
    """At so many points of four steps, of which one is undone: the error is named and the state cannot be saved."""
    values, clips = (
        tree(corpus, {"folder": str(tmp_path), **memory}),
        [9.0, 1e-3, 9.0, 9.0],
    )
    with disk_that_fails(at=0) as calls:
        run(values, clips)
    total = calls["made"]
    for at in sorted({1 + total * i // points for i in range(points)}):
        seen: list[State] = []
        with disk_that_fails(at), pytest.raises(TierError) as error:
            run(values, clips, seen)
        assert str(tmp_path) in str(error.value) and "Input/output error" in str(
            error.value
        )
        with pytest.raises(TierError):
            seen[0].tensors()


@pytest.mark.parametrize("memory", [{}, FILES], ids=str)
def test_a_step_that_fails_is_as_if_it_had_not_begun(
    corpus: str, tmp_path: Path, memory: dict[str, str]
) -> None:
    """Whatever ends a step in the middle of backward: what had been updated is not."""
    values = tree(
        corpus, {"folder": str(tmp_path), "speculate": "all", **memory}, model__layers=4
    )
    _, wanted, _ = run(values, [9.0])
    settings, mesh, model, state, loader = start(values)
    stepper = build_step(StepContext(model, state, mesh), settings)
    stepper.clip = 9.0
    stepper.take(loader.step(0) or [], 1e-3)
    stepper.finish()

    def fails(block: Any, given: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: [][0])

    model.blocks["1"].register_forward_hook(fails)
    with pytest.raises(IndexError):
        stepper.take(loader.step(settings.train.batch) or [], 1e-3)
    same(state, wanted)


@pytest.mark.soak
@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_in_the_middle(
    pool: Any, corpus: str, tmp_path: Path
) -> None:
    """Clipped and kept steps; three and three with other words are the six of a run that waits."""

    def values(how: str, steps: int) -> dict[str, Any]:
        constant = {
            "optimizer__schedule": "constant",
            "train__steps": steps,
            "optimizer__clip": 2.6,
        }
        memory = FILES | {"folder": str(tmp_path), "speculate": how}
        return save_tree(corpus, {"shard": 2}, **constant) | {"memory": memory}

    def final(folder: str, *runs: tuple[str, int]) -> dict[str, torch.Tensor]:
        out = tmp_path / folder
        for i, (how, steps) in enumerate(runs):
            pool.run(2, go, values(how, steps), str(out), str(out) if i else None)
        return state_of(out / "checkpoints" / "step-000006", values("none", 6))

    whole = final("whole", ("none", 6))
    for folder, first, then in (("on", "all", "none"), ("off", "none", "even")):
        mixed = final(folder, (first, 3), (then, 6))
        assert mixed.keys() == whole.keys()
        assert all(torch.equal(mixed[key], whole[key]) for key in whole)
    undone = [
        json.loads(line).get("undone")
        for line in (tmp_path / "on" / "metrics.jsonl").read_text().splitlines()
    ]
    assert 1 in undone
