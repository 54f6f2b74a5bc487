"""A training step whose state rests in a file, beside the same in memory, and with reads that are waited for.

One process, one thread of compute, direct I/O. In every turn each side takes a step: ``resident``; ``file``;
``blocking``, the same with a wait after every transfer; and ``disk``, the transfers of ``file`` alone. ``--tokens 0``
chooses so many tokens that compute and transfers take about the same. A pipelined step cannot be shorter than the
longer of the two; it is asked to keep 1.15 times that, and the first read and last write, which nothing hides.

    python bench/tiers.py [--turns 5] [--tokens 0] [--folder .] [--json bench/results/tiers.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from weft.layout.mesh import Mesh
from weft.memory.heap import keep_heap
from weft.memory.tiers import Pool, Region, Transfer
from weft.recipe import build_recipe
from weft.train.setup import assemble, prepare
from weft.train.step import train_step

Transfers = list[tuple[Region, int, int, bool]]


def recipe_of(given: argparse.Namespace, memory: dict[str, str], rows: int) -> Any:
    return build_recipe({
        "model": {"layers": given.layers, "embed": given.width, "heads": 8, "vocab": 512, "tied": False},
        "data": {"sources": [{"kind": "stdlib"}], "tokenizer": "bytes", "seq_len": 128},
        "train": {"batch": rows, "micro_batch": max(1, rows // 4), "threads": 1, "device": "cpu"},
        "optimizer": {"warmup": 0},
        "memory": memory,
    })  # fmt: skip


class Side:
    """A model in memory or in a file, and steps of it; all sides train the same."""

    def __init__(self, given: argparse.Namespace, memory: dict[str, str], rows: int) -> None:
        recipe = recipe_of(given, memory, rows)
        job, self.mesh, self.rows, self.steps = prepare(recipe), Mesh.single(), rows, 0
        self.model, self.state = assemble(job.shape, self.mesh, recipe)
        self.loader = job.loader(job.corpus.train, self.mesh)

    def step(self) -> float:
        batches = self.loader.step(self.steps * self.rows) or []
        self.steps += 1
        return train_step(self.model, self.state, batches, self.mesh, lr=1e-4, clip=1.0).loss


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


def replay(transfers: Transfers, pool: Pool) -> None:
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
    memory, rows = {"weights": "file", "folder": given.folder}, max(4, given.tokens // 128)
    if not given.tokens:
        probe = Side(given, memory, rows)
        transfers, pool, whole = recorded(probe), Pool(), Side(given, {}, rows)
        whole.step()
        disk, compute = (
            min(seconds(work)[0] for _ in range(2)) for work in (lambda: replay(transfers, pool), whole.step)
        )
        rows = max(4, round(rows * disk / compute / 4) * 4)
        del probe, whole, transfers
    resident, tiered = Side(given, {}, rows), Side(given, memory, rows)
    resident.step(), tiered.step()
    transfers, pool = recorded(tiered), Pool()
    resident.step()
    blocking = mock.patch.multiple(Region, read=waited(Region.read), write=waited(Region.write))
    taken: dict[str, list[float]] = {name: [] for name in ("resident", "file", "blocking", "disk")}
    busy: dict[str, list[float]] = {name: [] for name in taken}
    for _ in range(given.turns):
        losses = {}
        for name, work in (
            ("resident", resident.step),
            ("file", tiered.step),
            ("disk", lambda: replay(transfers, pool)),
        ):
            wall, cpu, losses[name] = seconds(work)
            taken[name].append(wall)
            busy[name].append(cpu)
        assert losses["file"] == losses["resident"], losses
        with blocking:
            wall, cpu, loss = seconds(tiered.step)
        taken["blocking"].append(wall)
        busy["blocking"].append(cpu)
        assert loss == resident.step()
    report(given, rows, tiered, transfers, taken, busy)


def report(
    given: argparse.Namespace,
    rows: int,
    tiered: Side,
    transfers: Transfers,
    taken: dict[str, list[float]],
    busy: dict[str, list[float]],
) -> None:
    tiers, size = tiered.state.tiers, {"weights": 0, "gradients": 0, "moments": 0}
    units = [{kind: group.region.size for kind, group in groups.items()} for groups in tiers.groups.values() if groups]
    for unit in units:
        for kind, n in unit.items():
            size[kind] += n
    every = sum(size.values())
    # The last two stages' weights stay from forward to backward.
    once = sum(tiers.groups[unit]["weights"].region.size for unit in tiered.state.units[-2:])
    formula = {"read": size["weights"] - once + every, "written": every}
    moved = {"read": sum(n for _, n, _, w in transfers if not w), "written": sum(n for _, n, _, w in transfers if w)}
    middle = {name: statistics.median(values) for name, values in taken.items()}
    rate = sum(moved.values()) / middle["disk"]
    fill = (sum(units[0].values()) + units[0]["gradients"]) / rate  # nothing hides the first read and the last write
    floor = max(middle["resident"], middle["disk"])
    found = {
        "parameters": sum(h.logical.numel for h in tiered.state.held), "tokens": rows * 128,
        "seconds": middle, "processor seconds": {name: statistics.median(values) for name, values in busy.items()},
        "floor": floor, "fill": fill, "over floor": middle["file"] / floor,
        "allowed": 1.15 * floor + fill, "within": middle["file"] <= 1.15 * floor + fill,
        "blocking over file": statistics.median(b / f for b, f in zip(taken["blocking"], taken["file"], strict=True)),
        "bytes": moved, "formula": formula, "buffers": tiers.pool.most,
        "buffers over one unit": tiers.pool.most / max(sum(unit.values()) for unit in units),
        "bandwidth": rate,
    }  # fmt: skip
    for name, value in middle.items():
        print(f"{name:10} {value:7.3f} s  (processor {found['processor seconds'][name]:.3f})")
    print(
        f"file / floor {found['over floor']:.2f} (allowed {found['allowed']:.3f} s), blocking / file "
        f"{found['blocking over file']:.2f}, {rate / 1e9:.2f} GB/s, bytes {moved} of {formula}, "
        f"buffers {tiers.pool.most / 2**20:.0f} MiB = {found['buffers over one unit']:.2f} units"
    )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
