"""The engine's simulator against the engine: latencies of three loads, with a curve that was fitted to another one.

A Llama of SmolLM2-135M's shape with random weights, float32, one thread. Both clocks are of the processor's time of the
engine's thread, so that what else the machine does is left out.

    OMP_NUM_THREADS=1 python bench/simulator.py [--requests 24] [--json bench/results/simulator.json]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from pathlib import Path
from time import thread_time

import torch

from weft.generate.engine import Engine
from weft.generate.policies import Policy, exact_fill, policy_of
from weft.generate.step_curve import Curve
from weft.layout.mesh import Mesh
from weft.models.products import read_only
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.serve.load_requests import RequestOutcome
from weft.serve.load_simulation import TimedRequest, measure_load, simulate_load

SHAPE = ModelShape(
    vocab=49152, layers=30, embed=576, heads=9, kv_heads=3, ffn=1536, tied=True
)

#: By name: requests a second, means of the lengths of prompts and answers, the policy, and the cache's tokens.
LOADS: dict[str, tuple[float, int, int, Policy, int]] = {
    "calm": (0.6, 60, 24, exact_fill, 2**15),
    "crowded, in chunks": (3.0, 60, 24, policy_of("chunked:48"), 2**15),
    "long prompts, a small cache": (1.0, 240, 16, exact_fill, 1024),
}
#: The loads of the steps that the curve is fitted to: one at a time, and as many as there may be.
FITTED_ON = (
    (0.5, 120, 24, exact_fill, 2**15),
    (6.0, 100, 20, policy_of("chunked:64"), 2**15),
)


def load(
    seed: int, requests: int, rate: float, prompt: int, answer: int
) -> list[TimedRequest]:
    """Poisson arrivals with log-normal lengths."""
    drawn, time, found = random.Random(seed), 0.0, []

    def length(mean: int, sigma: float) -> int:
        return max(
            2,
            min(600, round(drawn.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))),
        )

    for _ in range(requests):
        time += drawn.expovariate(rate)
        ids = [drawn.randrange(40_000) for _ in range(length(prompt, 0.8))]
        found.append(TimedRequest(time, ids, length(answer, 0.6)))
    return found


def figures(found: list[RequestOutcome]) -> dict[str, float]:
    times = {
        metric: [x for one in found for x in one.seconds[metric]]
        for metric in ("ttft", "itl")
    }
    return {
        f"{metric}_{name}": of(seconds)
        for metric, seconds in times.items()
        for name, of in (
            ("mean", statistics.fmean),
            ("p99", lambda these: percentile(these, 0.99)),
        )
    }


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = parallelize(SHAPE, Mesh.single(), Train())[0]
    read_only(model)

    def engine(policy: Policy, cache: int) -> Engine:
        return Engine(model, tokens=cache, budget=256, limit=16, policy=policy)

    measure_load(engine(exact_fill, 2**15), load(9, 6, 3, 60, 12))  # warm
    samples, measured = [], {}
    for turn, (name, (*of_load, policy, cache)) in enumerate(LOADS.items(), 1):
        # The machine's speed drifts, and the curve is to be of the same minutes as what it is held against.
        for seed, (*fitted, fitted_policy, fitted_cache) in enumerate(
            FITTED_ON, 100 * turn
        ):
            samples += measure_load(
                engine(fitted_policy, fitted_cache),
                load(seed, given.requests, *fitted),
                thread_time,
            )[1]
        measured[name] = measure_load(
            engine(policy, cache), load(turn, given.requests, *of_load), thread_time
        )[0]
    curve, rows = Curve(samples), {}
    print(f"{'load':30}{'':12}{'engine':>10}{'simulator':>11}{'error':>8}")
    for turn, (name, (*of_load, policy, cache)) in enumerate(LOADS.items(), 1):
        its = engine(policy, cache).scheduler
        both = (
            figures(measured[name]),
            figures(simulate_load(its, load(turn, given.requests, *of_load), curve)),
        )
        for figure in both[0]:
            a, b = (each[figure] for each in both)
            rows[f"{name}: {figure}"] = {
                "engine": a,
                "simulator": b,
                "error": b / a - 1,
            }
            print(
                f"{name:30}{figure:12}{a:10.3f}{b:11.3f}{b / a - 1:+8.1%}", flush=True
            )
    if given.json:
        given.json.write_text(
            json.dumps(
                {"requests": given.requests, "rates": list(curve.rates), "rows": rows},
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
