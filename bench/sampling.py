"""The share of sampling in the steps of an engine that writes many answers at once.

SmolLM2-135M (``--model FOLDER`` as Hugging Face has it; without it random weights of its shape), one thread. All
requests of an engine have the same kind of settings, another in each step. Times are the process's, so that other
processes disturb them little; figures are medians over steps.

    OMP_NUM_THREADS=1 python bench/sampling.py [--model FOLDER] [--json bench/results/sampling.json]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from serve import opened, prompt_of, random_weights
from step import machine, write

from weft.generate import engine as engine_module
from weft.generate.engine import Engine
from weft.generate.request import Written
from weft.generate.sampled_text import SampledText, write_next_tokens
from weft.generate.sampling import GREEDY, Sampling

KINDS = {
    "greedy": GREEDY,
    "plain": Sampling(1.0),
    "top-k 50": Sampling(0.8, top_k=50),
    "top-p 0.9": Sampling(0.8, top_p=0.9),
    "top-k 40, top-p 0.95": Sampling(0.8, top_k=40, top_p=0.95),
    "min-p 0.05": Sampling(1.0, min_p=0.05),
    "penalties, greedy": Sampling(0, repetition=1.1, presence=0.5, frequency=0.2),
    "penalties, top-p 0.9": Sampling(0.8, top_p=0.9, repetition=1.1, presence=0.5),
}


def shares(folder: Path, rows: int, steps: int) -> dict[str, Any]:
    """By kind of settings: seconds of a step, of its sampling, and the share."""
    # the first texts go on while prompts of the last are read
    length = (steps + 2) * len(KINDS) + rows
    engine = Engine(opened(folder), tokens=rows * (160 + length), budget=512)
    texts = [
        engine.submit(prompt_of(40 + 15 * (r % 8), r), length, Sampling(seed=r))[0]
        for r in range(rows)
    ]
    while engine.scheduler.waiting or not all(text.written for text in texts):
        engine.step()
    inside = 0.0

    def timed(logits: torch.Tensor, sampled: Sequence[SampledText]) -> list[Written]:
        nonlocal inside
        begun = time.process_time()
        written = write_next_tokens(logits, sampled)
        inside = time.process_time() - begun
        return written

    engine_module.write_next_tokens = timed
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
    for turn in range(steps + 1):
        for name, how in KINDS.items():
            for seed, text in enumerate(texts):
                text.how = replace(how, seed=seed)
            begun = time.process_time()
            assert len(engine.step()) == rows
            # tokens are counted for penalties when these come first
            if turn:
                took[name].append((time.process_time() - begun, inside))
    found = {}
    for name, each in took.items():
        step, sampling = (statistics.median(column) for column in zip(*each, strict=True))  # fmt: skip
        found[name] = {"step s": step, "sampling s": sampling, "share": sampling / step}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "machine": machine(),
        "rows": given.rows,
        "weights are random": given.model is None,
    }
    with tempfile.TemporaryDirectory() as room:
        folder = given.model or random_weights(Path(room) / "model")
        results["settings"] = shares(folder, given.rows, given.steps)
    results["load"] = round(os.getloadavg()[0], 1)
    for name, row in results["settings"].items():
        spent = f"{row['sampling s'] * 1e3:6.1f} ms of {row['step s'] * 1e3:5.0f}"
        print(f"{name:24} {spent}: {row['share']:.1%}")
    if given.json:
        write(results, given.json)


if __name__ == "__main__":
    main()
