"""A training step whose state rests in a file, beside the same in memory, and with reads that are waited for.

One process, one thread of compute, direct I/O. In every turn each side takes a step: ``resident``; ``FSDP2``, PyTorch's
own offload to the CPU; in files ``waiting`` for the norm with all updates, ``even`` and ``all`` as ``memory.speculate``
says; ``blocking``, the best of these with a wait after every transfer; and the transfers of each alone. ``--tokens 0``
chooses so many tokens that compute and transfers take about the same. A pipelined step cannot be shorter than the
longer of the two; it is asked to keep 1.15 times that, and the first read and last write, which nothing hides.

Then the time that an update adds to a step, with moments in memory and in a file: after backward, and in a thread
beside it, which is a second core's work.

    python bench/tiers.py [--turns 5] [--tokens 0] [--folder .] [--json bench/results/tiers.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.memory.heap import keep_heap
from weft.memory.tiers import BufferPool, Region, Transfer
from weft.recipe import build_recipe
from weft.train.setup import assemble, prepare
from weft.train.step import clear_gradients
from weft.train.stepper import build_stepper

Transfers = list[tuple[Region, int, int, bool]]
FILES = {"weights": "file"}
WAYS = {"read": False, "written": True}


def recipe_of(given: argparse.Namespace, memory: dict[str, str], rows: int) -> Any:
    return build_recipe({
        "model": {"layers": given.layers, "embed": given.width, "heads": 8, "vocab": 512, "tied": False},
        "data": {"sources": [{"kind": "stdlib"}], "tokenizer": "bytes", "seq_len": 128},
        "train": {"batch": rows, "micro_batch": max(1, rows // 4), "threads": 1, "device": "cpu"},
        "optimizer": {"warmup": 0, "clip": 1e9},
        "memory": memory,
    })  # fmt: skip


class Side:
    """A model in memory or in a file, and steps of it; all sides train the same, and nothing is clipped."""

    def __init__(self, given: argparse.Namespace, memory: dict[str, str], rows: int, mesh: Mesh | None = None) -> None:
        recipe = recipe_of(given, memory, rows)
        job, self.mesh, self.rows, self.steps = prepare(recipe), mesh or Mesh.single(), rows, 0
        self.model, self.state = assemble(job.shape, self.mesh, recipe)
        self.loader = job.loader(job.corpus.train, self.mesh)
        self.stepper = build_stepper(self.model, self.state, self.mesh, recipe.optimizer)

    def step(self) -> float:
        self.steps += 1
        return self.stepper.step(self.loader.step((self.steps - 1) * self.rows) or [], 1e-4)[0].loss

    def passes(self) -> None:
        """A step without its update."""
        self.stepper.gradients(self.loader.step(self.steps * self.rows) or [], stop=False)
        clear_gradients(self.model, self.state)

    def formula(self) -> dict[str, int]:
        """Bytes of a step among others: where passes turn, two stages' weights stay, at the ends early ones' alone."""
        units, found = self.state.units, {"read": 0, "written": 0}
        for i, unit in enumerate(units):
            size = {kind: group.region.size for kind, group in self.state.tiers.groups[unit].items()}
            early, every = unit in self.state.early, sum(size.values())
            found["read"] += size["weights"] * ((i < len(units) - 2) + (early and i >= 2))
            found["read"] += size["moments"] if early else every
            found["written"] += every
        return found


def seconds(work: Callable[[], Any]) -> tuple[float, float, Any]:
    begun, busy = time.perf_counter(), time.process_time()
    found = work()
    return time.perf_counter() - begun, time.process_time() - busy, found


def waited(transfer: Callable[..., Transfer]) -> Callable[..., Transfer]:
    """A transfer that is over when the call returns."""

    def call(self: Region, data: torch.Tensor, start: int = 0) -> Transfer:
        found = transfer(self, data, start)
        found.wait()
        return found

    return call


def recorded(side: Side) -> Transfers:
    """The transfers of one step, in order."""
    found: Transfers = []

    def noted(transfer: Callable[..., Transfer], write: bool) -> Callable[..., Transfer]:
        def call(self: Region, data: torch.Tensor, start: int = 0) -> Transfer:
            found.append((self, data.numel(), start, write))
            return transfer(self, data, start)

        return call

    with mock.patch.multiple(Region, read=noted(Region.read, False), write=noted(Region.write, True)):
        side.step()
    return found


def replay(transfers: Transfers, pool: BufferPool) -> None:
    """The transfers alone, two at a time; what is written is what was read."""
    before: tuple[Transfer, torch.Tensor] | None = None
    for region, size, start, write in transfers:
        buffer = pool.take(size)
        if write:
            region.read(buffer, start).wait()
        now = (region.write if write else region.read)(buffer, start)
        if before is not None:
            before[0].wait()
            pool.give(before[1])
        before = now, buffer
    if before is not None:
        before[0].wait()


def alone() -> Mesh:
    """A mesh of one rank with what FSDP2 needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Mesh.create(Layout(), "cpu")


def rows_for(given: argparse.Namespace) -> int:
    """So many rows that transfers and compute take about the same time."""
    probe, whole, pool = Side(given, FILES | {"folder": given.folder}, 4), Side(given, {}, 4), BufferPool()
    probe.step(), whole.step()
    transfers = recorded(probe)
    disk, compute = (min(seconds(work)[0] for _ in range(2)) for work in (lambda: replay(transfers, pool), whole.step))
    return max(2, round(4 * disk / compute))


def beside_files(given: argparse.Namespace, rows: int) -> dict[str, Any]:
    sides = {"resident": Side(given, {}, rows), "FSDP2": Side(given, {"weights": "host"}, rows, alone())}
    for name, how in (("waiting", "none"), ("even", "even"), ("all", "all")):
        sides[name] = Side(given, FILES | {"folder": given.folder, "speculate": how}, rows)
    for side in sides.values():
        side.step(), side.step()
    in_files, pool = [name for name in sides if name not in ("resident", "FSDP2")], BufferPool()
    transfers = {name: recorded(side) if name in in_files else [side.step()] for name, side in sides.items()}
    taken: dict[str, list[float]] = defaultdict(list)
    busy: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, work: Callable[[], Any]) -> Any:
        wall, cpu, found = seconds(work)
        taken[name].append(wall)
        busy[name].append(cpu)
        return found

    for _ in range(given.turns):
        losses = {name: timed(name, side.step) for name, side in sides.items()}
        assert len(set(losses.values())) == 1, losses
        for name in in_files:
            timed(f"disk of {name}", partial(replay, transfers[name], pool))
        with mock.patch.multiple(Region, read=waited(Region.read), write=waited(Region.write)):
            timed("blocking", sides["even"].step)
        for name, side in sides.items():
            if name != "even":
                side.step()
    middle = {name: statistics.median(values) for name, values in taken.items()}
    for name, value in middle.items():
        print(f"{name:16} {value:7.3f} s  (processor {statistics.median(busy[name]):.3f})")
    found: dict[str, Any] = {
        "parameters": sum(h.logical.numel for h in sides["even"].state.held), "tokens": rows * 128, "seconds": middle,
        "processor seconds": {name: statistics.median(values) for name, values in busy.items()},
    }  # fmt: skip
    return found | {name: measured(name, sides[name], transfers[name], taken) for name in in_files}


def measured(name: str, side: Side, transfers: Transfers, taken: dict[str, list[float]]) -> dict[str, Any]:
    """What the times of a side in files come to; ratios are medians over the turns."""
    moved = {word: sum(n for _, n, _, write in transfers if write == way) for word, way in WAYS.items()}
    disk = taken[f"disk of {name}"]
    floors = [max(pair) for pair in zip(taken["resident"], disk, strict=True)]
    units = [[group.region.size for group in groups.values()] for groups in side.state.tiers.groups.values() if groups]
    rate = sum(moved.values()) / statistics.median(disk)
    fill = 2 * sum(units[0]) / rate  # nothing hides the first read and the last write
    over = statistics.median(one / floor for one, floor in zip(taken[name], floors, strict=True))
    found = {
        "over floor": over, "fill over floor": fill / statistics.median(floors), "early": len(side.state.early),
        "blocking over it": statistics.median(b / f for b, f in zip(taken["blocking"], taken[name], strict=True)),
        "within": over <= 1.15 + fill / statistics.median(floors), "bytes": moved, "formula": side.formula(),
        "buffers over one unit": side.state.tiers.pool.most / max(map(sum, units)), "bandwidth": rate,
    }  # fmt: skip
    asked, ratio, units_there = 1.15 + found["fill over floor"], found["blocking over it"], len(side.state.units)
    print(
        f"{name}: {over:.2f} of the longer of compute and disk (asked {asked:.3f}), blocking / it {ratio:.2f}, "
        f"{rate / 1e9:.2f} GB/s, {found['early']} of {units_there} units early, bytes {moved} of {found['formula']}, "
        f"buffers of {found['buffers over one unit']:.2f} units"
    )
    return found


def exposed(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds that an update adds to the passes of a step, which are short, so that these differences are not noise."""
    found: dict[str, Any] = {}
    for place in ("device", "file"):
        memory = {"moments": place, "folder": given.folder}
        sides = {how: Side(given, memory | {"speculate": how}, 2) for how in ("none", "all")}
        bare = Side(given, {}, 2)
        for side in (*sides.values(), bare):
            side.step(), side.step()
        more: dict[str, list[float]] = defaultdict(list)
        for _ in range(4 * given.turns):
            passes, *_ = seconds(bare.passes)
            for how, side in sides.items():
                more[how].append(seconds(side.step)[0] - passes)
        waiting, early = (statistics.median(more[how]) for how in ("none", "all"))
        found[place] = {"waiting": waiting, "speculating": early, "ratio": early / waiting}
        print(f"moments in {place}: an update adds {waiting:.3f} s when it waits, {early:.3f} s beside backward: "
              f"{early / waiting:.2f}")  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_heap()
    found = beside_files(given, given.tokens // 128 or rows_for(given)) | {"exposed": exposed(given)}
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
