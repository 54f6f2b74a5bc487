"""Two phases on one device: quotas that controllers choose beside fixed ones and one process, on a load that drifts.

    python bench/quotas.py [--seeds 2] [--only nexus] [--held-out] [--real] [--rounds 1] [--minutes 4]

The load alternates between long prompts with short answers and many short prompts with longer ones, so that no fixed
quota is right all the time. The device is simulated: an H100 with Llama-3-8B, by the planner's roofline, where both
phases share bandwidth. With ``--held-out`` other drifts are simulated, on which nothing was chosen or tuned; of each
the best of six fixed quotas is known only afterwards. With ``--real`` a random model of SmolLM2's shape with fewer
layers is measured on this machine: two processes and quotas of cores. All ways take turns with the same load, which is
as long as the minutes permit; what has not ended in one and a half times the time of its turn counts as failed.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from weft.generate.block_pool import BlockPool
from weft.generate.core_share import CoreShare, apply_share
from weft.generate.engine import Engine
from weft.generate.open_engine import split_engine
from weft.generate.phase_costs import PhaseCosts
from weft.generate.policies import policy_of
from weft.generate.quotas import quota_of
from weft.generate.sampling import GREEDY
from weft.generate.scheduler import ScheduledStep, Scheduler
from weft.generate.shared_model import share_model
from weft.generate.step_work import work_of
from weft.layout.mesh import Mesh
from weft.models.products import read_only
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.planner.machine import load_cluster
from weft.planner.planned_model import load_model
from weft.planner.serving_price import EnginePrice
from weft.recipe import ModelShape, Train
from weft.serve.cluster_simulation import (
    ClusterRequest,
    SimulatedEngine,
    SimulatedPhases,
    simulate_cluster,
)
from weft.serve.load_requests import RequestOutcome, latency_statistics

RESULTS = Path(__file__).parent / "results" / "quotas.json"
#: Tokens of a block and of a step, and answers at a time.
BLOCK, BUDGET, LIMIT = 16, 2048, 256
#: The ways that are compared: one process in chunks, and quotas of two processes.
CHUNKED = ("chunked:64", "chunked:256", "chunked:512", "exact-fill")
FIXED = ("0.3", "0.5", "0.6", "0.7", "0.8", "0.9")
CONTROLLERS = ("semi-pd", "nexus", "nexus with limits")
#: Those of them that are measured, and seconds from one way's turn to the next beside the load.
MEASURED_FIXED, BETWEEN_S = ("0.3", "0.5", "0.7"), 8.0


class Stage(NamedTuple):
    """A part of the load of so many ``seconds``. ``prompt``, ``answer``: mean tokens; ``rate``: requests per second."""

    prompt: int
    answer: int
    rate: float
    seconds: float


class Limits(NamedTuple):
    """Most seconds to a first token and per further token, as a mean of a request."""

    ttft: float
    tpot: float


#: The simulated load, and the limits by which it is judged.
STAGES = (Stage(4000, 40, 10.0, 10.0), Stage(300, 300, 50.0, 10.0)) * 2
LIMITS = (Limits(1.0, 0.0095), Limits(1.0, 0.012), Limits(1.0, 0.02))
#: Other drifts, for ``--held-out``: slow, of answers alone, of documents and commands, of the rate alone, of agents.
DRIFTS: dict[str, Sequence[Stage]] = {
    "ramp": (
        Stage(4000, 40, 8.0, 3.0), Stage(3000, 80, 9.0, 3.0), Stage(2000, 120, 12.0, 3.0), Stage(1200, 160, 17.0, 3.0),
        Stage(800, 200, 22.0, 3.0), Stage(500, 250, 30.0, 3.0), Stage(300, 300, 45.0, 3.0),
    ),
    "chat and essays": (Stage(1000, 150, 25.0, 5.0), Stage(150, 600, 14.0, 5.0)) * 2,
    "documents and commands": (Stage(8000, 100, 4.0, 5.0), Stage(100, 60, 100.0, 5.0)) * 2,
    "rate": (Stage(2000, 100, 8.0, 4.0), Stage(2000, 100, 20.0, 3.0)) * 3,
    "agents": (Stage(3000, 30, 12.0, 4.0), Stage(600, 400, 15.0, 4.0), Stage(200, 100, 60.0, 4.0)) * 2,
}  # fmt: skip


def drifting_load(stages: Sequence[Stage], seed: int, vocab: int) -> list[ClusterRequest]:  # fmt: skip
    """Return the requests of ``stages``, one stage after the other; lengths vary by a half, arrivals are random."""
    draw, begun, requests = Random(seed), 0.0, list[ClusterRequest]()
    for stage in stages:
        time, begun = begun, begun + stage.seconds
        while (time := time + draw.expovariate(stage.rate)) < begun:
            prompt, answer = (
                round(mean * draw.uniform(0.5, 1.5))
                for mean in (stage.prompt, stage.answer)
            )
            ids = [draw.randrange(vocab) for _ in range(max(2, prompt))]
            requests.append(ClusterRequest(time, ids, max(2, answer)))
    return requests


def figures(outcomes: Sequence[RequestOutcome], limits: Limits) -> dict[str, float]:
    """Return what a way did with a load: goodput, the share within limits, and latencies in milliseconds."""
    begun = min(each.began for each in outcomes)
    seconds = max(each.end for each in outcomes) - begun
    within = {"ttft": 1000 * limits.ttft, "tpot": 1000 * limits.tpot}
    said = latency_statistics(outcomes, seconds, [50, 99], within)
    kept = said["request_goodput"] * seconds / len(outcomes)
    names = ("p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")
    return {
        "goodput": said["request_goodput"],
        "within limits": kept,
        **{n: said[n] for n in names},
    }


# Simulated.


def roofline(price: EnginePrice) -> PhaseCosts:
    """Return the costs of ``price`` in compute and memory, for a dense model on one rank."""

    def compute(*work: float) -> float:
        return price.step_seconds(*work)

    huge = (
        1e6  # of each number alone: so much that the slower part is the one in question
    )
    token, row = (compute(*(huge if i == at else 0 for i in range(5))) / huge for at in (0, 2))  # fmt: skip
    pair = (compute(0, 0, 0, 0, 1e12)) / 1e12
    step = compute(0, 0, 0, 0, 0)
    key = (compute(0, 0, 0, 1e9, 0) - step) / 1e9
    return PhaseCosts((0, token, 0, row, 0, pair), (step, 0, 0, 0, key, 0), overlapped=True)  # fmt: skip


def simulated(
    word: str, load: Sequence[ClusterRequest], costs: PhaseCosts, tokens: int
) -> list[RequestOutcome]:
    """Simulate ``load`` on one engine with a cache of so many ``tokens``. ``word``: a quota, or a scheduling policy for
    one process.
    """

    def curve(step: ScheduledStep) -> float:
        return costs.seconds(costs.demand(work_of(step)), 1.0)

    one = word in CHUNKED
    policy = policy_of(word if one else "exact-fill")
    scheduler = Scheduler(BlockPool(tokens // BLOCK, BLOCK), BUDGET, LIMIT, policy)
    phases = None if one else SimulatedPhases(costs, quota_of(word))
    engine = SimulatedEngine("engine", scheduler, curve, phases=phases)
    return simulate_cluster([engine], load)


def simulation(
    seeds: int, stages: Sequence[Stage], only: str, old: dict[str, Any]
) -> dict[str, Any]:
    """Compare all ways on simulated loads; return the mean figures of each for every pair of limits. ``only``: simulate
    the ways whose names begin so; the figures of the others, which are the same every time, are taken from ``old``.
    """
    price = EnginePrice(load_model("llama3-8b").shape, load_cluster("h100", 1).machine())  # fmt: skip
    costs, said = roofline(price), dict[str, Any]()
    rows: dict[Limits, dict[str, list[dict[str, float]]]] = {}
    for seed in range(1, seeds + 1):  # the controllers were tuned with seed 0
        load = drifting_load(stages, seed, 256)

        def run(word: str) -> list[RequestOutcome]:
            return simulated(word, load, costs, price.cache_tokens)  # noqa: B023

        wanted = [w for w in (*CHUNKED[1:], *FIXED, "nexus") if w.startswith(only)]
        alike = {word: run(word) for word in wanted}
        for limits in LIMITS:
            words = own_words(limits)
            own = {n: run(word) for n, word in words.items() if n.startswith(only)}
            for name, outcomes in (alike | own).items():
                every = rows.setdefault(limits, {}).setdefault(name, [])
                every.append(figures(outcomes, limits))
    for limits, ways in rows.items():
        key = f"ttft {limits.ttft} s, tpot {limits.tpot} s"
        before = old[key]["ways"] if only else {}
        means = before | {name: mean_of(each) for name, each in ways.items()}
        show(f"simulated, {limits}", means)
        said[key] = {"ways": means, "verdict": verdict(means)}
    return said


def held_out(seeds: int) -> dict[str, Any]:
    """Compare controllers with fixed quotas on the loads of :data:`DRIFTS`; return, for each drift and pair of limits,
    the share of requests within limits of each way, and the ratio of each controller's to that of the best fixed quota:
    of all, their mean and the least.
    """
    price = EnginePrice(load_model("llama3-8b").shape, load_cluster("h100", 1).machine())  # fmt: skip
    costs, loads = roofline(price), dict[str, Any]()
    ratios: dict[str, list[float]] = {name: [] for name in CONTROLLERS}
    for name, stages in DRIFTS.items():
        shares: dict[Limits, dict[str, list[float]]] = {limits: {} for limits in LIMITS}  # fmt: skip
        for seed in range(11, 11 + seeds):
            load = drifting_load(stages, seed, 256)
            alike = {w: simulated(w, load, costs, price.cache_tokens) for w in (*FIXED, "nexus")}  # fmt: skip
            for limits, ways in shares.items():
                words = own_words(limits)
                own = {n: simulated(w, load, costs, price.cache_tokens) for n, w in words.items()}  # fmt: skip
                for way, outcomes in (alike | own).items():
                    kept = figures(outcomes, limits)["within limits"]
                    ways.setdefault(way, []).append(kept)
        for limits, ways in shares.items():
            means = {way: float(np.mean(each)) for way, each in ways.items()}
            best = max(FIXED, key=means.__getitem__)
            over = {n: means[n] / max(means[best], 1e-9) for n in CONTROLLERS}
            for way, ratio in over.items():
                ratios[way].append(ratio)
            key = f"{name}, ttft {limits.ttft} s, tpot {limits.tpot} s"
            loads[key] = {
                "within limits": means,
                "best fixed quota": best,
                "over it": over,
            }
            said = ", ".join(f"{way} {ratio:.3f}" for way, ratio in over.items())
            print(f"{key}: best {best} ({means[best]:.3f}); {said}", flush=True)
    summary = {
        name: {"mean": float(np.mean(each)), "least": min(each), "at least 1": sum(x >= 1 - 1e-9 for x in each),
               "of": len(each)}
        for name, each in ratios.items()
    }  # fmt: skip
    print(json.dumps(summary, indent=1))
    return {
        "loads": loads,
        "share within limits over that of the best fixed quota": summary,
    }


def own_words(limits: Limits) -> dict[str, str]:
    """Return the quotas that know ``limits``, by name."""
    return {
        "semi-pd": f"semi-pd:{limits.ttft},{limits.tpot}",
        "nexus with limits": f"nexus:1.6,{limits.ttft},{limits.tpot}",
    }


# Measured.


def small_model() -> Transformer:
    """Return a random model of SmolLM2-135M's shape, with fewer layers and tokens."""
    shape = ModelShape(vocab=4096, layers=4, embed=576, heads=9, kv_heads=3, ffn=1536, tied=True)  # fmt: skip
    return parallelize(shape, Mesh.single(), Train(seed=1))[0]


def play(
    engine: Engine, load: Sequence[ClusterRequest], limit: float
) -> list[RequestOutcome]:
    """Send ``load`` to a real engine at its times; return the outcome of each request, in seconds of the clock. Those
    that have not ended in ``limit`` seconds have failed.
    """
    outcomes = [RequestOutcome(0.0, prompt=len(each.prompt)) for each in load]
    numbers, begun, sent = dict[Any, int](), time.perf_counter(), 0
    while (sent < len(load) or numbers) and time.perf_counter() - begun < limit:
        now = time.perf_counter() - begun
        while sent < len(load) and load[sent].time <= now:
            (generation,) = engine.submit(load[sent].prompt, load[sent].tokens, GREEDY)
            numbers[generation], outcomes[sent].began = sent, load[sent].time
            sent += 1
        if not numbers:
            time.sleep(0.001)
            continue
        for written in engine.step():
            outcome = outcomes[numbers[written.request]]
            outcome.end = time.perf_counter() - begun
            if written.token is not None:
                outcome.times.append(outcome.end)
                outcome.written += 1
            if written.finished:
                del numbers[written.request]
    for late in [*numbers.values(), *range(sent, len(load))]:
        outcomes[late].began, outcomes[late].end = load[late].time, limit
        outcomes[late].error = f"it has not ended in {limit:.0f} s"
    return outcomes


@contextmanager
def real_engine(word: str) -> Iterator[tuple[Engine, Callable[[], dict[str, float]]]]:
    """Return a context with an engine of one process or two, and a function that says what the two did. ``word``: a
    quota, or a policy for one process.
    """
    model, one = small_model(), word in CHUNKED
    shared = None if one else share_model(model)
    read_only(model)
    policy = policy_of(word if one else "exact-fill")
    engine = Engine(model, tokens=32768, budget=256, limit=64, policy=policy)
    phases = None if shared is None else split_engine(engine, shared, word, print)
    try:
        engine.submit([1] * 300, 4)  # what only the first pass does
        engine.run()

        def said() -> dict[str, float]:
            if phases is None:
                return {}
            return {
                "passes over prompts": phases.passes,
                "bytes of messages": phases.process.sent,
            }

        yield engine, said
    finally:
        engine.close()
        cores = tuple(range(os.cpu_count() or 1))
        apply_share(CoreShare(cores, len(cores), 1.0))


def capacity() -> tuple[float, float]:
    """Return the seconds of a prompt token in a full step, and of a step of eight texts, in one process."""
    with real_engine("exact-fill") as (engine, _):
        begun = time.perf_counter()
        for i in range(4):
            engine.submit([i + 2] * 250, 1)
        engine.run()
        token = (time.perf_counter() - begun) / 1000
        engine.submit([1] * 20, 1)
        for i in range(8):
            engine.submit([i + 2] * 30, 16)
        engine.step()
        begun, steps = time.perf_counter(), 0
        while engine.scheduler.running:
            engine.step()
            steps += 1
        return token, (time.perf_counter() - begun) / steps


def measured(rounds: int, minutes: float) -> dict[str, Any]:
    """Compare all ways on this machine, which take turns, with rates and limits by what it can do, in about so many
    ``minutes``.
    """
    torch.set_num_threads(os.cpu_count() or 1)
    token, step = capacity()
    print(f"{token:.5f} s per prompt token, {step:.4f} s per step", flush=True)
    # at two fifths of what one process can do, for so many requests that means say something
    long, short = (
        0.4 / (prompt * token + answer * step / texts)
        for prompt, answer, texts in ((300, 8, 4), (30, 30, 6))
    )
    words = {word: word for word in (CHUNKED[0], *MEASURED_FIXED, "nexus")}
    turn = max(12.0, 60 * minutes / (rounds * (len(words) + 1)) - BETWEEN_S)
    stages = (Stage(300, 8, long, turn / 4), Stage(30, 30, short, turn / 4)) * 2
    limits = Limits(6 * 300 * token, 3 * step)
    words["semi-pd"] = f"semi-pd:{limits.ttft:.3f},{limits.tpot:.4f}"
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in words}
    before = os.getloadavg()
    for number in range(rounds):
        load = drifting_load(stages, 10 + number, 4096)
        for name, word in words.items():
            with real_engine(word) as (engine, said):
                row = figures(play(engine, load, 1.5 * turn), limits) | said()
            rows[name].append(row)
            print(f"{time.perf_counter():.0f} s", flush=True)
            show(f"round {number}", {name: row})
    means = {name: mean_of(each) for name, each in rows.items()}
    show(f"measured, {limits}", means)
    return {
        "limits": limits._asdict(),
        "stages": [stage._asdict() for stage in stages[:2]],
        "seconds of a prompt token": token,
        "seconds of a step of 8 texts": step,
        "load of the machine before and after": [before, os.getloadavg()],
        "rounds": rounds,
        "ways": means,
        "every round": rows,
        "verdict": verdict(means),
    }


def mean_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each figure."""
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def show(name: str, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{name}")
    for way, row in rows.items():
        print(f"{way:>12}  " + "  ".join(f"{k} {v:.4g}" for k, v in row.items()))


def verdict(rows: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return how controllers compare with the best fixed quota, and with one process."""

    def goodput(word: str) -> float:
        return rows[word]["goodput"]

    best = max((word for word in FIXED if word in rows), key=goodput)
    one = max((word for word in CHUNKED if word in rows), key=goodput)
    compared: dict[str, Any] = {"best fixed quota": best, "best of one process": one}
    for name in (name for name in CONTROLLERS if name in rows):
        compared |= {
            f"{name}: goodput over the best fixed quota": goodput(name) / max(goodput(best), 1e-9),
            f"{name}: goodput over one process": goodput(name) / max(goodput(one), 1e-9),
            f"{name}: p99 inter-token time over one process": rows[name]["p99_itl_ms"] / rows[one]["p99_itl_ms"],
        }  # fmt: skip
    return compared


def main(
    seeds: Annotated[int, typer.Option(min=1)] = 2,
    real: bool = False,
    held: Annotated[
        bool,
        typer.Option("--held-out", help="Simulate drifts on which nothing was tuned."),
    ] = False,
    rounds: Annotated[int, typer.Option(min=1)] = 1,
    minutes: Annotated[float, typer.Option(min=1)] = 4.0,
    only: Annotated[
        str, typer.Option(help="Beginning of the names of the ways that are simulated.")
    ] = "",
    out: Path = RESULTS,
) -> None:
    """Compare all ways, and write the figures."""
    said: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if held:
        said["held out"] = held_out(seeds)
    elif real:
        said["real"] = measured(rounds, minutes)
    else:
        said["simulated"] = simulation(seeds, STAGES, only, said.get("simulated", {}))
    out.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
