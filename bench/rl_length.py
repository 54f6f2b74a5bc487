"""Length bias of a policy loss: the task ``length`` learned with each normaliser, all else equal.

With ``sequence`` every answer is divided by its own number of tokens, so that a wrong answer costs less per token the
longer it is (Liu et al. 2025, Dr. GRPO). All runs of a seed begin with the same supervised start, write the same first
answers, and are asked the same questions. From the answers of every rollout phase come the lengths of right and wrong
answers, and by how many letters wrong answers miss the length that was asked for.

    OMP_NUM_THREADS=1 python bench/rl_length.py [--seeds 3] [--steps 200] [--json bench/results/rl_length.json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from step import machine, write

from weft.api import start
from weft.recipe import Recipe, build_recipe

NORMALISERS = ("sequence", "tokens", "constant")


class Answer(NamedTuple):
    """Length of an answer, the length asked for, both in letters, and whether the answer is right."""

    length: int
    asked: int
    right: bool


def recipe(normaliser: str, seed: int, args: argparse.Namespace) -> Recipe:
    """Return a small run that learns the task, with the given normaliser of the loss."""
    return build_recipe({
        "name": "rl-length",
        "model": {"layers": 1, "embed": 48, "heads": 4, "ffn": 128, "tied": True},
        "data": {"seq_len": args.tokens + 8},
        "tasks": [{"reward": "length", "longest": args.longest, "every": 0, "limit": 1}],
        "rl": {
            "method": "grpo", "group": args.group, "tokens": args.tokens, "keep": args.steps,
            "start": {"steps": args.start, "lr": args.start_lr}, "loss": {"normaliser": normaliser},
        },
        "train": {"steps": args.start + args.steps, "batch": args.batch, "seed": seed, "threads": 1},
        "optimizer": {"kind": "adamw", "lr": args.lr, "schedule": "constant", "warmup": 5},
        "validation": {"every": 0}, "checkpoint": {"every": 0},
    })  # fmt: skip


def phases(run: Path) -> list[list[Answer]]:
    """Return the answers of every rollout phase of a run, from the files that the run keeps."""
    kept = []
    for file in sorted((run / "answers").glob("*.jsonl")):
        records = [
            json.loads(line) for line in file.open(encoding="utf-8", newline="\n")
        ]
        kept.append([
            Answer(len(r["messages"][-1]["content"]), len(r["right_answer"]), r["reward"] == 1)
            for r in records
        ])  # fmt: skip
    return kept


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Return mean lengths of right and wrong answers, and how far wrong answers are from the length asked for."""
    right = [a for a in answers if a.right]
    wrong = [a for a in answers if not a.right]
    return {
        "right": round(len(right) / len(answers), 4),
        "length_right": round(statistics.fmean(a.length for a in right), 3) if right else 0.0,
        "length_wrong": round(statistics.fmean(a.length for a in wrong), 3) if wrong else 0.0,
        "wrong_too_many": round(statistics.fmean(a.length - a.asked for a in wrong), 3) if wrong else 0.0,
        "wrong_too_long": round(statistics.fmean(a.length > a.asked for a in wrong), 4) if wrong else 0.0,
    }  # fmt: skip


def measured(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train once, and return the figures of the run, with the answers of its first phase."""
    with tempfile.TemporaryDirectory() as folder:
        run = start(recipe(name, seed, args), Path(folder) / "run").run
        written = phases(run)
    size = len(written) // args.parts
    parts = [
        figures([a for phase in written[i * size : (i + 1) * size] for a in phase])
        for i in range(args.parts)
    ]
    first = figures(written[0])
    row = {"normaliser": name, "seed": seed, "first_phase": first, "parts": parts}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """Run all seeds with all normalisers, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--start", type=int, default=60)
    parser.add_argument("--start-lr", type=float, default=3e-3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--longest", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--parts", type=int, default=6)
    parser.add_argument(
        "--normalisers", nargs="+", choices=NORMALISERS, default=NORMALISERS
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ways = [(name, seed) for seed in range(args.seeds) for name in args.normalisers]
    with ProcessPoolExecutor(
        args.at_once, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        running = [pool.submit(measured, name, seed, args) for name, seed in ways]
        rows = [each.result() for each in running]
    for seed in range(args.seeds):
        firsts = [row["first_phase"] for row in rows if row["seed"] == seed]
        assert all(first == firsts[0] for first in firsts), "the runs begin unequal"
    if args.json:
        given = {k: v for k, v in vars(args).items() if k != "json"}
        write(machine() | {"settings": given, "runs": rows}, args.json)


if __name__ == "__main__":
    main()
