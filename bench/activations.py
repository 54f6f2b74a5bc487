"""What blocks save for backward, kept, recomputed, on the host or in a file: time of a step and peak of saved bytes.

All sides take turns in one process on one thread, from the same values, and must end at the same bits. Then disks as
slow as make the choice hard, beside blocks that sleep: how many leave by the profile, and the most that are measured to
leave for nothing.

    python bench/activations.py [--rounds 5] [--folder DIR] [--quick] [--json bench/results/activations.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from step import Job, machine, tokens_of
from torch import nn

from weft.data.batch import Batch
from weft.layout.mesh import Mesh
from weft.memory import tier_file
from weft.memory.activations import PROFILED, SavedActivations
from weft.memory.heap import keep_heap
from weft.memory.offload_profile import HIDDEN
from weft.memory.tier_file import TierFile
from weft.models.hooks import Hooks
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Recipe, Train
from weft.train.rule_optimizer import RuleOptimizer
from weft.train.step import train_step

RESULTS = Path(__file__).parent / "results" / "activations.json"
CPU = torch.device("cpu")
#: Of blocks that sleep: how many there are, seconds of both passes, bytes that each saves.
BLOCKS, FORWARD, BACKWARD, SAVED = 10, 0.04, 0.08, 1 << 20
#: How many backwards a block takes to come back from the disks.
SPEEDS = (0.5, 1.0, 2.0)


def shape_of(quick: bool) -> ModelShape:
    wide = 64 if quick else 192
    return ModelShape(
        vocab=512,
        layers=6 if quick else 12,
        embed=wide,
        heads=4,
        kv_heads=2,
        ffn=3 * wide,
    )


class Side:
    """A model that takes the same step again and again."""

    def __init__(
        self,
        quick: bool,
        recompute: str = "none",
        saved: SavedActivations | None = None,
    ) -> None:
        self.mesh, shape = Mesh.single(), shape_of(quick)
        recipe = Recipe(model=shape, train=Train(recompute=recompute))  # type: ignore[arg-type]
        hooks = Hooks(saver=saved)
        self.model, self.state = parallelize(
            shape,
            self.mesh,
            recipe.train,
            hooks=hooks,
            optimizer=RuleOptimizer(recipe.optimizer, self.mesh),
        )
        self.saved, self.times = saved, list[float]()
        rows, length = (2, 128) if quick else (1, 512)
        tokens = tokens_of(Job(shape, rows, length))
        positions = torch.arange(length).repeat(rows, 1)
        cu_seqlens = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
        self.batch = Batch(
            tokens[:, :-1].contiguous(),
            tokens[:, 1:].contiguous(),
            positions,
            cu_seqlens,
        )

    def step(self) -> None:
        begun = time.perf_counter()
        train_step(self.model, self.state, [self.batch], self.mesh, lr=1e-3, clip=1.0)
        self.times.append(time.perf_counter() - begun)

    @property
    def values(self) -> list[torch.Tensor]:
        return [tensor.values for tensor in self.state.tensors().values()]


def in_turns(sides: dict[Any, Side], rounds: int, warm: int = 1) -> None:
    for turn in range(rounds + warm):
        for side in sides.values():
            side.step()
            if turn < warm:
                side.times.clear()


@contextmanager
def slow_disk(rate: float) -> Iterator[None]:
    """In here a tier's files move ``rate`` bytes per second, one call after the other."""
    link, calls = (
        threading.Lock(),
        {name: getattr(tier_file.os, name) for name in ("preadv", "pwritev")},
    )

    def slow(
        call: Callable[..., int], descriptor: int, memory: list[memoryview], offset: int
    ) -> int:
        with link:
            begun = time.perf_counter()
            done = call(descriptor, memory, offset)
            time.sleep(max(0.0, done / rate - (time.perf_counter() - begun)))
        return done

    for name, call in calls.items():
        setattr(tier_file.os, name, partial(slow, call))
    try:
        yield
    finally:
        for name, call in calls.items():
            setattr(tier_file.os, name, call)


def places(folder: Path, rounds: int, quick: bool) -> dict[str, Any]:
    """Keep, recompute, host and file side by side."""
    last = shape_of(quick).layers - 1
    moved = {
        "host": SavedActivations(CPU),
        "file": SavedActivations(CPU, TierFile(folder)),
    }
    moved["file, all but the last"] = SavedActivations(CPU, TierFile(folder), last)
    kept = SavedActivations(CPU)
    kept.away = 0  # counts what is saved, and moves nothing
    sides = {"keep": Side(quick), "recompute": Side(quick, "full")}
    sides |= {name: Side(quick, saved=saved) for name, saved in moved.items()}
    counted, inputs = Side(quick, saved=kept), SavedActivations(CPU)
    inputs.away = 0
    counted.step()
    recomputed = Side(quick, "full", inputs)
    recomputed.step()
    curves: dict[str, Any] = {}
    for name, saved in moved.items():
        saved.report = partial(curves.__setitem__, name)
    in_turns(sides, rounds, warm=2 * PROFILED)
    for name, side in sides.items():
        assert all(map(torch.equal, side.values, sides["keep"].values)), (
            f"{name} ends at other values"
        )
    peaks = {"keep": kept.peak, "recompute": inputs.peak} | {
        name: saved.peak for name, saved in moved.items()
    }
    ours = statistics.median(sides["keep"].times)
    rows = {
        name: {
            "step_s": statistics.median(side.times), "over_keep": statistics.median(side.times) / ours,
            "fastest_s": min(side.times), "saved_mib": peaks[name] / 2**20, "saved_share": peaks[name] / kept.peak,
        }
        for name, side in sides.items()
    }  # fmt: skip
    for name, saved in moved.items():
        rows[name]["blocks"] = saved.away or 0
    return {"rows": rows, "curves": curves}


def computing(folder: Path, rounds: int, quick: bool) -> dict[str, Any]:
    """With real compute: the number of blocks by the profile, and the most that measure as hidden."""
    found, numbers = {}, range(shape_of(quick).layers)
    for name in ("host", "file"):

        def saved(blocks: int, name: str = name) -> SavedActivations:
            return SavedActivations(
                CPU, TierFile(folder) if name == "file" else None, blocks
            )

        auto = Side(quick, saved=saved(0))
        for _ in range(2 * PROFILED + 1):
            auto.step()
        fixed = {n: Side(quick, saved=saved(n)) for n in numbers}
        assert fixed[0].saved is not None and auto.saved is not None
        fixed[0].saved.away = 0
        in_turns(fixed, rounds)
        times = {n: min(side.times) for n, side in fixed.items()}
        best = max(n for n, seconds in times.items() if seconds <= HIDDEN * times[0])
        chosen = auto.saved.away or 0
        found[name] = {
            "predicted": chosen,
            "best": best,
            "over_keep": times[chosen] / times[0],
            "seconds": times,
        }
        over = "{:.3f}, {:.3f} and {:.3f}".format(
            *(times[n] / times[0] for n in (chosen, best, numbers[-1]))
        )
        print(
            f"{name}: of {len(numbers)} blocks {chosen} leave by the profile, {best} as measured; these, and all but "
            f"the last, take {over} of keeping",
            flush=True,
        )
    return found


class Sleep(torch.autograd.Function):
    """What a block costs that computes for a while, and saves its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        made = x + 1
        ctx.save_for_backward(made)
        time.sleep(FORWARD)
        return made * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (made,) = ctx.saved_tensors
        assert float(made[0]) % 1 == 0
        time.sleep(BACKWARD)
        return grads[0]


def pass_seconds(saved: SavedActivations) -> float:
    """Of a pass over blocks that sleep, there and back."""
    begun = time.perf_counter()
    x, shared, module = (
        torch.zeros(SAVED // 4).requires_grad_(),
        torch.zeros(1),
        nn.Identity(),
    )
    for _ in range(BLOCKS):
        with saved.block(module, x, shared):
            x = Sleep.apply(x)
    x.sum().backward()
    return time.perf_counter() - begun


def amount(folder: Path, rounds: int, speeds: Sequence[float]) -> dict[str, Any]:
    """The number of blocks by the profile, and the most that measure as hidden, on disks of several speeds.

    ``speeds``: a block takes so many of its backward to come back. Blocks sleep as long as others would compute, so
    that the figures stand whatever else the machine does.
    """
    found = {}
    for speed in speeds:
        with slow_disk(SAVED / (speed * BACKWARD)):
            auto = SavedActivations(CPU, TierFile(folder))
            for _ in range(2 * PROFILED + 1):
                pass_seconds(auto)
            fixed = {
                n: SavedActivations(CPU, TierFile(folder), n) for n in range(BLOCKS)
            }
            fixed[0].away = 0
            times = {
                n: min(pass_seconds(saved) for _ in range(rounds))
                for n, saved in fixed.items()
            }
        best = max(n for n, seconds in times.items() if seconds <= HIDDEN * times[0])
        found[str(speed)] = {"predicted": auto.away, "best": best, "seconds": times}
        print(
            f"back in {speed} of a backward: of {BLOCKS} blocks {auto.away} leave by the profile, {best} as measured"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where the files are; a temporary folder by default"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small model, to see that it runs"
    )
    parser.add_argument("--only", choices=("places", "computing", "amount"))
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_heap()
    found: dict[str, Any] = {"machine": machine()}
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.only in (None, "places"):
            found["places"] = places(Path(folder), given.rounds, given.quick)
            for name, row in found["places"]["rows"].items():
                print(f"{name:24s}{row['step_s']:8.3f} s {row['over_keep']:6.2f} of keep {row['saved_mib']:8.1f} MiB "
                      f"{row['saved_share']:5.0%}  {row.get('blocks', '')}")  # fmt: skip
        if given.only in (None, "computing"):
            found["computing"] = computing(Path(folder), given.rounds, given.quick)
        if given.only in (None, "amount"):
            found["amount"] = amount(
                Path(folder), given.rounds, SPEEDS[:: 2 if given.quick else 1]
            )
    given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
