"""Steps of documents of very unequal length: placed by length, against the same documents on fixed ranks.

Sides: ``whole`` is static context parallelism as usual: every document is cut over all ranks, and all keys and values
go round the ring. ``cp`` is Weft's static layout, which cuts rows of joined documents and moves only what queries need.
``greedy`` and ``flexsp`` are ``layout.balance`` of it, with the same tokens per rank and pass. ``packing`` gives every
rank whole rows, ``greedy-rows`` balances within the memory for that, which is that of the longest document.

First every step is executed on four, eight and sixteen ranks whose compute and links sleep as long as an 8B model takes
on devices of its own, some times as fast, and simulated; then a small model is really trained by four ranks on the
cores that there are; then steps are simulated on 64 ranks, and planning is timed.

    python bench/balance.py [--rounds 3] [--quick] [--only slept4 slept8 ...] [--json bench/results/balance.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from step import SETTINGS, machine, on_ranks, write

from weft.data.batch import Batch
from weft.data.loader import Loader
from weft.data.order import Order, Stream
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models import attention
from weft.models.segments import Segment
from weft.parallel.context import tile_attention
from weft.parallel.context.attend import context_attention
from weft.parallel.context.tables import tile_table_of
from weft.parallel.context.tile_attention import Trip
from weft.parallel.document_balance import (
    DocumentTimes,
    costs_of,
    finish_times,
    make_plan,
    step_planner,
)
from weft.parallel.hybrid import HybridAttention
from weft.recipe import Data, ModelShape, Recipe, Train
from weft.train.setup import build_for_training
from weft.train.step import train_step

RANKS = 4  # of those that train
RESULTS = Path(__file__).parent / "results" / "balance.json"
SHAPE = ModelShape(
    vocab=128_000, layers=32, embed=4096, heads=32, kv_heads=8, ffn=14_336
)
FLOPS = 400e12  # of a device, on this work
#: Into and out of a device at once: NVLink, InfiniBand, 25 Gbit Ethernet.
LINKS = {"400 GB/s": 400e9, "50 GB/s": 50e9, "3 GB/s": 3e9}
SIDES = ("whole", "cp", "greedy", "flexsp", "packing", "greedy-rows")


class Sleeping(NamedTuple):
    """``faster``: sleeps are so many times shorter; more ranks need longer ones, as their own work is on few cores."""

    ranks: int
    seq_len: int
    faster: float
    sides: tuple[str, ...]
    links: int  # so many of the fastest


SLEEPING = {
    "slept4": Sleeping(4, 131_072, 10, SIDES, 3),
    "slept8": Sleeping(8, 131_072, 5, SIDES[1:4], 3),
    "slept16": Sleeping(16, 262_144, 4, SIDES[1:3], 2),
}
PARTS = (*SLEEPING, "trained", "simulated", "planning")
SMALL = ModelShape(vocab=1024, layers=2, embed=128, heads=4, kv_heads=2)


class Job(NamedTuple):
    """Documents of a step: ``rows`` of ``seq_len`` tokens, one row per pass of static context parallelism."""

    lengths: tuple[int, ...]
    seq_len: int
    rows: int


def log_normal(seq_len: int, rows: int, seed: int = 0) -> Job:
    """Median 1,800 and mean 5,500 tokens, as large for the small model as its rows are shorter."""
    scale = np.log(min(1.0, seq_len / 131_072))
    draw = np.random.default_rng(seed).lognormal(7.5 + scale, 1.5, 1500)
    return Job(tuple(np.clip(draw.astype(int), 1, seq_len).tolist()), seq_len, rows)


def standard_library(seq_len: int, rows: int) -> Job:
    """Bytes of the standard library's files, shortened like the rows."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    sizes = [f.stat().st_size for f in files if "site-packages" not in f.parts]
    scale = min(1.0, seq_len / 131_072)
    return Job(
        tuple(min(seq_len, max(1, int(s * scale))) for s in sizes if s), seq_len, rows
    )


JOBS: dict[str, Callable[[int, int], Job]] = {
    "log-normal": log_normal,
    "standard library": standard_library,
}


def layout_of(side: str, ranks: int) -> Layout:
    if side in ("packing", "greedy-rows"):
        return Layout(
            dp=ranks,
            zero=1,
            balance=side.removesuffix("-rows") if side != "packing" else "",
        )
    return Layout(
        cp=ranks, zero=1, balance=side if side in ("greedy", "flexsp") else ""
    )


def batches_of(
    job: Job, side: str, rank: int, ranks: int, costs: DocumentTimes, step: int = 0
) -> list[Batch]:
    """What the rank runs in a step, as the loader cuts it."""
    layout, sizes = layout_of(side, ranks), np.array(job.lengths)
    ids = (
        np.random.default_rng(1).integers(0, SMALL.vocab, sizes.sum()).astype(np.uint32)
    )
    order = Order(
        (Stream(ids, np.cumsum(sizes) - sizes, sizes, job.seq_len, 0),), (1.0,), 0
    )
    places = (rank, 0) if layout.dp > 1 else (0, rank)
    passes = -(-job.rows // layout.dp)
    made = Loader(
        order,
        layout,
        *places,
        job.rows,
        1,
        passes,
        job.seq_len,
        step_planner(layout, costs) if layout.balance else None,
    )
    batches = made.step(step * job.rows)
    assert batches is not None
    return batches


# --- seconds of the 8B model ---


class Speeds(NamedTuple):
    """Seconds, forward and backward: per element of the score matrix, per token, per byte on a link."""

    forward: float
    backward: float
    linear: float
    link: float

    @classmethod
    def of(cls, bandwidth: float, faster: float) -> Speeds:
        assert SHAPE.head_dim
        # two products of a multiply and add
        score = 4 * SHAPE.heads * SHAPE.head_dim * SHAPE.layers / FLOPS / faster
        linear = costs_of(SHAPE).linear / FLOPS / faster
        return cls(score, 2.5 * score, linear, SHAPE.layers / bandwidth / faster)

    def moved(self, kind: str, tokens: int) -> float:
        """Of keys and values in bf16, or of their gradients in fp32."""
        assert SHAPE.kv_heads and SHAPE.head_dim
        return (
            tokens
            * 2
            * SHAPE.kv_heads
            * SHAPE.head_dim
            * {"kv": 2, "dkv": 4}[kind]
            * self.link
        )

    @property
    def costs(self) -> DocumentTimes:
        """The same for the planner. Moves of a group go beside its compute, but for those of short documents."""
        moved = self.moved("kv", 1) * 2 + self.moved("dkv", 1)
        return DocumentTimes(
            (self.forward + self.backward) / 2, self.linear, moved, 256 * self.linear
        )


def area(segments: Sequence[Segment]) -> float:
    return sum((s.q1 - s.q0) * (s.k1 - s.k0) / (2 if s.causal else 1) for s in segments)


def attend_from(
    batch: Batch, ranks: int, speeds: Speeds, start: list[float]
) -> tuple[list[float], list[float]]:
    """When the ranks of a pass, ready at ``start``, are done with its attention, and what each of them computes.

    A rank begins a step when its last one is done and what that one waited for is there; nobody waits for all.
    """
    cu = tuple(batch.cu_seqlens.tolist())
    if ranks == 1:
        alone = sum(n * n / 2 for n in np.diff(cu).tolist()) * (
            speeds.forward + speeds.backward
        )
        return [start[0] + alone], [alone]
    table = tile_table_of("zigzag", ranks)
    lengths = (
        batch.group.lengths
        if batch.group
        else (batch.tokens.shape[1] // 2,) * (2 * ranks)
    )
    trip = Trip(table, cu, lengths, range(ranks), 0)
    clock, busy = [*start], [0.0] * ranks
    for score, kinds in ((speeds.forward, ("kv",)), (speeds.backward, ("kv", "dkv"))):
        for step in range(-1, trip.steps + 1):
            links: dict[tuple[int, bool], float] = defaultdict(float)
            begun = [*clock]
            for _, move in trip.table.moves_at.get(step, ()):
                if move.kind in kinds:
                    for end in ((move.source, False), (move.target, True)):
                        links[end] += speeds.moved(move.kind, trip.tokens(move.block))
                    begun[move.target] = max(begun[move.target], clock[move.source])
            for r in range(ranks):
                tiles = trip.table.at.get((step, r), ())
                work = score * sum(
                    area(p.segments) for t in tiles for p in trip.work[t.q, t.k]
                )
                clock[r] = max(
                    clock[r] + work,
                    clock[r] + links[r, False],
                    begun[r] + links[r, True],
                )
                busy[r] += work
    return clock, busy


def whole_steps(batch: Batch, ranks: int, speeds: Speeds) -> list[tuple[float, float]]:
    """Compute and link of each step round the ring when every document is cut over all ranks."""
    scores = sum(n * n / 2 for n in batch.cu_seqlens.diff().tolist()) / ranks**2
    tokens = batch.tokens.numel()
    kv, dkv = (speeds.moved(kind, tokens) for kind in ("kv", "dkv"))
    back = [
        (speeds.backward * scores, kv * (i < ranks - 1) + dkv * (i > 0))
        for i in range(ranks)
    ]
    return [(speeds.forward * scores, kv * (i < ranks - 1)) for i in range(ranks)] + [
        *back,
        (0.0, dkv),
    ]


def simulated(
    job: Job, side: str, ranks: int, speeds: Speeds, step: int = 0
) -> tuple[float, float]:
    """Seconds of a step, and the share of them in which a rank, on average, computes nothing."""
    todo = [
        batches_of(job, side, rank, ranks, speeds.costs, step) for rank in range(ranks)
    ]
    clock, busy, at = [0.0] * ranks, [0.0] * ranks, [0] * ranks

    def peers_of(batch: Batch, rank: int) -> Sequence[int]:
        return (
            batch.group.peers
            if batch.group
            else (rank,)
            if side == "packing"
            else range(ranks)
        )

    while any(at[r] < len(todo[r]) for r in range(ranks)):
        for rank in range(ranks):
            if at[rank] == len(todo[rank]):
                continue
            batch = todo[rank][at[rank]]
            peers = peers_of(batch, rank)
            if any(
                at[r] == len(todo[r]) or peers_of(todo[r][at[r]], r) != peers
                for r in peers
            ):
                continue
            linear = speeds.linear * batch.tokens.numel()
            if side == "whole":
                pairs = whole_steps(batch, ranks, speeds)
                work = [sum(pair[0] for pair in pairs)] * ranks
                ends = [
                    max(clock) + linear / 3 + sum(max(pair) for pair in pairs)
                ] * ranks
            else:
                ends, work = attend_from(
                    batch, len(peers), speeds, [clock[r] + linear / 3 for r in peers]
                )
            for r, end, seconds in zip(peers, ends, work, strict=True):
                clock[r], busy[r], at[r] = (
                    end + 2 * linear / 3,
                    busy[r] + linear + seconds,
                    at[r] + 1,
                )
    return max(clock), 1 - sum(busy) / ranks / max(clock)


# --- executed, sleeping ---


class Sleeper:
    """Stands for the device and the link of this rank."""

    def __init__(self, speeds: Speeds) -> None:
        self.speeds, self.busy = speeds, 0.0

    def sleep(self, seconds: float) -> None:
        self.busy += seconds
        if seconds > 0:
            time.sleep(seconds)

    def forward(self, q: Any, k: Any, v: Any, segments: Sequence[Segment]) -> Any:
        self.sleep(self.speeds.forward * area(segments))
        return torch.zeros_like(q), torch.zeros(q.shape[:2])

    def backward(
        self,
        grad: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        segments: Sequence[Segment],
    ) -> Any:
        self.sleep(self.speeds.backward * area(segments))
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def start(self, original: Any) -> Any:
        """Moves that are not there before the link could have carried them."""

        def started(
            trip: Trip, step: int, held: Any, leaving: Any, results: Any, empty: Any
        ) -> Any:
            begun, ends = time.perf_counter(), [0.0, 0.0]
            arriving, moves = original(trip, step, held, leaving, results, empty)
            for _, m in trip.table.moves_at.get(step, ()):
                if m.kind in ("kv", *results) and m.kind in ("kv", "dkv"):
                    for i, rank in enumerate((m.source, m.target)):
                        ends[i] += self.speeds.moved(m.kind, trip.tokens(m.block)) * (
                            rank == trip.index
                        )
            return arriving, [*moves, _Link(begun + max(ends))] if max(ends) else moves

        return started


class _Link(NamedTuple):
    due: float

    def wait(self) -> None:
        time.sleep(max(0.0, self.due - time.perf_counter()))


def one_pass(batch: Batch, attend: HybridAttention | Any, sleeper: Sleeper) -> None:
    linear = sleeper.speeds.linear * batch.tokens.numel()
    sleeper.sleep(linear / 3)
    q, k, v = (
        torch.zeros(*batch.tokens.shape, 1, 2).requires_grad_() for _ in range(3)
    )
    out = attend(q, k, v, batch.cu_seqlens)
    out.backward(torch.zeros_like(out))
    sleeper.sleep(2 * linear / 3)


def one_whole_pass(batch: Batch, sleeper: Sleeper) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sleeper.sleep(sleeper.speeds.linear * batch.tokens.numel())
    for compute, link in whole_steps(batch, ranks, sleeper.speeds):
        begun, ours, theirs = time.perf_counter(), torch.zeros(1), torch.zeros(1)
        ops = [
            dist.P2POp(dist.isend, ours, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, theirs, (rank - 1) % ranks),
        ]
        moves = dist.batch_isend_irecv(ops) if link else []
        sleeper.sleep(compute)
        for move in moves:
            move.wait()
        _Link(begun + link).wait()


def slept(
    job: Job, speeds: Speeds, rounds: int, sides: Sequence[str]
) -> dict[str, Any]:
    """Executed seconds and idle share of every side, with what is simulated for them."""
    found: dict[str, Any] = {side: {"s": [], "idle": []} for side in sides}
    todo, ranks = {}, dist.get_world_size()
    for side in sides:
        mesh = Mesh.create(layout_of(side, ranks), "cpu")
        attend = HybridAttention(mesh, context_attention(mesh, SHAPE))
        todo[side] = (
            batches_of(job, side, dist.get_rank(), ranks, speeds.costs),
            attend,
        )
    for _ in range(rounds):
        for side, (batches, attend) in todo.items():
            sleeper = Sleeper(speeds)
            patches = [mock.patch.object(module, f"attend_{way}", getattr(sleeper, way))
                       for module in (tile_attention, attention) for way in ("forward", "backward")]  # fmt: skip
            patches.append(
                mock.patch.object(Trip, "_start", sleeper.start(Trip._start))
            )
            for patch in patches:
                patch.start()
            dist.barrier()
            begun = time.perf_counter()
            for batch in batches:
                attend.group = batch.group
                if side == "whole":
                    one_whole_pass(batch, sleeper)
                else:
                    one_pass(batch, attend, sleeper)
            took = torch.tensor([time.perf_counter() - begun])
            for patch in patches:
                patch.stop()
            dist.all_reduce(took, dist.ReduceOp.MAX)
            busy = torch.tensor([sleeper.busy / ranks])
            dist.all_reduce(busy)
            found[side]["s"].append(took.item())
            found[side]["idle"].append(1 - busy.item() / took.item())
    for side, row in found.items():
        row |= {
            "s": statistics.median(row["s"]),
            "idle": statistics.median(row["idle"]),
        }
        if dist.get_rank() == 0:
            row["simulated_s"], row["simulated_idle"] = simulated(
                job, side, ranks, speeds
            )
    return ratios(found, "s")


def ratios(found: dict[str, Any], key: str) -> dict[str, Any]:
    """How many times as long as ``greedy`` each side takes."""
    for row in found.values():
        row["ratio"] = row[key] / found["greedy"][key]
        if "simulated_s" in row:
            row["simulated_ratio"] = row["simulated_s"] / found["greedy"]["simulated_s"]
    return found


# --- executed, computing ---


def trained(job: Job, rounds: int) -> dict[str, Any]:
    """Seconds of a training step of the small model, sides in turn; what they compute is the same."""
    found: dict[str, Any] = {}
    todo = {}
    for side in SIDES[1:]:
        mesh = Mesh.create(layout_of(side, RANKS), "cpu")
        train = Train(dtype="float32", batch=job.rows)
        recipe = Recipe(train=train, optimizer=SETTINGS, data=Data(seq_len=job.seq_len))
        todo[side] = (*build_for_training(SMALL, mesh, recipe), mesh)
        found[side] = {"s": [], "loss": []}
    costs = costs_of(SMALL)._replace(fixed=64 * costs_of(SMALL).linear)
    for turn in range(rounds + 1):
        for side, (model, state, mesh) in todo.items():
            batches = batches_of(job, side, dist.get_rank(), RANKS, costs, turn)
            dist.barrier()
            begun = time.perf_counter()
            done = train_step(
                model, state, batches, mesh, lr=SETTINGS.lr, clip=SETTINGS.clip
            )
            took = torch.tensor(time.perf_counter() - begun)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            found[side]["s"] += [took.item()] * (turn > 0)
            found[side]["loss"].append(done.loss)
    reference = found["cp"]["loss"]
    for row in found.values():
        off = max(abs(a - b) / b for a, b in zip(row["loss"], reference, strict=True))
        assert off < 1e-4, (
            f"the sides do not compute the same: losses differ by {off:.1e}"
        )
    for row in found.values():
        each = [a / b for a, b in zip(row["s"], found["greedy"]["s"], strict=True)]
        row |= {
            "ratio": statistics.median(each),
            "quartiles": statistics.quantiles(each, n=4)[::2],
        }
    for row in found.values():
        row |= {"s": statistics.median(row["s"]), "loss": row["loss"][-1]}
    return found


# --- planning ---


def planning(quick: bool) -> dict[str, Any]:
    """Milliseconds to plan 1,024 documents on 64 ranks, and greedy plans against those of the integer program."""
    costs, took = Speeds.of(LINKS["50 GB/s"], 1).costs, []
    lengths = np.array(log_normal(524_288, 4).lengths[:1024])
    for _ in range(9):
        begun = time.perf_counter()
        make_plan("greedy", lengths, 8192, 64, costs)
        took.append(time.perf_counter() - begun)
    against, search = [], []
    for seed in range(1 if quick else 8):
        for ranks, count in ((4, 12),) if quick else ((4, 48), (8, 64)):
            lengths = np.minimum(
                np.array(log_normal(131_072, 4, seed).lengths[:count]), 8192 * ranks
            )
            begun = time.perf_counter()
            oracle = max(
                finish_times(
                    make_plan("flexsp", lengths, 8192, ranks, costs), lengths, costs
                )
            )
            search.append(time.perf_counter() - begun)
            against.append(
                max(
                    finish_times(
                        make_plan("greedy", lengths, 8192, ranks, costs), lengths, costs
                    )
                )
                / oracle
            )
    return {"ms": 1e3 * statistics.median(took), "least_ms": 1e3 * min(took), "greedy_over_flexsp": {
        "median": statistics.median(against), "worst": max(against), "best": min(against)},
        "flexsp_s": statistics.median(search)}  # fmt: skip


def on_rank(
    rank: int, ranks: int, part: str, quick: bool, rounds: int
) -> dict[str, Any]:
    sleeping = SLEEPING.get(part, Sleeping(RANKS, 0, 1.0, (), 0))
    found: dict[str, Any] = {}
    for name, make in [*JOBS.items()][: 1 if quick else None]:
        if part == "trained":
            found[name] = trained(make(256, 2) if quick else make(2048, 4), rounds)
            if rank == 0:
                show(f"{ranks} ranks that train a small model, {name}", found[name])
            continue
        for link, bandwidth in [*LINKS.items()][: 1 if quick else sleeping.links]:
            key = f"{name}, {link}"
            job = make(16_384, 2) if quick else make(sleeping.seq_len, 4)
            found[key] = slept(
                job,
                Speeds.of(bandwidth, 8 if quick else sleeping.faster),
                rounds,
                sleeping.sides,
            )
            if rank == 0:
                show(f"{ranks} ranks that sleep, {key}", found[key])
    return found


def show(title: str, table: dict[str, Any]) -> None:
    print(f"\n{title}")
    for side, row in table.items():
        line = f"  {side:10}{row.get('s', row.get('simulated_s')):9.3f} s  {row['ratio']:5.2f} x greedy"
        if "simulated_s" in row:
            line += f"   idle {row.get('idle', row['simulated_idle']):6.1%}"
            line += f"   simulated {row['simulated_s']:8.3f} s, idle {row['simulated_idle']:6.1%}"
        print(line, flush=True)


def far(quick: bool) -> dict[str, Any]:
    """Simulated steps on as many ranks as no machine here could let sleep."""
    found, (ranks, seq_len) = {}, (8, 32_768) if quick else (64, 524_288)
    for name, make in [*JOBS.items()][: 1 if quick else None]:
        # so many ranks do not hang on Ethernet
        for link, bandwidth in [*LINKS.items()][:2]:
            table = {}
            for side in SIDES[:3]:  # the integer program takes minutes on so many ranks
                seconds, idle = simulated(
                    make(seq_len, 4), side, ranks, Speeds.of(bandwidth, 1)
                )
                table[side] = {"simulated_s": seconds, "simulated_idle": idle}
            found[f"{name}, {link}"] = ratios(table, "simulated_s")
            show(f"{ranks} ranks, simulated, {name}, {link}", table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="short sleeps and rows, to see that everything runs",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="the other figures stay as they are",
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    rounds = 2 if options.quick else options.rounds
    found: dict[str, Any] = (
        json.loads(options.json.read_text()) if options.json.exists() else {}
    )
    found |= {"machine": machine(), "rounds": rounds}
    for part in options.only:
        if part == "simulated":
            found[part] = far(options.quick)
        elif part == "planning":
            found[part] = p = planning(options.quick)
            print(
                f"\nplanning 1,024 documents on 64 ranks: {p['ms']:.1f} ms (least {p['least_ms']:.1f})"
            )
            print(
                "greedy over flexsp, by the model of costs:",
                {k: round(v, 3) for k, v in p["greedy_over_flexsp"].items()},
            )
        else:
            ranks = SLEEPING[part].ranks if part in SLEEPING else RANKS
            found[part] = on_ranks(ranks, on_rank, ranks, part, options.quick, rounds)
        write(found, options.json)


if __name__ == "__main__":
    main()
