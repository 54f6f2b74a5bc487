"""A real service of several engines beside the simulated one: latencies, the choice of a placement, and deadlines.

    python bench/service_placements.py [--quick] [--only loads|placements|regret|long|sql] [--slow 1] [--seconds 48]
                                       [--rounds 1] [--match "1 prefill + 1 decode"]

Each service is `weft serve --cluster FILE`: a router and its engines, each in a process, with HTTP clients. Only the
device is emulated (`emulated_device.py`): a pass sleeps for as long as the device would take. The simulator's costs are
fitted to a real run of one engine alone, as by `weft plan --serve`. What HTTP, router and moves add is measured once,
on requests that have a service for themselves and on a load that is none of those compared: before all runs and after
them, as the machine's speed drifts, and their mean counts in the end. All else in the simulator is the product's
schedulers and policies, with the same arrivals. Results are written after every run. On a busy machine, `--slow 4`
makes device and arrivals slower, so that the processor counts less.

A 99th percentile of the first tokens of one load is its fourth or fifth longest of some 400. `--rounds 3` plays each
load three times, with other arrivals and texts, and takes figures of all requests together; beside a percentile stands
the mean of what is beyond it, which does not jump where few values lie near the percentile. `--match` plays only runs
whose name has the text, such as "session on long"; the others stay as they are in the file.
"""

import asyncio
import json
import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from service_faults import (
    Processes,
    events,
    export_tiny,
    free_port,
    metrics,
    scraped,
    until,
)
from sql_trace import TRACE, read_trace
from step import machine
from workflows import JobLoad, load_of

from weft.checkpoint.model import open_model
from weft.cluster.dispatch_policy import dispatch_policy
from weft.generate.block_pool import BlockPool
from weft.generate.engine import Engine
from weft.generate.policies import policy_of
from weft.generate.request import Request
from weft.generate.scheduler import ScheduledStep, Scheduler
from weft.generate.step_work import work_of
from weft.generate.workflow import Workflow
from weft.serve.block_link import BlockLink
from weft.serve.cluster_simulation import (
    ClusterRequest,
    Role,
    ServiceDelays,
    SimulatedEngine,
    simulate_cluster,
)
from weft.serve.load_requests import RequestOutcome, arrival_pauses, latency_statistics
from weft.serve.load_simulation import TimedRequest
from weft.serve.policy_choice import time_steps
from weft.serve.simulated_caches import SimulatedCaches

RESULTS = Path(__file__).parent / "results" / "service_placements.json"
PLUGIN = "emulated_device"
#: Of an engine: answers and tokens of a step, tokens of the cache and of a block.
LIMIT, BUDGET, CACHE, BLOCK = 8, 512, 65_536, 16
#: Milliseconds within which a request counts.
LIMITS = {"ttft": 120.0, "tpot": 32.0}
#: The token that every answer repeats, so that each has text of its own, and the ids of prompts.
LETTER, IDS = 65, (97, 122)
#: Statistics that are compared, and by how much they may differ.
COMPARED = ("mean_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "p99_itl_ms")
#: Means of the slowest hundredth of all.
TAILS = ("tail_ttft_ms", "tail_itl_ms")
ALLOWED = 0.12
#: Simulations of each run, whose means are compared. Arrivals differ by as much as those of lone requests do: where a
#: millisecond decides to which engine a request goes, p99 of 54 first tokens is then anything from 0.74 to 1.22 of its
#: mean, and of 540 from 0.95 to 1.05. So a load has some hundred requests.
SEEDS = 5
#: Tokens of the prompts whose steps are timed.
TIMED = (480, 40, 120, 240, 960, 1600)
Figures = dict[str, Any]


class Placement(NamedTuple):
    """Engines of a service: ``mixed`` ones, and those with roles. ``dispatch`` and ``policy``: words of the options;
    ``speeds``: of engines by their names, where it is not 1; ``caches``: cache engines beside them; ``room``: tokens of
    an engine's cache; ``answers``: that an engine writes at a time.
    """

    mixed: int = 0
    prefill: int = 0
    decode: int = 0
    dispatch: str = "load"
    policy: str = "exact-fill"
    speeds: Mapping[str, float] = {}
    caches: int = 0
    room: int = CACHE
    answers: int = LIMIT

    def __str__(self) -> str:
        parts = [f"{self.mixed} mixed"] * (self.mixed > 0)
        if self.prefill:
            parts.append(f"{self.prefill} prefill + {self.decode} decode")
        if self.caches:
            parts.append(f"{self.caches} cache")
        return f"{', '.join(parts)}, {self.dispatch}, {self.policy}"

    @property
    def engines(self) -> dict[str, Role]:
        """The role of each engine, by the name that the service gives it."""
        reading: list[Role] = ["prefill"] * self.prefill
        writing: list[Role] = ["decode"] * self.decode
        roles = reading + writing
        named: dict[str, Role] = {f"{r}-{roles[:i].count(r)}": r for i, r in enumerate(roles)}  # fmt: skip
        return named | {f"engine-{i}": "any" for i in range(self.mixed)}


THREE = Placement(3)
#: Among those whose goodput is compared on one load.
PLACEMENTS = (
    THREE, Placement(3, dispatch="session"), Placement(3, dispatch="cached-prefix"), Placement(3, dispatch="balanced"),
    Placement(3, policy="chunked:128"), Placement(3, policy="prompts-first"), Placement(2), Placement(1),
    Placement(0, 1, 1), Placement(0, 2, 1), Placement(0, 1, 2),
)  # fmt: skip
POLICIES = PLACEMENTS[:4]


class Lengths(NamedTuple):
    """Random requests: ``rate`` per second; mean tokens of ``prompt`` and ``answer``, which vary by a half. ``prefix``:
    tokens with which all prompts of a session begin; ``long``: tokens of one prompt in ``every``, 0: as the others;
    ``burstiness``: 1 for a Poisson process, less for bursts.
    """

    rate: float
    prompt: int
    answer: int
    prefix: int = 0
    long: int = 0
    burstiness: float = 1.0
    sessions: int = 12
    every: int = 12


LOADS = {
    "even": Lengths(9.0, 200, 32),
    "bursts": Lengths(8.0, 200, 32, burstiness=0.3),
    "sessions": Lengths(9.0, 100, 32, prefix=640),
    "long prompts": Lengths(6.0, 100, 32, long=1600),
    "long answers": Lengths(5.0, 60, 80),
}
#: Of the run with injected long prompts. Answers are so long that the gap of a move is less than one in a hundred.
INJECTED = Lengths(2.0, 64, 160, long=2000, every=3)
#: Its placements. Engines write as many answers at a time as by default, so that none has to stay where prompts are.
FOR_INJECTED = tuple(each._replace(answers=64) for each in (THREE, Placement(0, 1, 2)))


def requests_of(lengths: Lengths, seconds: float, seed: int) -> list[ClusterRequest]:
    """Return the requests of so many ``seconds``. Their workflows only name their sessions."""
    draw, count = Random(seed), max(4, round(lengths.rate * seconds))
    times = accumulate(arrival_pauses(count, lengths.rate, lengths.burstiness, seed))

    def ids(tokens: float) -> list[int]:
        return [draw.randint(*IDS) for _ in range(max(2, round(tokens)))]

    prefixes = [ids(lengths.prefix)[: lengths.prefix] for _ in range(lengths.sessions)]
    requests = []
    for number, at in enumerate(times):
        session = draw.randrange(lengths.sessions)
        tokens = lengths.prompt * draw.uniform(0.5, 1.5)
        if lengths.long and number % lengths.every == lengths.every // 2:
            tokens = lengths.long
        answer = max(2, round(lengths.answer * draw.uniform(0.5, 1.5)))
        requests.append(
            ClusterRequest(at, prefixes[session] + ids(tokens), answer, Workflow(f"{seed} {session}"))
        )  # fmt: skip
    return requests


# The real service.


@asynccontextmanager
async def service(folder: Path, placement: Placement) -> AsyncIterator[int]:
    """Run the service of ``placement``; gives its port."""
    os.environ["EMULATED_SPEEDS"] = json.dumps(placement.speeds)
    file = folder / "cluster.toml"
    file.write_text(
        f'[cluster]\nengines = {len(placement.engines) + placement.caches}\npolicy = "{placement.dispatch}"\n'
        f"roles = {{ prefill = {placement.prefill}, decode = {placement.decode}, cache = {placement.caches} }}\n"
    )
    processes, port = Processes(folder), free_port()
    processes.start(
        "service", "serve", "--checkpoint", str(folder / "tiny"), "--cluster", str(file), "--port", str(port),
        "--name", "tiny", f"--requests={placement.answers}", f"--budget={BUDGET}", f"--cache={placement.room}",
        f"--policy={placement.policy}", f"--plugin={PLUGIN}", "--drain=1",
    )  # fmt: skip

    async def joined() -> bool:
        return len(await scraped(port)) == len(placement.engines) + placement.caches

    try:
        if not await until(joined, 120):
            raise SystemExit(f"{placement}: its engines do not join; {folder}/service.log says why")  # fmt: skip
        await play(
            port, requests_of(Lengths(20.0, 30, 4), 0.6, 999)
        )  # what is slow once
        yield port
    finally:
        processes.close()


async def play(
    port: int, load: Sequence[ClusterRequest], limit: float = 600.0
) -> list[RequestOutcome]:
    """Send the requests of ``load`` at their times, or when those before them have ended. Return their outcomes, in
    seconds from the load's beginning. What has not ended ``limit`` seconds after that has failed.
    """
    begun = time.monotonic() + 0.1
    ended = [asyncio.Event() for _ in load]

    async def ask(i: int) -> RequestOutcome:
        each = load[i]
        for before in each.after:
            await ended[before].wait()
        await asyncio.sleep(max(0.0, begun + each.time - time.monotonic()))
        outcome = RequestOutcome(time.monotonic() - begun, prompt=len(each.prompt))
        body: dict[str, Any] = {
            "prompt": list(each.prompt), "max_tokens": each.tokens, "temperature": 0, "ignore_eos": True,
            "logit_bias": {LETTER: 100},
        }  # fmt: skip
        if each.workflow is not None:
            body["user"] = each.workflow.id
            if math.isfinite(each.workflow.deadline):
                body["workflow"] = each.workflow.frame(time.monotonic() - begun)
        with suppress(TimeoutError):
            async with asyncio.timeout(begun + limit - time.monotonic()):
                async for event in events(port, "completions", body):
                    if event is None or not event.get("choices"):
                        continue
                    if event["choices"][0]["text"]:
                        outcome.times.append(time.monotonic() - begun)
        outcome.written = len(outcome.times)
        outcome.end = outcome.times[-1] if outcome.times else limit
        if outcome.written != each.tokens:
            outcome.error = f"{outcome.written} of {each.tokens} tokens came"
        ended[i].set()
        return outcome

    return list(await asyncio.gather(*(ask(i) for i in range(len(load)))))


# The simulator's costs.


@dataclass
class Costs:
    """What the simulator knows of engines and service, all of it measured: ``rates`` of a step's work, and what a
    service adds. ``spread``: seconds by which requests come to their engines earlier or later than in the mean.
    """

    rates: list[float]
    delays: ServiceDelays = field(default_factory=ServiceDelays)
    link: BlockLink | None = None
    slow: float = 1.0
    spread: float = 0.0

    def seconds(self, step: ScheduledStep) -> float:
        return float(np.array(self.rates) @ np.array(work_of(step)))

    def simulated(
        self, placement: Placement, load: Sequence[ClusterRequest], seed: int = 0
    ) -> list[RequestOutcome]:
        """Return the simulated outcomes of ``load``. ``seed``: draws when engines tell the router how full they are."""
        engines = []
        for name, role in placement.engines.items():
            pool, policy = BlockPool(placement.room // BLOCK, BLOCK), policy_of(placement.policy)  # fmt: skip
            scheduler = Scheduler(pool, BUDGET, placement.answers, policy)
            curve = self._curve(placement.speeds.get(name, 1.0))
            engines.append(SimulatedEngine(name, scheduler, curve, role))
        chosen = dispatch_policy(placement.dispatch)
        caches = None
        if placement.caches and self.link is not None:
            caches = SimulatedCaches(placement.caches, 1 << 20, self.link)
        return simulate_cluster(
            engines, load, chosen, self.link, self.delays, seed, caches
        )

    def _curve(self, speed: float) -> Callable[[ScheduledStep], float]:
        return lambda step: self.seconds(step) / speed


def alone(lengths: Sequence[int], answer: int) -> list[ClusterRequest]:
    """Return requests of prompts of these ``lengths``, one after the other."""
    draw = Random(7)
    return [
        ClusterRequest(0.0, [draw.randint(*IDS) for _ in range(n)], answer, None, [i - 1] if i else [])
        for i, n in enumerate(lengths)
    ]  # fmt: skip


def fitted_rates(folder: Path, lengths: Sequence[int]) -> list[float]:
    """Time the steps of one engine alone, in this process, on prompts of these ``lengths``, and return the fitted
    rates. Lengths differ as those of the loads, so that what a text costs is not taken for what its keys cost.
    """
    __import__(PLUGIN)
    model, _, _ = open_model(str(folder / "tiny"), "cpu", print)

    def build(policy: str, budget: int) -> Engine:
        return Engine(model, CACHE, budget, LIMIT, policy_of(policy))

    timed = [TimedRequest(0.0, each.prompt, each.tokens) for each in alone(lengths, 20)]
    return [float(rate) for rate in time_steps(build, timed).rates]


async def measured_costs(folder: Path, quick: bool, slow: float) -> Costs:
    """Measure the costs of a step, and what HTTP, router and moves add to requests that have a service for
    themselves.
    """
    costs = Costs(fitted_rates(folder, TIMED[quick:]), slow=slow)
    lengths = [60, 200, 60, 200] if quick else [60, 200, 400] * 4
    load = alone(lengths, 12)
    async with service(folder, Placement(1)) as port:
        real = await play(port, load)
    simulated = costs.simulated(Placement(1), load)
    step = median(differences(real, simulated, "itl"))
    waits = differences(real, simulated, "ttft")
    wait, costs.spread = median(waits) - step, float(np.std(waits))
    step, wait = max(0.0, step), max(0.0, wait)
    # half of what a request waits for is on its way to the engine, half on the way back
    costs.delays = ServiceDelays(wait / 2, wait / 2, step)
    await measure_busy_delays(folder, quick, costs)
    moves = alone([64, 256, 480] * (1 if quick else 4), 6)
    async with service(folder, Placement(0, 1, 1)) as port:
        before = await metrics(port)
        await play(port, moves)
        after = await metrics(port)
    grown = {name: after[name] - before[name] for name in after}
    count = max(1.0, grown["answers_moved"])
    stall = grown["moved_stall_milliseconds"] / 1000 / count
    sent = grown["moved_bytes"]
    tokens = sum(len(each.prompt) for each in moves) * count / len(moves)
    costs.link = BlockLink(stall, sent / count / max(stall, 1e-4), sent / tokens)
    return costs


async def measure_busy_delays(folder: Path, quick: bool, costs: Costs) -> None:
    """Add to the delays of ``costs`` what many requests at a time add, on a load that is used for nothing else. Its
    first quarter does not count, in which the service does some things for the first time.
    """
    load = [
        each._replace(time=each.time * costs.slow)
        for each in requests_of(LOADS["even"], 3.0 if quick else 24.0, 77)
    ]
    async with service(folder, THREE) as port:
        real = await play(port, load)
    counts = range(len(load) // 4, len(load))

    def excess(metric: str) -> float:
        """By how many seconds the real values are larger in the mean."""
        asked = arrived(load, real, 0.0, 0)
        played = [costs.simulated(THREE, asked, seed) for seed in range(SEEDS)]
        more = [differences(real, each, metric) for each in played]
        return mean(each[i] for each in more for i in counts)

    ask, tell, step = costs.delays
    step = max(0.0, step + excess("itl"))
    costs.delays = ServiceDelays(ask, tell, step)
    more = excess("ttft") / 2
    costs.delays = ServiceDelays(max(0.0, ask + more), max(0.0, tell + more), step)


def between(first: Costs, second: Costs) -> Costs:
    """Return the mean of the costs that two measurements have found."""
    assert first.link is not None and second.link is not None
    rates = [mean(pair) for pair in zip(first.rates, second.rates, strict=True)]
    delays = map(mean, zip(first.delays, second.delays, strict=True))
    link = map(mean, zip(first.link, second.link, strict=True))
    spread = mean((first.spread, second.spread))
    return Costs(rates, ServiceDelays(*delays), BlockLink(*link), first.slow, spread)


def differences(
    real: Sequence[RequestOutcome], simulated: Sequence[RequestOutcome], metric: str
) -> list[float]:
    """Return by how many seconds the real values of ``metric`` are larger."""
    return [
        mean(ours.seconds[metric]) - mean(theirs.seconds[metric])
        for ours, theirs in zip(real, simulated, strict=True)
    ]


# What is compared.


class Played(NamedTuple):
    """A ``load`` and its ``real`` outcomes."""

    load: Sequence[ClusterRequest]
    real: Sequence[RequestOutcome]


def figures(rounds: Sequence[Sequence[RequestOutcome]], slow: float) -> Figures:
    """Return the latencies and the goodput of the outcomes of ``rounds``, as they would be without slowing down."""
    rounds = [
        [replace(o, began=o.began / slow, end=o.end / slow, times=[t / slow for t in o.times]) for o in each]
        for each in rounds
    ]  # fmt: skip
    seconds = sum(max(o.end for o in each) - min(o.began for o in each) for each in rounds)  # fmt: skip
    outcomes = [outcome for each in rounds for outcome in each]
    said = latency_statistics(outcomes, seconds, (50, 99), LIMITS)
    names = (*COMPARED, "mean_e2el_ms", "request_goodput", "failed")
    within = said["request_goodput"] * seconds / len(outcomes)
    tails = {name: slowest(outcomes, name.split("_")[1]) for name in TAILS}
    return {name: said[name] for name in names} | tails | {"within": within}


def slowest(outcomes: Sequence[RequestOutcome], metric: str) -> float:
    """Return the mean of the slowest hundredth of all values of ``metric``, in milliseconds."""
    values = sorted((s for each in outcomes for s in each.seconds[metric]), reverse=True)  # fmt: skip
    return 1000 * mean(values[: -(-len(values) // 100)])


def compared(costs: Costs, placement: Placement, rounds: Sequence[Played], seeds: int = SEEDS) -> Figures:  # fmt: skip
    """Return the real and the simulated figures, the ratios of the real to the simulated ones, and by which factor the
    simulated ones differ at most among simulations.
    """
    slow = costs.slow
    played = [
        figures(
            [costs.simulated(placement, arrived(*each, costs.spread, seed), seed) for each in rounds], slow
        )
        for seed in range(seeds)
    ]  # fmt: skip
    simulated = {name: mean(each[name] for each in played) for name in played[0]}
    ours = figures([each.real for each in rounds], slow)
    ratios = {name: ours[name] / simulated[name] for name in (*COMPARED, *TAILS)}
    drift = {
        name: max(each[name] for each in played) / min(each[name] for each in played)
        for name in (*COMPARED, *TAILS)
    }
    return {
        "real": ours,
        "simulated": simulated,
        "real over simulated": ratios,
        "among simulations": drift,
    }


def arrived(
    load: Sequence[ClusterRequest], real: Sequence[RequestOutcome], spread: float, seed: int
) -> list[ClusterRequest]:  # fmt: skip
    """Return ``load`` with the times at which clients have really sent its requests, moved by up to ``spread`` s."""
    draw = Random(seed)
    return [
        each if each.after else each._replace(time=max(0.0, outcome.began + spread * draw.uniform(-1, 1)))
        for each, outcome in zip(load, real, strict=True)
    ]  # fmt: skip


def rank(row: Figures) -> tuple[float, float]:
    """Return what orders runs: the smallest is the best."""
    return -row["within"], row["mean_e2el_ms"]


def chosen(rows: Mapping[str, Figures]) -> Figures:
    """Return which of ``rows`` the simulator chooses, and how far the real goodput of that is below the best."""
    choice = min(rows, key=lambda name: rank(rows[name]["simulated"]))
    best = min(rows, key=lambda name: rank(rows[name]["real"]))
    top = rows[best]["real"]["within"]
    regrets = {name: 1 - row["real"]["within"] / top if top else 0.0 for name, row in rows.items()}  # fmt: skip
    return {"chosen": choice, "best": best, "regret": regrets[choice], "regret of each": regrets}  # fmt: skip


class Run(NamedTuple):
    """The ``rounds`` of the load called ``name`` on the service of ``placement``."""

    name: str
    placement: Placement
    rounds: Sequence[Played]


class Trial:
    """All parts, whose results are written to ``out`` after every run."""

    def __init__(
        self, folder: Path, out: Path, quick: bool, only: str, slow: float, seconds: float, rounds: int,
        match: Sequence[str],
    ) -> None:  # fmt: skip
        self.folder, self.out, self.quick, self.only = folder, out, quick, only
        self.slow, self.length, self.rounds, self.match = slow, seconds, rounds, match
        self.began = time.monotonic()
        old = json.loads(out.read_text()) if only and out.exists() else {}
        self.record: Figures = old | {"machine": machine(), "quick": quick, "limits": LIMITS, "slow": slow}  # fmt: skip
        self.played: list[Run] = []
        self.runs: dict[str, dict[str, Figures]] = defaultdict(dict)
        self.costs = Costs([])

    def say(self, line: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {line}", flush=True)

    def write(self) -> None:
        self.out.write_text(json.dumps(self.record, indent=1) + "\n")

    async def run(self) -> None:
        self.costs = await measured_costs(self.folder, self.quick, self.slow)
        self._note_costs("costs before")
        if self.only != "sql":
            await self._loads()
            self.costs = between(self.costs, await measured_costs(self.folder, self.quick, self.slow))  # fmt: skip
            self._note_costs("costs")
            for run in self.played:
                self._compare(run)
        if self.only in ("", "sql"):
            await self._deadlines()
        self.record["seconds"] = time.monotonic() - self.began
        self.write()

    def _note_costs(self, name: str) -> None:
        assert self.costs.link is not None
        self.record[name] = {
            "rates": self.costs.rates,
            "delays": self.costs.delays._asdict(),
            "link": self.costs.link._asdict(),
            "spread": self.costs.spread,
        }
        self.write()
        self.say(f"{name}: {self.record[name]}")

    async def _loads(self) -> None:
        """Play each placement's loads on its service."""
        main, short = (5.0, 3.0) if self.quick else (self.length, self.length)
        placements = PLACEMENTS if not self.quick else (THREE, PLACEMENTS[-1])

        def loads_of(lengths: Lengths, seconds: float, seed: int) -> list[list[ClusterRequest]]:  # fmt: skip
            rounds = (requests_of(lengths, seconds, seed + 1000 * i) for i in range(self.rounds))  # fmt: skip
            return [[r._replace(time=r.time * self.slow) for r in each] for each in rounds]  # fmt: skip

        loads = {"placements": loads_of(LOADS["even"], main, 1)}
        loads |= {name: loads_of(each, short, 100 + i) for i, (name, each) in enumerate(LOADS.items())}  # fmt: skip
        injected = loads_of(INJECTED, 2 * main, 5)
        for placement in placements:
            wanted = ["placements"] if self.only in ("", "loads", "placements") else []
            if placement in POLICIES and self.only in ("", "loads", "regret"):
                wanted += LOADS if not self.quick else []
            await self._play(placement, {name: loads[name] for name in wanted})
        if self.only in ("", "loads", "long"):
            for placement in FOR_INJECTED:
                await self._play(placement, {"injected": injected})

    async def _play(self, placement: Placement, loads: Mapping[str, list[list[ClusterRequest]]]) -> None:  # fmt: skip
        """Play ``loads``, each a list of rounds, one after the other on a service of ``placement``."""
        loads = {name: rounds for name, rounds in loads.items() if self._matches(f"{placement} on {name}")}  # fmt: skip
        if not loads:
            return
        async with service(self.folder, placement) as port:
            for name, rounds in loads.items():
                played = [Played(load, await play(port, load)) for load in rounds]
                self.played.append(Run(name, placement, played))
                self._compare(self.played[-1], 1)

    def _matches(self, name: str) -> bool:
        return not self.match or any(text in name for text in self.match)

    def _compare(self, run: Run, seeds: int = SEEDS) -> None:
        """Compare what was played with so many simulations of it."""
        name, placement, rounds = run
        row = compared(self.costs, placement, rounds, seeds)
        self.runs[name][str(placement)] = row
        self._conclude()
        said = row["real over simulated"].items()
        ratios = ", ".join(f"{key} {value:.2f}" for key, value in said)
        self.say(f"{placement} on {name}: {row['real']['within']:.0%} within limits, {ratios}")  # fmt: skip

    def _conclude(self) -> None:
        """Write what follows from the runs so far."""
        record = self.record
        runs: dict[str, dict[str, Figures]] = record.setdefault("runs", {})
        for name, rows in self.runs.items():
            runs[name] = runs.get(name, {}) | rows
        every = [row["real over simulated"] for each in runs.values() for row in each.values()]  # fmt: skip
        worst = {name: max(abs(row[name] - 1) for row in every) for name in COMPARED}
        record["worst difference"] = worst
        farthest = [max(abs(row[name] - 1) for name in COMPARED) for row in every]
        record["runs within 12 %"] = sum(far <= ALLOWED for far in farthest)
        record["number of runs"] = len(every)
        if "placements" in runs:
            record["placement"] = chosen(runs["placements"])
        regrets = {name: chosen(runs[name]) for name in LOADS if name in runs}
        if regrets:
            record["regret"] = regrets
        if len(both := list(runs.get("injected", {}).values())) == 2:
            record["long prompts"] = {
                kind: both[1][kind]["p99_itl_ms"] / both[0][kind]["p99_itl_ms"]
                for kind in ("real", "simulated")
            }
        self.write()

    async def _deadlines(self) -> None:
        """Play the agents' trace at 0.9 of the highest load, with and without urgency."""
        jobs = read_trace(TRACE)[: 12 if self.quick else 150]
        for job in jobs:  # a quarter as long, so that a run is short
            for stage in job["stages"]:
                stage["calls"] = [[max(4, n // 4) for n in call] for call in stage["calls"]]  # fmt: skip
        ways = {"first come": THREE, "urgency": THREE._replace(policy="urgency")}
        rate = 0.9 * self._capacity(jobs, ways["first come"])
        load = load_of(jobs, rate, *self._per_token())
        table: Figures = {"jobs": len(jobs), "jobs per second": rate}
        for name, way in ways.items():
            simulated = self.costs.simulated(way, load.requests)
            async with service(self.folder, way) as port:
                real = await play(port, load.requests)
            row = compared(self.costs, way, [Played(load.requests, real)])
            table[name] = {"real": met(load, real), "simulated": met(load, simulated),
                           **row["real over simulated"]}  # fmt: skip
            self.record["deadlines"] = table
            self.write()
            shares = ", ".join(f"{kind} {table[name][kind]:.3f}" for kind in ("real", "simulated"))  # fmt: skip
            self.say(f"{name}: deadlines that are met: {shares}")
        first, urgent = table["first come"], table["urgency"]
        table["gain"] = {kind: urgent[kind] / first[kind] - 1 for kind in ("real", "simulated")}  # fmt: skip
        self.say(f"urgency meets more deadlines: {table['gain']}")

    def _per_token(self) -> tuple[float, float]:
        """Seconds of a prompt's token and of a written one, of a request alone."""
        step = ScheduledStep({Request([0] * 400, 400): 400}, [])
        last = ScheduledStep({Request([0] * 400, 400, computed=399): 1}, [])
        return self.costs.seconds(step) / 400, self.costs.seconds(last)

    def _capacity(self, jobs: list[Figures], way: Placement) -> float:
        """The jobs per second that the engines end at most, as `workflows.py` counts them."""
        load = load_of(jobs, 1e9)
        outcomes = self.costs.simulated(way, load.requests)
        times = np.sort(np.concatenate([outcome.times for outcome in outcomes]))
        half = len(times) // 2
        return float(half / times[half] / (len(times) / len(jobs)))


def met(load: JobLoad, outcomes: Sequence[RequestOutcome]) -> float:
    """Return the share of the jobs that end by their deadline."""
    ends = [max(outcomes[i].end for i in last) for last in load.last]
    return float(np.mean(np.array(ends) <= np.array(load.deadlines)))


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Less of all, in a minute.")] = False,
    only: Annotated[str, typer.Option(help="loads (all but sql), placements, regret, long or sql.")] = "",
    slow: Annotated[float, typer.Option(min=1.0, help="By how much device and arrivals are slower.")] = 1.0,
    seconds: Annotated[float, typer.Option(min=6.0, help="Of each load.")] = 48.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each load is played, each time another one.")] = 1,
    match: Annotated[list[str] | None, typer.Option(help="Only runs with this name; may be repeated.")] = None,
    out: Path = RESULTS,
) -> None:  # fmt: skip
    """Run all parts, or one."""
    os.environ["EMULATED_SLOW"] = str(slow)
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    with tempfile.TemporaryDirectory() as name:
        export_tiny(Path(name))
        asyncio.run(Trial(Path(name), out, quick, only, slow, seconds, rounds, match or []).run())  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
