"""Policies for pipelines, scored on the simulator: write a function, learn how good it is over many scenarios.

A policy looks at a :class:`Scenario` and answers with a :class:`Proposal`: how many layers each stage gets, and the
table that the ranks run. People or programs can search for better ones; nothing has to run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, inf, log
from statistics import fmean
from typing import Any

from weft.errors import WeftError
from weft.schedule.actions import Action, Table, Value
from weft.schedule.build import build
from weft.schedule.partition import partition
from weft.schedule.simulate import Costs, simulate


@dataclass(frozen=True)
class Scenario:
    """``ranks`` devices in a line with ``speeds`` (1 is usual), ``layers`` alike and two ends.

    Times are in units of one layer's forward for one microbatch; a backward is an ``input`` and a ``weight`` gradient.
    ``embedding`` and ``head`` are forwards of the ends, ``move`` is a hop between ranks. ``memory``: layers times
    microbatches whose activations a rank can hold.
    """

    name: str
    ranks: int
    layers: int
    microbatches: int
    input: float = 1.0
    weight: float = 1.0
    embedding: float = 0.0
    head: float = 0.0
    move: float = 0.0
    speeds: tuple[float, ...] = ()
    memory: float = inf

    def speed(self, rank: int) -> float:
        return self.speeds[rank] if self.speeds else 1.0

    @property
    def ideal(self) -> float:
        """Time of the work alone, shared by all devices as they can."""
        work = (
            (1 + self.input + self.weight)
            * (self.layers + self.embedding + self.head)
            * self.microbatches
        )
        return work / sum(self.speed(rank) for rank in range(self.ranks))


@dataclass(frozen=True)
class Proposal:
    """``layers[s]``: of stage ``s``; ``table``: what the ranks run, with as many stages."""

    layers: tuple[int, ...]
    table: Table


Policy = Callable[[Scenario], Proposal]


@dataclass(frozen=True)
class Score:
    """``slower``: time over :attr:`Scenario.ideal`; ``peak``: layers times microbatches held on the fullest rank.

    A proposal that does not fit, or cannot run, is infinitely slow, for the ``reason`` given.
    """

    scenario: str
    slower: float
    peak: float
    reason: str = ""


def run(scenario: Scenario, proposal: Proposal) -> Score:
    """Simulate one proposal."""
    counts, table = proposal.layers, proposal.table
    if len(counts) != table.stages or sum(counts) != scenario.layers or min(counts) < 0:
        return Score(
            scenario.name,
            inf,
            0.0,
            f"{counts} does not deal {scenario.layers} layers to {table.stages} stages",
        )
    if (
        len(table.ranks) != scenario.ranks
        or table.microbatches != scenario.microbatches
    ):
        return Score(
            scenario.name, inf, 0.0, "the table is of other ranks or microbatches"
        )
    shares = {
        "F": 1.0,
        "I": scenario.input,
        "W": scenario.weight,
        "B": scenario.input + scenario.weight,
    }

    def compute(a: Action) -> float:
        ends = scenario.embedding * (a.stage == 0) + scenario.head * (
            a.stage == table.stages - 1
        )
        return (
            shares.get(a.kind, 0.0) * (counts[a.stage] + ends) / scenario.speed(a.rank)
        )

    def size(value: Value) -> float:
        return float(counts[value.stage]) if value.name in ("saved", "tape") else 0.0

    try:
        found = simulate(
            table, Costs(compute, lambda value, source, target: scenario.move, size)
        )
    except WeftError as error:
        return Score(scenario.name, inf, 0.0, str(error))
    peak = max(found.peaks)
    if peak > scenario.memory * (1 + 1e-9):
        return Score(
            scenario.name, inf, peak, f"holds {peak:.3g} of {scenario.memory:.3g}"
        )
    return Score(scenario.name, found.makespan / scenario.ideal, peak)


def score(policy: Policy, scenarios: Sequence[Scenario]) -> list[Score]:
    """One row per scenario. A policy that raises :class:`WeftError` has failed in that scenario only."""
    rows = []
    for scenario in scenarios:
        try:
            rows.append(run(scenario, policy(scenario)))
        except WeftError as error:
            rows.append(Score(scenario.name, inf, 0.0, str(error)))
    return rows


def overall(rows: Sequence[Score]) -> float:
    """Geometric mean of ``slower``: one number to search by, infinite if any scenario fails."""
    return exp(fmean(log(row.slower) if row.slower < inf else inf for row in rows))


def scenarios() -> list[Scenario]:
    """A small grid: long and short pipelines, few and many microbatches, a heavy head, slow links, a slow rank."""
    found = []
    for ranks, rounds in product((4, 8), (1, 4)):
        kinds: dict[str, dict[str, Any]] = {
            "alike": {},
            "heavy head": {"head": 3.0, "embedding": 0.2},
            "attention": {"input": 1.5, "weight": 0.6},
            "slow links": {"move": 1.0},
            "slow rank": {
                "speeds": tuple(0.7 if rank == 1 else 1.0 for rank in range(ranks))
            },
            # 1F1B needs 4 layers for each of `ranks` microbatches
            "little memory": {"memory": 2.6 * ranks},
        }
        for kind, more in kinds.items():
            name = f"{kind}, {ranks} ranks, {rounds * ranks} microbatches"
            found.append(Scenario(name, ranks, 4 * ranks, rounds * ranks, **more))
    return found


# --- two policies to start from


def even(scenario: Scenario) -> Proposal:
    """1F1B with as many layers on every rank, whatever else there is."""
    low, more = divmod(scenario.layers, scenario.ranks)
    counts = tuple(low + (rank < more) for rank in range(scenario.ranks))
    return Proposal(counts, build("1f1b", scenario.ranks, scenario.microbatches))


def balanced(scenario: Scenario) -> Proposal:
    """The fastest of a few schedules that fits, with layers dealt by dynamic programming over time and speed."""
    work = 1 + scenario.input + scenario.weight
    options: list[tuple[float, Proposal]] = []
    for name in ("1f1b", "zb-h1", "zb-v", "v-half", "v-min", "interleaved-1f1b"):
        if name == "interleaved-1f1b" and scenario.microbatches % scenario.ranks:
            continue
        table = build(name, scenario.ranks, scenario.microbatches)
        speeds = [
            scenario.speed(table.holders(stage)[0]) for stage in range(table.stages)
        ]
        costs = [
            scenario.embedding * work,
            *[work] * scenario.layers,
            scenario.head * work,
        ]
        shares = partition(costs, table.stages, speeds)
        counts = tuple(sum(0 < i <= scenario.layers for i in share) for share in shares)
        proposal = Proposal(counts, table)
        options.append((run(scenario, proposal).slower, proposal))
    return min(options, key=lambda option: option[0])[1]
