"""Updates before the norm is known: the waiting run's bits, whatever is clipped, skipped or fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.cases import recipe, start, write_corpus
from weft.parallel.state import State
from weft.train.speculation import Speculation
from weft.train.step import Stepper, StepResult
from weft.train.stepper import build_stepper

FILES = {"weights": "file"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


class Ran(NamedTuple):
    """What some steps came to."""

    results: list[StepResult]
    state: State
    stepper: Stepper


def spoiled(block: Any, given: Any, output: torch.Tensor) -> None:
    """Has the gradient of a block's output not be finite."""
    if output.requires_grad:
        output.register_hook(lambda grad: grad * float("inf"))


def run(values: dict[str, Any], clips: list[float]) -> Ran:
    """A step with each of these limits of the norm; NaN: with a gradient that is not finite."""
    settings, mesh, model, state, loader = start(values)
    stepper = build_stepper(model, state, mesh, settings.optimizer)
    results: list[StepResult] = []
    for step, clip in enumerate(clips):
        stepper.settings = stepper.settings.model_copy(update={"clip": clip if clip == clip else 0.0})
        broken = [block.register_forward_hook(spoiled) for block in model.blocks.values() if clip != clip]
        results += stepper.step(loader.step(step * settings.train.batch) or [], 1e-3)
        for hook in broken:
            hook.remove()
    return Ran(results + stepper.finish(), state, stepper)


def tree(corpus: str, memory: dict[str, str], **change: Any) -> dict[str, Any]:
    settings = recipe(corpus, **{f"memory__{key}": value for key, value in memory.items()}, **change)
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
    plain, waiting, _ = run(tree(corpus, memory | {"speculate": "none"}, **change), CLIPS)
    found, state, stepper = run(tree(corpus, memory, **change), CLIPS)
    assert [repr(r[:4]) for r in found] == [repr(r[:4]) for r in plain]
    same(state, waiting)
    assert isinstance(stepper, Speculation) and len(state.early) > 0
    assert [r.undone for r in found] == [not c > 0.6 and c != 0.0 for c in CLIPS]
    assert stepper.undone == 4 and f"4 of {len(CLIPS)} steps were undone" in stepper.summary()


def beside(values: dict[str, Any], clips: list[float]) -> tuple[float, int, list[bool]]:
    """On every rank: how much of the waiting run differs, how many units are early, and which steps were undone."""
    plain, waiting, _ = run(values | {"memory": values["memory"] | {"speculate": "none"}}, clips)
    found, state, stepper = run(values, clips)
    theirs = waiting.tensors()
    pairs = [(part.values.double(), theirs[name].values.double()) for name, part in state.tensors().items()]
    worst = max(((a - b).norm() / b.norm().clamp_min(1e-9)).item() for a, b in pairs if a.numel())
    losses = max(abs(a.loss - b.loss) for a, b in zip(found, plain, strict=True) if b.loss == b.loss)
    assert [r.skipped for r in found] == [r.skipped for r in plain] and isinstance(stepper, Speculation)
    return max(worst, losses), len(state.early), [r.undone for r in found]


#: The first two are the quick ones.
LAYOUTS: list[tuple[dict[str, int | str], dict[str, str], dict[str, Any]]] = [
    ({"shard": 2, "tp": 2}, {"speculate": "all"}, {"train__micro_batch": 1}),
    ({"pp": 2, "shard": 2}, FILES | {"speculate": "all"}, {"train__micro_batch": 1, "model__tied": True}),
    ({"dp": 2, "shard": 2}, FILES | {"speculate": "even"}, {"train__micro_batch": 1}),
    ({"tp": 2}, FILES | {"speculate": "all"}, {"optimizer__kind": "muon", "train__recompute": "full"}),
    ({"dp": 2}, {"speculate": "all"}, {"layout__zero": 1, "optimizer__state": "8bit", "train__micro_batch": 1}),
    ({"dp": 2, "pp": 2}, {"moments": "file", "speculate": "all"}, {"train__micro_batch": 1}),
    ({"pp": 2, "schedule": "zb-h1"}, {"speculate": "all"}, {"train__micro_batch": 1}),
    ({"cp": 2, "shard": 2}, {"weights": "host", "moments": "file", "speculate": "all"}, {"layout__zero": 2}),
    ({"dp": 2, "ep": 2}, FILES | {"speculate": "all"}, {"model__experts": 4, "train__micro_batch": 1}),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("layout", "memory", "change"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (i >= 2)) for i, case in enumerate(LAYOUTS)],
    ids=lambda value: "-".join(map(str, value.items() if isinstance(value, dict) else [value])),
)
def test_ranks_agree_on_what_is_undone(
    pool: Any, corpus: str, tmp_path: Path, layout: dict[str, Any], memory: dict[str, str], change: dict[str, Any]
) -> None:
    """The norm is that of all ranks: what is over the limit nowhere may be so together."""
    more = {f"layout__{key}": value for key, value in layout.items()}
    values = tree(corpus, {"folder": str(tmp_path), **memory}, model__layers=4, **more, **change)
    values["train"]["batch"] = 8
    world = recipe(corpus, **more).layout.world
    for worst, early, undone in pool.run(world, beside, values, CLIPS):
        assert worst < 1e-10 and early
        assert undone == [not c > 0.6 and c != 0.0 for c in CLIPS]
