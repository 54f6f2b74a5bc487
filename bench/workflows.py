"""Agents that write SQL, on a simulated cluster: deadlines that are met with and without urgency and balanced dispatch.

    python bench/workflows.py [--load 0.9] [--seeds 3]

The trace is that of `sql_trace.py`, and others of its kind with other seeds. The cluster has three engines, one of them
half as fast, with Weft's own schedulers; steps take what the planner predicts for Llama-3-8B on an H100. The load is a
share of the jobs per second that the three can end at most. The weight of balanced dispatch is tuned on a trace of its
own.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from sql_trace import TRACE, jobs

from weft.cluster.dispatch_policy import DispatchPolicy, freest
from weft.generate.block_pool import BlockPool
from weft.generate.policies import policy_of
from weft.generate.scheduler import ScheduledStep, Scheduler
from weft.generate.step_work import work_of
from weft.generate.workflow import Workflow
from weft.planner.machine import load_cluster
from weft.planner.planned_model import load_model
from weft.planner.serving_price import EnginePrice
from weft.serve.cluster_simulation import (
    ClusterRequest,
    SimulatedEngine,
    simulate_cluster,
)
from weft.techniques.dispatch_policies.balanced import ByWorkload

RESULTS = Path(__file__).parent / "results" / "workflows.json"
SPEEDS = (1.0, 1.0, 0.5)
#: Answers at a time, tokens of a step, and tokens of a block.
LIMIT, BUDGET, BLOCK = 8, 2048, 16
WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
#: Seconds per prompt token and per written token of a request without others.
READING, WRITING = 0.00002, 0.005
Job = dict[str, Any]


class Way(NamedTuple):
    """A scheduling policy and a dispatch policy."""

    policy: str
    dispatch: Callable[[], DispatchPolicy]


class JobLoad(NamedTuple):
    """Requests of jobs. ``last``: the indices of each job's last requests; ``deadlines``: seconds of each job."""

    requests: list[ClusterRequest]
    last: list[list[int]]
    deadlines: list[float]


def engines(policy: str) -> list[SimulatedEngine]:
    """Return the engines of the cluster, new."""
    shape, machine = load_model("llama3-8b").shape, load_cluster("h100", 1).machine()
    price = EnginePrice(shape, machine)

    def curve(speed: float, step: ScheduledStep) -> float:
        return price.step_seconds(*work_of(step)[1:]) / speed

    built = []
    for number, speed in enumerate(SPEEDS):
        pool = BlockPool(price.cache_tokens // BLOCK, BLOCK)
        scheduler = Scheduler(pool, BUDGET, LIMIT, policy_of(policy))
        name = f"engine {number}"
        built.append(SimulatedEngine(name, scheduler, partial(curve, speed)))
    return built


def alone(job: Job, reading: float, writing: float) -> float:
    """Return the seconds of a job without any other on a fast engine, with its schema read before. ``reading``,
    ``writing``: seconds per token of a prompt, and per token that is written.
    """
    return sum(
        max(reading * prompt + writing * tokens for _, prompt, tokens in stage["calls"])
        for stage in job["stages"]
    )


def load_of(
    trace: Sequence[Job], rate: float, reading: float = READING, writing: float = WRITING
) -> JobLoad:  # fmt: skip
    """Return the requests of all jobs at ``rate`` jobs per second. Deadlines are a multiple of what a job takes alone,
    with ``reading`` and ``writing`` seconds per token.
    """
    load = JobLoad([], [], [])
    for job in trace:
        time, before = job["time"] / rate, list[int]()
        deadline = time + job["slack"] * alone(job, reading, writing)
        for stage in job["stages"]:
            workflow = Workflow(job["id"], stage["stage"], tuple(stage["remaining"]), deadline)  # fmt: skip
            first = len(load.requests)
            for number, (schema, rest, tokens) in enumerate(stage["calls"]):
                text = Random(f"{job['id']} {first} {number}")
                prompt = [job["database"]] * schema
                prompt += [text.randrange(100, 200) for _ in range(rest)]
                load.requests.append(ClusterRequest(time, prompt, tokens, workflow, before))  # fmt: skip
            before = [*range(first, len(load.requests))]
        load.last.append(before)
        load.deadlines.append(deadline)
    return load


def ends(way: Way, load: JobLoad) -> np.ndarray:
    """Return when each job ends, in seconds."""
    outcomes = simulate_cluster(engines(way.policy), load.requests, way.dispatch())
    return np.array([max(outcomes[i].end for i in last) for last in load.last])


def met(way: Way, trace: Sequence[Job], rate: float) -> float:
    """Return the share of the jobs that end by their deadline."""
    load = load_of(trace, rate)
    return float(np.mean(ends(way, load) <= np.array(load.deadlines)))


def capacity(trace: Sequence[Job]) -> float:
    """Return the jobs per second that the engines end at most: the rate of tokens while all of them are busy, over the
    tokens of a job. All jobs arrive at once, and the first half of the tokens counts.
    """
    load = load_of(trace, 1e9)
    outcomes = simulate_cluster(engines("exact-fill"), load.requests)
    times = np.sort(np.concatenate([outcome.times for outcome in outcomes]))
    half = len(times) // 2
    return float(half / times[half] / (len(times) / len(trace)))


def main(
    load: Annotated[float, typer.Option(min=0.05)] = 0.9,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    out: Path = RESULTS,
) -> None:
    """Compare all ways, and write the figures."""
    trace = [json.loads(line) for line in TRACE.read_text().splitlines()]
    traces = [trace, *(jobs(len(trace), seed) for seed in range(1, seeds))]
    rates = [load * capacity(each) for each in traces]
    print(f"{rates} jobs per second", flush=True)
    tuning = jobs(100, 1000)
    rate = load * capacity(tuning)
    tuned = {w: met(Way("urgency", partial(ByWorkload, w)), tuning, rate) for w in WEIGHTS}  # fmt: skip
    weight = max(tuned, key=lambda w: tuned[w])
    print(f"weight {weight} of {tuned}", flush=True)
    balanced = partial(ByWorkload, weight)
    ways = {
        "first come, least loaded": Way("exact-fill", lambda: freest),
        "first come, balanced": Way("exact-fill", balanced),
        "urgency, least loaded": Way("urgency", lambda: freest),
        "urgency, balanced": Way("urgency", balanced),
    }
    figures: dict[str, Any] = {}
    for name, way in ways.items():
        shares = [met(way, *each) for each in zip(traces, rates, strict=True)]
        figures[name] = {"met": float(np.mean(shares)), "of_each_trace": shares}
        print(f"{name:<26} {np.mean(shares):.3f} of the deadlines  {shares}", flush=True)  # fmt: skip
    first, *_, best = figures.values()
    gain = best["met"] / first["met"] - 1
    print(f"urgency and balanced dispatch meet {gain:+.0%} more than first come, least loaded")  # fmt: skip
    record = {
        "load": load, "jobs_per_second": rates, "jobs": len(trace), "traces": seeds, "speeds": SPEEDS,
        "limit": LIMIT, "weight": weight, "weights": tuned, "ways": figures, "gain": gain,
    }  # fmt: skip
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
