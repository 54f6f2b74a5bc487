"""Ranks the best layouts again on the schedule simulator: real tables, uneven stages, peak memory of the schedule.

A closed form ranks thousands of layouts. Here the first few are simulated (:mod:`weft.schedule.simulate`) with every
stage's own times, and ranked again. Data parallelism and the optimizer stay closed forms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from weft.errors import UsageError, WeftError
from weft.planner.cost import (
    AWAY,
    IN_PARTS,
    Cost,
    MicrobatchSeconds,
    Plan,
    builder_numbered,
    gradients,
    passes,
    rest,
    schedules,
    with_critic_step,
)
from weft.planner.layout_search import USABLE, SearchResult, at
from weft.planner.machine import Machine
from weft.planner.memory import (
    RankMemory,
    held_bytes,
    logit_bytes,
    peak_memory,
    rank_memory,
)
from weft.planner.tiers import planned_time, with_tiers
from weft.schedule.actions import Table
from weft.schedule.build import build, builder_of
from weft.schedule.exchange import Beside, with_exchanges
from weft.schedule.simulate import Costs, Simulation, simulate
from weft.schedule.stages import Stage, cut_stages, stage_costs
from weft.schedule.times import ModelTimes, Times
from weft.schedule.vocab import output_times, with_vocabulary
from weft.shapes.shape import Shape

#: How far behind the first a layout may be by closed form to be looked at, beyond the first few.
NEAR = 0.08
#: Actions (F and its backward count two) of the largest table that is simulated; more microbatches go on as they do.
LARGEST = 8000
#: Actions that are simulated altogether: about a second's worth.
BUDGET = 50_000
#: So many are looked at even if they are far behind.
SHOWN = 5
#: Layouts that agree in these differ little: the best of them stands for all.
FAMILY = (
    "tp",
    "pp",
    "schedule",
    "virtual",
    "recompute",
    "zero",
    "ep",
    "secondary",
    *AWAY,
    *IN_PARTS,
)
#: Placing vocabulary passes takes time with the square of their number.
VOCABULARY = 150


@dataclass(frozen=True)
class Final:
    """One of the best layouts of a search, after the simulation of its pipeline.

    Attributes:
        ``shape``, ``machine``, ``plan``: the model, the machine and the layout.
        ``cost``: seconds of a step by cause.
        ``ranks``: memory of every pipeline rank; of the fullest rank only, if nothing was simulated.
        ``closed``: seconds of a step as formulas give them, without simulation.
        ``stages``: the pipeline's stages with their layers.
        ``barriers``: how often all pipeline ranks wait for each other in a microbatch, if embedding and output layer
            are cut over these ranks; 0 if they are not cut.
        ``simulation``: the simulated schedule of the first microbatches (all, if they are few); None without a
            pipeline.
        ``order``: the layout's axes from the slowest links to the fastest, as ``layout.order``; empty: the usual order.
    """

    shape: Shape
    machine: Machine
    plan: Plan
    cost: Cost
    ranks: tuple[RankMemory, ...]
    closed: float
    stages: tuple[Stage, ...] = ()
    barriers: int = 0
    simulation: Simulation | None = None
    order: str = ""

    @cached_property
    def seconds(self) -> float:
        return float(self.cost.total)

    @cached_property
    def memory(self) -> RankMemory:
        """Memory of the fullest rank, by purpose, in bytes."""
        return max(self.ranks, key=lambda memory: float(memory.total))

    def layers(self, rank: int) -> int:
        """Return the number of model layers that the pipeline rank ``rank`` holds."""
        return (
            sum(len(stage.layers) for stage in self.held(rank))
            if self.simulation
            else int(self.shape.layers)
        )

    def held(self, rank: int) -> list[Stage]:
        """Return the pipeline stages that the pipeline rank ``rank`` holds; empty if nothing was simulated."""
        return (
            [self.stages[s] for s in self.simulation.table.held(rank)]
            if self.simulation
            else []
        )

    @property
    def gib(self) -> float:
        return float(self.memory.total) / 2**30

    @property
    def tokens_per_s(self) -> float:
        return float(self.plan.batch * self.plan.seq) / self.seconds

    @property
    def utilisation(self) -> float:
        """Model flops utilisation (MFU): flops of the model per second over the peak of all devices.

        The peak is that of matrix products in the chosen precision.
        """
        flops = self.shape.flops_per_token(self.plan.seq) * self.tokens_per_s
        return float(flops / (self.plan.world * self.machine.peak))

    @property
    def fits(self) -> bool:
        return float(self.memory.total) <= self.machine.memory * USABLE


def finalists(
    searched: SearchResult, count: int = 10, vocabulary: bool = False
) -> list[Final]:
    """Simulate the fastest ``count`` layouts of a search that fit in memory, and return them by simulated time.

    The fastest comes first. If none of these layouts has a certain pipeline schedule, the best layout with that
    schedule is simulated too, provided that its time is close. Layouts that the user's recipe refuses are left out;
    :class:`UsageError` if it refuses all. ``vocabulary``: whether the program can cut embedding
    and output layer over all ranks of a pipeline (Yeung et al. 2024). ``searched``: the result of the search.
    """
    searched = searched.for_purpose("the fastest layouts", first=True)
    total = np.asarray(searched.cost.total)
    columns = np.stack([getattr(searched.plans, name) for name in FAMILY])
    # One of each family, and of every schedule that is near: closed forms err, and not for all schedules alike.
    families: dict[tuple[float, ...], int] = {}
    first_seconds = np.inf
    for i in searched.order.tolist():
        if len(families) >= count and total[i] > (1 + NEAR) * first_seconds:
            break
        if tuple(columns[:, i]) not in families and searched.takes(i):
            families[tuple(columns[:, i])] = int(i)
            first_seconds = min(first_seconds, total[i])
    members = list(families.values())
    if not members:
        raise UsageError(searched.none_taken())
    schedules = {
        float(columns[FAMILY.index("schedule"), i]): i for i in reversed(members)
    }
    near = [i for i in schedules.values() if total[i] <= (1 + NEAR) * first_seconds]
    chosen = members[:count] + [
        i for i in members if i in near and i not in members[:count]
    ]
    tables: dict[Any, Table] = {}
    finals, spent = list[Final](), 0
    ratios: dict[float, list[float]] = {}  # by schedule: simulated over closed form
    large = {
        i: 2 * searched.plan(i).pp ** 2 * chunks_of(searched.plan(i)) > LARGEST
        for i in chosen
    }
    for i in sorted(chosen, key=lambda i: large[i]):
        plan, closed = searched.plan(i), searched.seconds(i)
        first = min((final.seconds for final in finals), default=closed)
        # A large table takes long: it is worth it if the layout may win by a percent.
        known = ratios.get(plan.schedule, [1.0])
        hopeless = (
            closed * max(known) > 0.99 * first
            if large[i]
            else closed * min(known) > (1 + NEAR) * first
        )
        enough = len(finals) >= min(count, SHOWN)
        if finals and (spent > BUDGET or (hopeless and (large[i] or enough))):
            continue
        if final := refine(searched, plan, closed, 0, tables):
            finals.append(final)
            ratios.setdefault(plan.schedule, []).append(final.seconds / closed)
            spent += (
                sum(map(len, final.simulation.table.ranks)) if final.simulation else 0
            )
    best = sorted(finals, key=lambda final: final.seconds)[:3]
    for final in best if vocabulary else ():
        cut = (
            refine(searched, final.plan, final.closed, 1, tables)
            if final.plan.pp > 1 and not searched.refusal(final.plan, 1)
            else None
        )
        finals += [cut] if cut else []
    # no table of these schedules can be built: closed forms are all there is
    if not finals:
        i = members[0]
        finals = [Final(searched.shape, searched.machine, searched.plan(i), at(searched.cost, i),
                        (at(searched.memory, i),),
                        searched.seconds(i))]  # fmt: skip
    fit = [final for final in finals if final.fits] or finals
    return sorted(fit, key=lambda final: final.seconds)


def chunks_of(plan: Plan) -> int:
    """Return the number of pipeline stages that each rank computes for a microbatch."""
    builder = builder_numbered(plan.schedule)
    return int(plan.virtual) if builder.free else builder.chunks


def refine(
    searched: SearchResult, plan: Plan, closed: float, barriers: int = 0, tables: dict[Any, Table] | None = None,
    beside: Beside | None = None,
) -> Final | None:  # fmt: skip
    """Simulate the pipeline of one ``plan``; return None if the schedule cannot be built or run.

    ``searched``: the search to which the plan belongs. ``closed``: seconds of the step as formulas give them.
    ``barriers``: how often all pipeline ranks wait for each other in a microbatch, if embedding and output layer are
    cut over these ranks; else 0. ``tables``: schedule tables built before, to be reused.

    ``beside``: what a rank computes while tokens travel to experts on other ranks. If it is given, the schedule has an
    action of its own for each such exchange. If it is None, the time of the exchange counts as time of its layer.
    """
    shape, machine, engine = searched.shape, searched.machine, searched.engine
    if plan.pp == 1 and beside is None:
        cost, memory = (
            planned_time(shape, machine, plan, engine),
            peak_memory(shape, plan, engine),
        )
        return Final(shape, machine, plan, at(cost, 0), (at(memory, 0),), closed)
    microbatch = at(passes(shape, machine, plan, engine), 0)
    m, p, virtual = int(plan.microbatches), int(plan.pp), int(plan.virtual)
    name, chunks = (
        schedules()[int(plan.schedule)] if p > 1 else "gpipe",
        chunks_of(plan),
    )
    look_up = (
        (microbatch.forward + microbatch.backward)
        * 4
        * shape.embed
        / shape.active_weights
    )
    most = (
        VOCABULARY // p
        if barriers
        else LARGEST // (2 * p * chunks)
        if beside is None
        else 4 * p
    )
    shown = min(m, max(p, most // p * p))
    if barriers and shown * p > VOCABULARY:
        return None
    known, runs = {} if tables is None else tables, []
    try:
        layer = microbatch.forward + microbatch.backward + microbatch.again
        stages = cut_stages(
            int(shape.layers),
            p * chunks,
            layer,
            look_up,
            microbatch.head,
            ends=not barriers,
        )
        costs = _costs(
            searched, plan, microbatch, look_up, stages, barriers, beside is not None
        )
        for size in (
            {shown: 0} if shown == m else {shown: 0, max(p, shown // 2 // p * p): 0}
        ):
            key = (name, p, size, virtual, barriers, stages if barriers else None)
            if key not in known:
                table = build(name, p, size, virtual if builder_of(name).free else None)
                known[key] = (
                    with_vocabulary(table, barriers, costs.compute)
                    if barriers
                    else table
                )
            table = known[key]
            if beside is not None:
                table = with_exchanges(
                    table, [len(stage.layers) for stage in stages], beside
                )
            runs.append(simulate(table, costs))
    except WeftError:
        return None
    return _final(
        searched, plan, closed, barriers, microbatch, stages, runs, known[key]
    )


def _costs(
    searched: SearchResult,
    plan: Plan,
    microbatch: MicrobatchSeconds,
    look_up: float,
    stages: Sequence[Stage],
    barriers: int,
    apart: bool,
) -> Costs:
    """Return the seconds of every action, and the bytes kept. ``apart``: each layer's exchanges are separate
    actions.
    """
    exposed = microbatch.tp + microbatch.cp + microbatch.ep * (not apart)
    kept, routed = (
        float(held_bytes(searched.shape, plan, searched.engine)),
        float(searched.shape.expert_share(plan.seq)),
    )
    times = []
    for s, stage in enumerate(stages):
        layers = len(stage.layers)
        # Output layer and loss make all their gradients with the loss, in forward, as Weft does.
        ends = stage.embedding * look_up / 3 + stage.head * microbatch.head
        forward = (
            layers * (microbatch.forward + exposed) + ends + microbatch.hop * (s > 0)
        )
        back = (
            layers
            * (
                microbatch.backward
                + microbatch.again
                + (microbatch.count - 1) * exposed
            )
            + stage.embedding * look_up / 1.5
        )
        weight = layers * microbatch.weight
        half = layers * microbatch.ep / 2
        back += microbatch.hop * (s < len(stages) - 1)
        times.append(
            Times(
                forward,
                back - weight,
                weight,
                0.0,
                half,
                half,
                microbatch.count - 1,
                routed,
            )
        )
    if apart:
        times = [
            time.scaled(1 / len(s.layers))
            for time, s in zip(times, stages, strict=True)
            for _ in s.layers
        ]
        stages = [Stage(range(1))] * len(times)
    ends_cut = (
        Times(look_up / 3, 0.0, look_up / 1.5),
        output_times(microbatch.head / 3, barriers),
    )
    return stage_costs(
        ModelTimes(times, *ends_cut, int(plan.pp)), stages, kept, microbatch.hop
    )


def _final(
    searched: SearchResult, plan: Plan, closed: float, barriers: int, microbatch: MicrobatchSeconds,
    stages: Sequence[Stage], runs: list[Simulation], table: Table,
) -> Final:  # fmt: skip
    """Build the final of a simulated plan. ``table``: one of the tables that ran, as it was built."""
    shape, machine, engine = searched.shape, searched.machine, searched.engine
    run, m = runs[0], float(plan.microbatches)
    size = run.table.microbatches
    # Beyond what was simulated every microbatch takes as long as those before, and never less than a rank's work.
    busiest = int(np.argmax(run.busy))
    each = run.busy[busiest] / size
    if len(runs) > 1 and (step := size - runs[1].table.microbatches):
        each = max(each, (run.makespan - runs[1].makespan) / step)
    span = run.makespan + (m - size) * each
    # Of the busiest rank: what it does in a microbatch, by cause.
    numbers = [table.held(r) for r in range(len(run.timeline))]
    held = [stages[s] for s in numbers[busiest]]
    # each flow has half of the microbatches
    share = 0.5 if builder_numbered(plan.schedule).twice else 1.0
    layers = share * sum(len(s.layers) for s in held)
    count = microbatch.count
    recompute, tp, cp, ep = (
        m * layers * x
        for x in (microbatch.again, count * microbatch.tp, count * microbatch.cp, count * microbatch.ep)
    )  # fmt: skip
    hops = m * share * sum((s > 0) + (s < len(stages) - 1) for s in numbers[busiest])
    pp = hops * microbatch.hop
    work = m * run.busy[busiest] / size
    # exchanges are not among what a rank computes: they are waited for, as far as that is seen
    if any(run.beside):
        ep = min(ep, max(span - work, 0.0))
        work += ep
    compute = work - recompute - tp - cp - ep - pp
    largest = max(sum(len(stages[s].layers) for s in here) for here in numbers)
    turn = float(layers * (microbatch.forward + microbatch.backward + microbatch.again))
    dp, optimizer = gradients(
        shape, machine, plan, engine, largest, compute + recompute + tp, turn
    )
    cost = Cost(
        compute, recompute, tp, cp, ep, pp, dp, max(span - work, 0.0), optimizer, 0.0
    )
    cost = replace(cost, other=rest(plan, engine, cost.total))
    if plan.moves:
        cost = with_tiers(
            cost, shape, machine, plan, engine, microbatch, share * largest
        )
    cost = at(with_critic_step(cost, shape, machine, plan, engine), 0)
    ranks, before = [], runs[-1].peaks
    for r, peak in enumerate(run.peaks):
        here = [stages[s] for s in numbers[r]]
        more = (
            (m - size) * (peak - before[r]) / max(1, size - runs[-1].table.microbatches)
        )
        tables = barriers * (2.0 - float(shape.tied)) / len(numbers) + sum(
            s.embedding + s.head for s in here
        )
        head = 1 / len(numbers) if barriers else float(any(s.head for s in here))
        loss = head * logit_bytes(shape, plan, engine)
        layers_here = sum(len(s.layers) for s in here)
        ranks.append(
            at(
                rank_memory(
                    shape, plan, engine, layers_here, tables, peak + more + loss, loss
                ),
                0,
            )
        )
    return Final(
        shape, machine, plan, cost, tuple(ranks), closed, tuple(stages), barriers, run
    )
