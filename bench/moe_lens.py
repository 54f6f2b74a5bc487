"""Whole batches through experts that move through memory: predicted by a short measurement, and run (MoE-Lens).

A mixture with random weights rests in a file. Costs are measured in a few passes over some prompts; jobs of other
numbers of texts, lengths and budgets are then predicted and run, and the error of each is printed. The same jobs run
with experts that are read when they are chosen (slots of the same memory), and with all experts in memory, in turns;
all three write the same tokens.

With ``--processor`` no experts move, and the processor's time of this thread is predicted and measured, in which
neither other programs nor waiting count: what a busy machine can show.

    OMP_NUM_THREADS=1 python bench/moe_lens.py [--folder /tmp] [--quick] [--json bench/results/moe_lens.json]
    OMP_NUM_THREADS=1 python bench/moe_lens.py --processor [--json bench/results/moe_lens.json]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.resting import values
from weft.generate.engine import Engine
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.memory.resting_experts import RestingExperts
from weft.memory.streamed_experts import StreamedExperts
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.serve.batch_costs import measure_costs
from weft.serve.batch_plan import plan_batch, played_batch

Clock = Callable[[], float]

LARGE = {"vocab": 2048, "layers": 8, "embed": 512, "heads": 8, "kv_heads": 8, "ffn": 512, "experts": 8,
         "experts_per_token": 2, "expert_ffn": 512}  # fmt: skip
SMALL = {"vocab": 256, "layers": 5, "embed": 128, "heads": 4, "kv_heads": 4, "ffn": 128, "experts": 8,
         "experts_per_token": 2, "expert_ffn": 256}  # fmt: skip
#: Texts at a time, tokens of a pass, prompts, tokens of a prompt (least, most), new tokens.
JOBS = ((8, 512, 24, (40, 120), 16), (32, 512, 64, (40, 120), 16), (48, 256, 64, (100, 300), 16),
        (64, 1024, 96, (20, 60), 24), (96, 512, 64, (200, 400), 8))  # fmt: skip
QUICK = ((4, 64, 8, (10, 30), 6), (12, 128, 16, (10, 30), 8))
#: Cache blocks: enough for all jobs.
TOKENS = 80_000


def built(shape: ModelShape, experts: Any = None) -> Transformer:
    lift = None if experts is None else partial(experts.lift, values=values)
    return parallelize(shape, Mesh.single(), Train(), values, lift=lift)[0]


def prompts_of(shape: ModelShape, count: int, least: int, most: int, seed: int) -> list[list[int]]:  # fmt: skip
    drawn = random.Random(seed)
    return [
        [drawn.randrange(shape.vocab) for _ in range(drawn.randint(least, most))]
        for _ in range(count)
    ]


def written(
    engine: Engine, prompts: Sequence[list[int]], new: int, clock: Clock = perf_counter
) -> tuple[float, list[list[int]]]:
    """Seconds of a job, and the tokens of each text."""
    begun = clock()
    texts = [engine.submit(prompt, new, GREEDY)[0] for prompt in prompts]
    engine.run()
    return clock() - begun, [text.ids[text.prompt :] for text in texts]


def job_of(
    engines: dict[str, Engine],
    costs: Any,
    shape: ModelShape,
    job: tuple[Any, ...],
    seed: int,
    clock: Clock,
) -> dict[str, Any]:
    limit, budget, count, (least, most), new = job
    prompts = prompts_of(shape, count, least, most, seed)
    pool = engines["streamed"].scheduler.pool
    plan = played_batch(costs, prompts, new, limit, budget, range(count), pool.blocks, pool.size)  # fmt: skip
    row: dict[str, Any] = {
        "texts": limit,
        "budget": budget,
        "prompts": count,
        "lengths": [least, most],
        "new": new,
    }
    row |= {
        "predicted_s": plan.seconds,
        "bound": plan.bound,
        "limits": dict(plan.limits),
    }
    tokens: dict[str, Any] = {}
    for name, engine in engines.items():
        engine.scheduler.limit, engine.scheduler.budget = limit, budget
        engine.scheduler.pool.forget()
        row[f"{name}_s"], tokens[name] = written(engine, prompts, new, clock)
    assert all(each == tokens["streamed"] for each in tokens.values())
    row["error"] = plan.seconds / row["streamed_s"] - 1
    row["tokens_per_s"] = count * new / row["streamed_s"]
    if "on demand" in engines:
        row["over on demand"] = row["on demand_s"] / row["streamed_s"]
    return row


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--processor", action="store_true")
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    shape = ModelShape(**(SMALL if given.quick else LARGE))
    clock = thread_time if given.processor else perf_counter
    share = 1.0 if given.processor else given.share
    streamed = StreamedExperts(given.folder, share)
    ways: dict[str, Any] = {"streamed": streamed}
    if not given.processor:
        ways |= {"on demand": RestingExperts(given.folder, share), "resident": None}
    engines = {name: Engine(built(shape, way), TOKENS, limit=64) for name, way in ways.items()}  # fmt: skip
    engine = engines["streamed"]
    for each in engines.values():  # the first passes are slow
        written(each, prompts_of(shape, 4, 20, 40, 99), 4)
    begun = perf_counter()
    costs = measure_costs(
        engine, streamed.ring, prompts_of(shape, 24, 40, 120, 7), clock
    )
    probed = perf_counter() - begun
    rows = []
    for seed, job in enumerate(QUICK if given.quick else JOBS):
        rows.append(job_of(engines, costs, shape, job, seed, clock))
        print(json.dumps(rows[-1]), flush=True)
    prompts = prompts_of(shape, 64, 40, 120, 5)
    pool = engine.scheduler.pool
    begun = perf_counter()
    plan = plan_batch(costs, prompts, 16, pool.blocks, pool.size)
    chosen = perf_counter() - begun
    errors = [abs(row["error"]) for row in rows]
    result = {
        "shape": LARGE if not given.quick else SMALL,
        "share": share,
        "rows": rows,
        "largest_error": max(errors),
        "mean_error": statistics.mean(errors),
        "measurement_s": probed,
        "choice": {"texts": plan.limit, "budget": plan.budget, "seconds": chosen},
        "costs": {
            "inside": costs.inside,
            "experts": costs.experts,
            "outside": costs.outside,
            "mover_s": costs.mover,
        },
    }
    print(json.dumps(result, indent=1))
    if given.json:
        # both kinds of time stand in one file
        known = json.loads(given.json.read_text()) if given.json.exists() else {}
        known["processor" if given.processor else "wall"] = result
        given.json.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
