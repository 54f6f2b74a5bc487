"""A ladder model beside a standard one: what it learns from as many tokens, and its speed where links are slow.

    sudo python bench/ladder.py [--quick] [--only loss|speed] [--json bench/results/ladder.json]
    python bench/ladder.py --only loss --seeds 4 --steps 600

The first part trains both from the same seeds on the standard library's text and compares the loss on files held out;
each of two processes trains one model at a time, on one core. A seed is written as soon as both its models are there.
The second cuts both over ``tp`` on hosts (namespaces) whose cables carry 200 Mbit/s and take 2 ms from one to another.
Sides take turns, step by step, in the same processes: a training step (forward, backward, reduction), and the pass
over a long prompt. A third side is the ladder model that waits for each of its sums at once: it sends the same bytes,
and how much longer it waits is what the ladder hides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

RESULTS = Path(__file__).parent / "results" / "ladder.json"
RATE, DELAY_S = "200mbit", 0.002
STANDARD, LADDER, WAITING = "standard", "ladder", "ladder that waits"
SIDES = (STANDARD, LADDER, WAITING)
#: Sizes of the model whose speed is measured: a part computes about as long as its sum travels.
SPEED = {"vocab": 256, "layers": 6, "embed": 512, "heads": 8, "ffn": 2048}
ROWS, LENGTH, PROMPT = 1, 128, 256
#: The recipe of the model that learns.
LEARNED: dict[str, Any] = {
    "model": {"layers": 8, "embed": 128, "heads": 4, "qk_norm": True, "tied": True},
    "data": {"sources": [{"kind": "stdlib"}], "tokenizer": "train:1024", "seq_len": 128, "validation": 0.05},
    "train": {"batch": 16, "device": "cpu"},
    "optimizer": {"lr": 3e-3, "warmup": 40},
    "validation": {"every": 0, "batches": 40},
    "checkpoint": {"every": 0},
    "observe": {"split_every": 0, "trackers": []},
}  # fmt: skip


# --- what it learns -------------------------------------------------------------------------------------------------


def held_out_loss(residual: str, seed: int, steps: int) -> float:
    """Train from ``seed``, and return the loss on the text held out."""
    from weft.layout.mesh import Mesh
    from weft.recipe import build_recipe
    from weft.train.setup import prepare
    from weft.train.training import train_job

    torch.set_num_threads(1)
    values = json.loads(json.dumps(LEARNED))
    values["model"]["residual"] = residual
    values["train"] |= {"steps": steps, "seed": seed}
    values["validation"]["every"] = steps
    recipe = build_recipe(values)
    with tempfile.TemporaryDirectory() as out:
        outcome = train_job(prepare(recipe), Mesh.single(), Path(out) / "run")
    return float(outcome.validations[-1])


def learned(seeds: range, steps: int) -> Iterator[dict[str, Any]]:
    """Losses of both models by seed, as soon as they are there."""
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        losses = {
            (seed, residual): processes.submit(held_out_loss, residual, seed, steps)
            for seed in seeds
            for residual in (STANDARD, LADDER)
        }
        for seed in seeds:
            loss = {side: losses[seed, side].result() for side in (STANDARD, LADDER)}
            more = loss[LADDER] / loss[STANDARD] - 1
            print(
                f"seed {seed}, {steps} steps: standard {loss[STANDARD]:.4f}, ladder {loss[LADDER]:.4f} ({more:+.2%})",
                flush=True,
            )
            yield {"seed": seed, **loss, "more": more}


# --- its speed ------------------------------------------------------------------------------------------------------


class Waits:
    """Seconds in which this rank waits for sums of the ladder."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        from weft.layout.flights import StartedCollective

        land = StartedCollective.land

        def timed(flight: StartedCollective) -> torch.Tensor:
            begun = time.perf_counter()
            try:
                return land(flight)
            finally:
                self.seconds += time.perf_counter() - begun

        with mock.patch.object(StartedCollective, "land", timed):
            yield


def passes_of(residual: str, ranks: int, sizes: dict[str, Any]) -> dict[str, Callable[[], float]]:  # fmt: skip
    """A training step and the pass over a prompt of a model on this rank; each returns a number that sides compare."""
    from weft.data.batch import Batch
    from weft.layout.layout import Layout
    from weft.layout.mesh import Mesh
    from weft.recipe import ModelShape, Recipe, Train
    from weft.train.setup import build_for_training
    from weft.train.step import reduced_gradients

    mesh = Mesh.create(Layout(tp=ranks), "cpu")
    shape = ModelShape(**sizes, residual=residual)
    recipe = Recipe(train=Train(dtype="float32"))
    model, state = build_for_training(shape, mesh, recipe)

    def batch_of(rows: int, length: int) -> Batch:
        draw = torch.Generator().manual_seed(7)
        ids = torch.randint(shape.vocab, (rows, length + 1), generator=draw)
        positions = torch.arange(length).repeat(rows, 1)
        ends = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, ends)

    batch, prompt = batch_of(ROWS, LENGTH), batch_of(1, PROMPT)

    def step() -> float:
        _, sums = reduced_gradients(model, state, [batch], mesh)
        for parameter in model.parameters():
            parameter.grad = None
        return float(sums[0])

    @torch.inference_mode()
    def read() -> float:
        ids = prompt.tokens, prompt.positions, prompt.cu_seqlens
        return float(model(*ids, only=slice(-1, None)).abs().sum())

    return {"step": step, "prompt": read}


def be_rank(rank: int, ranks: int, address: str, rounds: int, out: str) -> None:
    """Take turns with all sides, and write the seconds of each."""
    from weft.layout.mesh import Mesh
    from weft.layout.pending import Arrived
    from weft.models import ladder

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:29561", rank=rank, world_size=ranks
    )
    start = ladder.start_sum

    def at_once(x: torch.Tensor, mesh: Mesh) -> Arrived:
        return Arrived(start(x, mesh).wait())

    of = {
        residual: passes_of(residual, ranks, SPEED) for residual in (STANDARD, LADDER)
    }
    of[WAITING] = of[LADDER]
    seconds: dict[str, dict[str, list[float]]] = {
        what: {side: [] for side in SIDES} for what in ("step", "prompt")
    }
    waited = {what: dict.fromkeys(SIDES, 0.0) for what in seconds}
    values: dict[str, dict[str, float]] = {what: {} for what in seconds}
    for number in range(rounds + 1):
        for what in seconds:
            for side in SIDES:
                dist.barrier()
                waits = Waits()
                wait = at_once if side == WAITING else start
                begun = time.perf_counter()
                with mock.patch.object(ladder, "start_sum", wait), waits.counted():
                    values[what][side] = of[side][what]()
                if number:  # the first opens ways
                    seconds[what][side].append(time.perf_counter() - begun)
                    waited[what][side] += waits.seconds
    for each in values.values():
        assert abs(each[LADDER] - each[WAITING]) <= 1e-5 * abs(each[LADDER]), each
    dist.barrier()
    Path(out).write_text(json.dumps({"seconds": seconds, "waited": waited}))
    dist.destroy_process_group()


def measured(ranks: int, rounds: int) -> dict[str, Any]:
    """Medians of the sides over ``ranks`` hosts, how much faster the ladder is, and the share that it hides."""
    from hosts import hosts

    with (
        tempfile.TemporaryDirectory() as folder,
        hosts(ranks, f"weft-ladder-{os.getpid()}", RATE, DELAY_S) as made,
    ):
        outs = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        told = [made[0].address, str(rounds)]
        running = [
            subprocess.Popen(
                host.command([sys.executable, __file__, "--rank", str(rank), str(ranks), *told, str(out)]),
            )
            for rank, (host, out) in enumerate(zip(made, outs, strict=True))
        ]  # fmt: skip
        try:
            for process in running:
                if process.wait(3600):
                    raise SystemExit(f"a rank of tp={ranks} failed")
        finally:
            for process in running:
                process.kill()
        told_by = [json.loads(out.read_text()) for out in outs]
    row: dict[str, Any] = {"tp": ranks}
    for what in ("step", "prompt"):
        # the slowest rank of each turn
        turns = {
            side: [max(each) for each in zip(*(t["seconds"][what][side] for t in told_by), strict=True)]
            for side in SIDES
        }  # fmt: skip
        median = {side: statistics.median(turns[side]) for side in SIDES}
        waits = {
            side: statistics.mean(t["waited"][what][side] for t in told_by)
            for side in SIDES
        }
        row[what] = {
            **{f"{side} s": median[side] for side in SIDES},
            "faster": median[STANDARD] / median[LADDER],
            "faster than waiting": median[WAITING] / median[LADDER],
            "hidden": 1 - waits[LADDER] / waits[WAITING],
        }
        print(
            f"tp={ranks}, {what:6}: "
            + ", ".join(f"{side} {median[side]:.3f} s" for side in SIDES)
            + f"; ladder {row[what]['faster']:.2f}x of standard, {row[what]['hidden']:.0%} of its sums hidden",
            flush=True,
        )
    return row


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "--quick", action="store_true", help="a few steps: that it runs"
    )
    parser.add_argument("--only", choices=("loss", "speed"))
    parser.add_argument("--steps", type=int, default=600, help="that a model learns")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="turns of all sides")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, ranks, address, rounds, out = options.rank
        return be_rank(int(rank), int(ranks), address, int(rounds), out)
    from hosts import unavailable

    if options.quick:
        options.steps, options.seeds, options.rounds = 3, 1, 1
    written = {"date": datetime.now().isoformat(timespec="seconds"), "machine": platform.processor(),
               "rate": RATE, "delay_s": DELAY_S, "steps": options.steps}  # fmt: skip
    if options.json.exists() and options.only:
        written = json.loads(options.json.read_text()) | written
    if options.only != "loss":
        if why := unavailable():
            raise SystemExit(why)
        written["speed"] = [measured(ranks, options.rounds) for ranks in (2, 4)]
    if options.only != "speed":
        rows = written["loss"] = []
        for row in learned(range(options.seeds), options.steps):
            rows.append(row)
            written["more_in_the_mean"] = statistics.mean(row["more"] for row in rows)
            options.json.write_text(json.dumps(written, indent=1) + "\n")
    options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
