"""What copies of the state in memory cost: steps with a copy after each, in turns with steps without.

Four ranks (``shard=2,tp=2``) train one model. Beside a step's forward and backward every rank copies its part of the
state, hashes it and sends it to its buddy, which hashes it again. The floor is what the bytes take alone at the speed
of one plain copy in memory. All ranks share this machine's cores, so that what runs beside takes its time from the step
itself: with cores to spare it would take less.

    python bench/snapshot.py [--rounds 8] [--quick] [--json bench/results/snapshot.json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline import Step, race
from step import SETTINGS, Job, machine, on_ranks, tokens_of, write

from weft.checkpoint.run_state import Progress
from weft.data.batch import Batch
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.net.endpoint import process_endpoint
from weft.recipe import Data, ModelShape, Recipe, Train
from weft.resilience.snapshots import Snapshots
from weft.shapes.parameters import parameter_count
from weft.train.setup import build_for_training
from weft.train.step import StepContext, plain_step

RANKS = 4
RESULTS = Path(__file__).parent / "results" / "snapshot.json"
JOB = Job(ModelShape(vocab=8192, layers=4, embed=384, heads=6), 8, 512)
QUICK = Job(ModelShape(vocab=256, layers=2, embed=32, heads=2), 8, 32)


def on_rank(rank: int, job: Job, rounds: int) -> dict[str, Any]:
    mesh = Mesh.create(Layout(shard=2, tp=2), "cpu")
    recipe = Recipe(
        train=Train(dtype="float32", batch=job.rows),
        optimizer=SETTINGS,
        data=Data(seq_len=job.length),
    )
    model, state = build_for_training(job.shape, mesh, recipe)
    snapshots = Snapshots(
        state, ["here"] * RANKS, process_endpoint("127.0.0.1"), "bench"
    )
    mine = tokens_of(job).chunk(2)[mesh.batch_rank]
    rows, length = len(mine), job.length
    positions = torch.arange(length).repeat(rows, 1)
    cu_seqlens = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    batches = [
        Batch(
            mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), positions, cu_seqlens
        )
    ]
    context = StepContext(model, state, mesh, before_update=snapshots.complete)
    stepper = plain_step(context, SETTINGS.clip)
    progress = Progress()

    def without() -> tuple[float, float]:
        (done,) = stepper.take(batches, SETTINGS.lr)
        progress.step += 1
        return done.loss, done.grad_norm

    def beside() -> tuple[float, float]:
        snapshots.begin(progress)
        return without()

    def alone() -> tuple[float, float]:
        progress.step += 1
        snapshots.begin(progress)
        snapshots.complete()
        return 0.0, 0.0

    sides: dict[str, Step] = {"without": without, "with copies": beside}
    for step in (*sides.values(), alone) * 2:
        step()
    wall, cpu = race(sides, rounds)
    alone_wall, alone_cpu = race({"alone": alone}, rounds)
    sizes = torch.tensor([snapshots.nbytes // 4, snapshots.sent], dtype=torch.float64)
    dist.all_reduce(sizes)
    pairs = [
        ours / plain
        for ours, plain in zip(wall["with copies"], wall["without"], strict=True)
    ]
    low, middle, high = statistics.quantiles(pairs, n=4)
    found = {
        "parameters": parameter_count(job.shape, job.shape.vocab), "tokens": job.rows * job.length,
        "bytes": int(sizes[0]), "bytes_sent": int(sizes[1]),
        "without": {"s": round(statistics.median(wall["without"]), 4), "cpu_s": round(cpu["without"], 3)},
        "with copies": {"s": round(statistics.median(wall["with copies"]), 4),
                        "cpu_s": round(cpu["with copies"], 3)},
        "ratio": round(middle, 4), "ratio_quartiles": [round(low, 4), round(high, 4)],
        "cpu_ratio": round(cpu["with copies"] / cpu["without"], 4),
        "alone": {"s": round(statistics.median(alone_wall["alone"]), 4), "cpu_s": round(alone_cpu["alone"], 4)},
        # hardly depends on what else the machine does
        "cpu_share": round(alone_cpu["alone"] / cpu["without"], 4),
        "floor_s": round(floor(int(snapshots.nbytes // 4)), 4),
    }  # fmt: skip
    snapshots.stop()
    return found


def floor(size: int) -> float:
    """Seconds in which all ranks at a time copy so many bytes each, which is the least that a copy takes."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.empty_like(source)
    took = []
    for _ in range(8):
        dist.barrier()
        begun = time.perf_counter()
        target.copy_(source)
        dist.barrier()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, to see that it runs"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    about = machine()
    found = on_ranks(RANKS, on_rank, QUICK if given.quick else JOB, given.rounds)
    plain, ours = found["without"], found["with copies"]
    size, sent = found["bytes"] / 2**20, found["bytes_sent"] / 2**20
    print(
        f"{found['parameters'] / 1e6:.1f}M parameters, {found['tokens']} tokens a step, {RANKS} ranks"
    )
    print(f"a copy: {size:.0f} MiB, of which {sent:.0f} MiB are sent")
    for name, row in (
        ("without", plain),
        ("with copies", ours),
        ("a copy alone", found["alone"]),
    ):
        print(f"  {name:<14}{row['s']:9.4f} s   processors {row['cpu_s']:9.4f} s")
    low, high = found["ratio_quartiles"]
    print(
        f"  ratio {found['ratio']:.3f} (quartiles {low:.3f} to {high:.3f}), of processors {found['cpu_ratio']:.3f}"
    )
    print(
        f"  processors' time of a copy alone, as a share of a step's: {found['cpu_share']:.3f}"
    )
    print(f"  floor: the bytes copied once {found['floor_s']:.4f} s")
    write({"machine": about, **found}, given.json)


if __name__ == "__main__":
    main()
