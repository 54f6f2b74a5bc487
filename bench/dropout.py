"""What dropout costs, and how far layouts with dropout are from one device.

A step of one rank, in turns: without dropout, with Weft's, whose masks are a hash of seed, sample, position, layer and
channel, and with PyTorch's own ``F.dropout`` in the same places, whose masks no other layout can draw. Then layouts of
two to four ranks take three steps in float64 with dropout, and are compared with one device.

    python bench/dropout.py [--rounds 12] [--quick] [--json bench/results/dropout.json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from step import SETTINGS, Job, machine, tokens_of, write

from weft.data.batch import Batch
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models import dropout
from weft.prove.pool import ProcessPool
from weft.recipe import Data, ModelShape, Recipe, Train
from weft.train.setup import build_for_training
from weft.train.step import StepContext, plain_step

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cases import write_corpus
from tests.prove.test_equality import difference, tree

RESULTS = Path(__file__).parent / "results" / "dropout.json"
SHARE = 0.1
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp=2": {"layout": {"dp": 2}},
    "shard=2,tp=2": {"layout": {"shard": 2, "tp": 2}, "recompute": "selective"},
    "cp=2,tp=2": {"layout": {"cp": 2, "tp": 2}, "recompute": "full"},
    "pp=2,dp=2, zb-h1": {"layout": {"pp": 2, "dp": 2, "schedule": "zb-h1"}, "micro_batch": 1},
    "pp=4, skip": {"layout": {"pp": 4, "skip": 0.25}, "micro_batch": 1, "model": {"layers": 4}},
    "ep=2,shard=2": {"layout": {"ep": 2, "shard": 2}, "model": {"experts": 4}},
    "tp=2, ladder": {"layout": {"tp": 2}, "model": {"residual": "ladder"}},
    "tp=2, overlap of tokens": {"layout": {"tp": 2, "overlap": "tokens"}},
}  # fmt: skip


def plain_dropout(x: torch.Tensor, share: float, name: str, mesh: Mesh) -> torch.Tensor:
    return F.dropout(x, share)


def times(job: Job, rounds: int) -> dict[str, Any]:
    """Processor seconds of a step of each kind, and their ratios to the step without dropout, pair by pair."""
    tokens = tokens_of(job)
    rows, length = len(tokens), job.length
    batch = Batch(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(length).repeat(rows, 1),
        torch.arange(0, rows * length + 1, length, dtype=torch.int32),
        draws=torch.stack([dropout.token_draws(0, row, length) for row in range(rows)]),
    )  # fmt: skip
    steppers = {}
    for name, share in (("none", 0.0), ("weft", SHARE), ("torch", SHARE)):
        shape = job.shape.model_copy(update={"dropout": share})
        recipe = Recipe(
            train=Train(dtype="float32", batch=rows),
            optimizer=SETTINGS,
            data=Data(seq_len=length),
        )
        mesh = Mesh.single()
        context = StepContext(*build_for_training(shape, mesh, recipe), mesh)
        steppers[name] = plain_step(context, SETTINGS.clip)
    spent: dict[str, list[float]] = {name: [] for name in steppers}
    usual = dropout.dropped_part
    for number in range(rounds + 1):
        for name, stepper in list(steppers.items())[:: 1 if number % 2 else -1]:
            part = plain_dropout if name == "torch" else usual
            with mock.patch.object(dropout, "dropped_part", part):
                begun = time.process_time()
                stepper.take([batch], SETTINGS.lr)
                if number:
                    spent[name].append(time.process_time() - begun)
    ratios = {
        name: [a / b for a, b in zip(spent[name], spent["none"], strict=True)]
        for name in ("weft", "torch")
    }
    return {
        "tokens": rows * length,
        "cpu_s": {
            name: round(statistics.median(each), 4) for name, each in spent.items()
        },
        "ratio": {
            name: round(statistics.median(each), 3) for name, each in ratios.items()
        },
    }


def differences() -> dict[str, float]:
    """Largest relative difference from one device of anything that a step makes, by layout."""
    worst = {}
    with tempfile.TemporaryDirectory() as folder, closing(ProcessPool()) as pool:
        corpus = write_corpus(Path(folder))
        for name, case in LAYOUTS.items():
            dropping = case | {"model": {"dropout": SHARE} | case.get("model", {})}
            world = Layout(**case["layout"]).world
            result = pool.run(world, difference, tree(corpus, dropping))[0]
            worst[name] = max(
                result.loss, result.grad_norm, result.grad, result.param, result.slot
            )
            print(f"{name:28}{worst[name]:.1e}")
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quick = Job(ModelShape(vocab=256, layers=2, embed=32, heads=2), 8, 32)
    job = (
        quick
        if options.quick
        else Job(ModelShape(vocab=8192, layers=4, embed=384, heads=6), 4, 256)
    )
    results = {"machine": machine(), "share": SHARE, **times(job, options.rounds)}
    print(results["cpu_s"], results["ratio"])
    results["differences"] = differences()
    results["largest"] = float(f"{max(results['differences'].values()):.1e}")
    if options.json:
        write(results, options.json)


if __name__ == "__main__":
    main()
