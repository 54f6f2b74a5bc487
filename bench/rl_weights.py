"""Weights from ranks that train to ranks that generate: what each lacks, beside whole weights by way of rank 0.

The peer is what libraries of reinforcement learning do by default: rank 0 gathers a bucket of whole parameters, and
broadcasts it to all ranks, of which each keeps its part. The third side gathers whole parameters on all ranks at once,
as ``DTensor.full_tensor`` does. All sides use buckets of the same size and must leave the same bits. Memory is what the
peak of the process's resident memory adds to what it holds before a move.

    python bench/rl_weights.py [--rounds 7] [--layers 8] [--bucket 64] [--json bench/results/rl_weights.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from step import machine

from weft.checkpoint.boxes import volume
from weft.checkpoint.pack import group_by_bytes
from weft.layout.dims import Box, extents, slices
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh, from_all
from weft.parallel.build import parallelize
from weft.parallel.units import all_gather
from weft.recipe import ModelShape, Train
from weft.rl.generation_model import GenerationModel

RESULTS = Path(__file__).parent / "results" / "rl_weights.json"
RANKS = 4
#: Layout of training, and of generation.
CASES = (
    ("tp=4", "tp=2"),
    ("shard=4", "tp=2"),
    ("shard=2,tp=2", "tp=2"),
    ("pp=2,tp=2", "tp=2"),
    ("shard=4", ""),
)
SIDES = ("weft", "rank 0", "all-gather")
#: Most of the time of rank 0's way that a move may take, in the first case.
GOAL = 0.3

T = torch.Tensor


class WholeWeights:
    """Both peers: whole parameters, bucket by bucket, on rank 0 and from there to all, or on all ranks at once."""

    def __init__(self, own: GenerationModel, bucket: int) -> None:
        self.state, self.own = own.state, own
        self.everyones: list[dict[str, Box]] = from_all(
            {h.name: h.box for h in self.state.held}
        )
        self.shapes = dict(
            item
            for each in from_all({h.name: h.logical.shape for h in self.state.held})
            for item in each.items()
        )
        names = sorted(self.shapes)
        size = {
            name: 4 * volume(tuple((0, n) for n in self.shapes[name])) for name in names
        }
        self.groups = list(group_by_bytes(names, bucket, size.__getitem__))
        self.elements = {name: count // 4 for name, count in size.items()}

    def held(self, rank: int, names: list[str]) -> list[tuple[str, Box]]:
        """What ``rank`` contributes: its boxes of these parameters that no earlier rank has."""
        earlier = {
            (n, box) for each in self.everyones[:rank] for n, box in each.items()
        }
        boxes = self.everyones[rank]
        return [
            (n, boxes[n]) for n in names if n in boxes and (n, boxes[n]) not in earlier
        ]

    def packed(self, rank: int, names: list[str]) -> T:
        local = {h.name: h.local for h in self.state.held}
        parts = [local[name].flatten() for name, _ in self.held(rank, names)]
        return torch.cat(parts) if parts else torch.empty(0)

    def count(self, rank: int, names: list[str]) -> int:
        return sum(volume(box) for _, box in self.held(rank, names))

    def views(self, flat: T, names: list[str]) -> dict[str, T]:
        at, views = 0, {}
        for name in names:
            views[name] = flat[at : at + self.elements[name]].view(self.shapes[name])
            at += self.elements[name]
        return views

    def unpack(
        self, message: T, rank: int, names: list[str], views: dict[str, T]
    ) -> None:
        at = 0
        for name, box in self.held(rank, names):
            views[name][slices(box)] = message[at : at + volume(box)].view(extents(box))
            at += volume(box)

    def keep(self, views: dict[str, T]) -> None:
        for h in self.own.held:
            if h.name in views:
                h.parameter.data.copy_(views[h.name][slices(h.box)])

    def by_rank_0(self) -> None:
        rank = dist.get_rank()
        for names in self.groups:
            flat = torch.empty(sum(self.elements[name] for name in names))
            views = self.views(flat, names)
            if rank:
                if self.count(rank, names):
                    dist.send(self.packed(rank, names), 0)
            else:
                self.unpack(self.packed(0, names), 0, names, views)
                for source in range(1, RANKS):
                    if count := self.count(source, names):
                        message = torch.empty(count)
                        dist.recv(message, source)
                        self.unpack(message, source, names, views)
            dist.broadcast(flat, 0)
            self.keep(views)

    def by_all(self) -> None:
        rank = dist.get_rank()
        for names in self.groups:
            most = max(self.count(r, names) for r in range(RANKS))
            message = torch.zeros(most)
            own = self.packed(rank, names)
            message[: len(own)] = own
            gathered = torch.empty(RANKS * most)
            all_gather(gathered, message)
            flat = torch.empty(sum(self.elements[name] for name in names))
            views = self.views(flat, names)
            for source in range(RANKS):
                self.unpack(
                    gathered[source * most : (source + 1) * most], source, names, views
                )
            self.keep(views)


def memory(field: str) -> int:
    """Bytes of ``field`` of this process: VmRSS, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(field)]
    return int(line.split()[1]) * 1024


def measured(move: Callable[[], Any]) -> tuple[float, int]:
    """Seconds until all ranks have moved, and bytes by which the peak of this rank's memory exceeds what it held."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    dist.barrier()
    begin = time.perf_counter()
    move()
    dist.barrier()
    return time.perf_counter() - begin, memory("VmHWM") - before


def rank_of_case(
    rank: int, store: str, case: tuple[str, str], words: argparse.Namespace, out: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    shape = ModelShape(
        vocab=16384, layers=words.layers, embed=512, heads=8, kv_heads=4, ffn=1536
    )
    mesh = Mesh.create(Layout.parse(case[0]), "cpu")
    state = parallelize(shape, mesh, Train()).state
    bucket = words.bucket << 20
    own = GenerationModel(
        shape, mesh, Layout.parse(case[1]), state, Train(), bucket=bucket
    )
    own.refresh(0)
    whole = WholeWeights(own, bucket)
    moved = own.refresh(1)
    expected = {h.name: h.parameter.data.clone() for h in own.held}
    moves = {
        "weft": lambda: own.refresh(1),
        "rank 0": whole.by_rank_0,
        "all-gather": whole.by_all,
    }
    for move in moves.values():
        for h in own.held:
            if h.name not in own.shared:
                h.parameter.data.zero_()
        move()
        assert all(torch.equal(h.parameter.data, expected[h.name]) for h in own.held)
    del expected
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    grown: dict[str, int] = dict.fromkeys(SIDES, 0)
    for turn in range(words.rounds):
        for side in SIDES[turn % len(SIDES) :] + SIDES[: turn % len(SIDES)]:
            took, more = measured(moves[side])
            seconds[side].append(took)
            grown[side] = max(grown[side], more)
    figures = {
        "received": moved.received,
        "buffer": moved.buffer,
        "trained": sum(h.local.nbytes for h in state.held),
        "generates": sum(
            h.parameter.nbytes for h in own.held if h.name not in own.shared
        ),
        "grown": grown,
    }
    everyones = from_all((seconds, figures))
    if rank == 0:
        Path(out).write_text(json.dumps(everyones))
    dist.barrier()
    dist.destroy_process_group()


def summary(everyones: list[Any]) -> dict[str, Any]:
    slowest = {
        side: [
            max(turn)
            for turn in zip(*(seconds[side] for seconds, _ in everyones), strict=True)
        ]
        for side in SIDES
    }
    sides = {}
    for side in SIDES:
        ratios = [a / b for a, b in zip(slowest[side], slowest["weft"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        sides[side] = {
            "seconds": statistics.median(slowest[side]),
            "ratio": middle,
            "quartiles": [low, high],
            "memory added by rank": [
                figures["grown"][side] for _, figures in everyones
            ],
        }
    by_rank = {
        key: [figures[key] for _, figures in everyones]
        for key in ("received", "buffer", "trained", "generates")
    }
    share = statistics.median(slowest["weft"]) / statistics.median(slowest["rank 0"])
    return {"share": share, "bytes by rank": by_rank, "sides": sides}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bucket", type=int, default=64, help="MiB of a bucket")
    parser.add_argument("--cases", type=int, default=len(CASES))
    parser.add_argument("--json", type=Path, default=RESULTS)
    words = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine(),
        "ranks": RANKS,
        "bucket": words.bucket << 20,
        "goal": GOAL,
        "cases": {},
    }
    for case in CASES[: words.cases]:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            mp.spawn(
                rank_of_case, (f"{folder}/store", case, words, str(out)), nprocs=RANKS
            )
            row = summary(json.loads(out.read_text()))
        name = f"{case[0]} -> {case[1] or 'one device each'}"
        results["cases"][name] = row
        print(f"{name:32} {row['share']:.2f} of the time of rank 0", flush=True)
        for side, figures in row["sides"].items():
            more = max(figures["memory added by rank"]) / 2**20
            print(f"    {side:10} {figures['seconds'] * 1e3:6.0f} ms, +{more:.0f} MiB")
    words.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
