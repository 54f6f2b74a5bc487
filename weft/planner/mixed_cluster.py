"""Pipelines over groups of devices that differ in kind or in network: stages sized by speed, replicas inside groups.

As in Holmes (Yang et al. 2024, 2312.03549): a pipeline crosses groups, because it sends little; gradients stay among
devices with one kind of network card; and each stage gets layers in proportion to the speed of its group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from weft.errors import WeftError
from weft.planner.cost import Plan, builder_numbered, schedules, step_time
from weft.planner.engine_constants import EngineConstants
from weft.planner.finalists import chunks_of
from weft.planner.group_speed import (
    GroupSpeed,
    group_speeds,
    machine_of_group,
    node_size,
)
from weft.planner.layout_search import SearchResult, describe
from weft.planner.machine import Cluster, Group, Machine
from weft.planner.placed_pipeline import PlacedPipeline
from weft.schedule.build import build, builder_of
from weft.schedule.partition import partition
from weft.schedule.stages import Stage
from weft.shapes.shape import Shape

#: Layouts that are simulated, those with the best closed form first, and orders of groups that are tried for each.
SIMULATED, ORDERS = 8, 6
#: Actions of the largest table that is simulated.
LARGEST = 2000


@dataclass(frozen=True)
class MixedPlan:
    """A pipeline whose ranks are in different groups of a mixed cluster; a group has devices of one kind.

    Attributes:
        ``plan``: the layout. ``groups``: the group of each pipeline rank. ``layers``: number of layers of each pipeline
            rank.
        ``seconds``: seconds of a step. ``even``: seconds of a step if every stage had equally many layers; infinite if
            such stages do not fit in memory.
        ``gib``: GiB of memory on the fullest rank.
    """

    plan: Plan
    groups: tuple[Group, ...]
    layers: tuple[int, ...]
    seconds: float
    even: float
    gib: float

    def lines(self, lockstep: float) -> Iterator[str]:
        """Yield lines that describe the plan, and compare its time with those of simpler plans.

        ``lockstep``: seconds of a step of the best layout that treats every device as the weakest one.
        """
        places = ", ".join(
            f"{group.title} {count}"
            for group, count in zip(self.groups, self.layers, strict=True)
        )
        yield f"{describe(self.plan)}: {self.seconds:.3g} s; layers by pipeline rank: {places}; {self.gib:.3g} GiB"
        even = (
            "do not fit"
            if self.even == float("inf")
            else f"take {self.even / self.seconds - 1:+.1%} time"
        )
        yield f"equal stages {even}; in step with the weakest device and link: {lockstep / self.seconds - 1:+.1%}"

    def record(self) -> dict[str, Any]:
        """Return the plan as JSON: layout, groups and layers by pipeline rank, seconds of a step, and GiB."""
        return {
            "layout": describe(self.plan),
            "groups": [group.title for group in self.groups],
            "layers": self.layers,
            "seconds": self.seconds,
            "even_seconds": None if self.even == float("inf") else self.even,
            "gib": self.gib,
        }


class _StepOverGroups(NamedTuple):
    """Seconds of a simulated step, layers by pipeline rank, and GiB of the fullest rank."""

    seconds: float
    layers: list[int]
    gib: float


def mixed_plans(searched: SearchResult, cluster: Cluster, bits: int) -> list[MixedPlan]:
    """Return the best pipelines over the groups of ``cluster``, fastest first; empty if no pipeline fits them.

    Every pipeline rank and all its replicas lie inside one group. ``searched``: a search in which all devices count as
    the weakest one; its layouts are tried. ``bits``: width of the operands of products.
    """
    searched = searched.for_purpose("pipelines over groups")
    shape, engine, plans = searched.shape, searched.engine, searched.plans
    machines = [machine_of_group(cluster, group, bits) for group in cluster.groups]
    ranks = plans.world / plans.pp
    usable = (plans.pp > 1) & ~np.asarray(plans.moves)
    for group in cluster.groups:
        usable &= group.count % ranks == 0
    usable &= plans.pp >= len(cluster.groups)
    chosen = np.flatnonzero(usable)
    if not len(chosen):
        return []
    part = _taken(plans, chosen)
    score = _closed(shape, part, engine, machines, cluster.groups)
    pipelines: list[MixedPlan] = []
    kinds = set[tuple[float, ...]]()
    for i in np.argsort(score, kind="stable"):
        plan = searched.plan(int(chosen[i]))
        # a rank that serves both directions holds two parts of the model
        if builder_numbered(plan.schedule).twice:
            continue
        kind = (plan.tp, plan.pp, plan.schedule, plan.virtual, plan.recompute)
        if kind in kinds:
            continue
        # to ask takes a millisecond, and to simulate a hundred
        if not searched.takes(int(chosen[i])):
            continue
        best = _best_order(shape, engine, cluster, plan, machines)
        if best is not None:
            kinds.add(kind)
            pipelines.append(best)
        if len(pipelines) == SIMULATED:
            break
    return sorted(pipelines, key=lambda mixed: mixed.seconds)


def _taken(plans: Plan, index: np.ndarray) -> Plan:
    columns = {
        name: np.broadcast_to(value, np.shape(plans.tp))[index]
        for name, value in vars(plans).items()
    }
    return Plan(**columns)


def _closed(
    shape: Shape,
    plans: Plan,
    engine: EngineConstants,
    machines: Sequence[Machine],
    groups: Sequence[Group],
) -> np.ndarray:
    """Return a rough step time of each plan with layers in proportion to speeds: the mean rate of all groups."""
    rate = np.zeros(np.shape(plans.tp))
    for machine, group in zip(machines, groups, strict=True):
        rate = rate + group.count / np.asarray(
            step_time(shape, machine, plans, engine).total
        )
    return sum(group.count for group in groups) / rate


def _best_order(
    shape: Shape,
    engine: EngineConstants,
    cluster: Cluster,
    plan: Plan,
    machines: Sequence[Machine],
) -> MixedPlan | None:
    """Simulate a plan with the groups in several orders along the pipeline; return the fastest that fits in memory."""
    ranks = int(plan.world / plan.pp)
    speeds = group_speeds(shape, engine, cluster, plan)
    best: MixedPlan | None = None
    for order in list(permutations(speeds))[:ORDERS]:
        places = [speed for speed in order for _ in range(speed.group.count // ranks)]
        try:
            step = _simulated(shape, engine, cluster, plan, places, sized=True)
        except WeftError:
            continue
        if best is None or step.seconds < best.seconds:
            try:
                equal = _simulated(shape, engine, cluster, plan, places, sized=False)
                even = equal.seconds
            except WeftError:
                even = float("inf")
            groups = tuple(place.group for place in places)
            best = MixedPlan(
                plan, groups, tuple(step.layers), step.seconds, even, step.gib
            )
    return best


def _cut(
    shape: Shape, places: Sequence[GroupSpeed], held: Sequence[int], sized: bool
) -> list[Stage]:
    """Cut the layers into stages; ``held``: the pipeline rank of each stage; ``sized``: by speed, or equally."""
    first = places[held[0]].times
    layer = [
        places[rank].times.forward
        + places[rank].times.backward
        + places[rank].times.again
        for rank in held
    ]
    look_up = layer[0] * 4 * shape.embed / shape.active_weights
    speeds = [layer[0] / each for each in layer] if sized else None
    costs = [float(look_up), *[float(layer[0])] * int(shape.layers), float(first.head)]
    shares = partition(costs, len(held), speeds)
    last = len(costs)
    return [
        Stage(
            range(max(share.start - 1, 0), min(share.stop - 1, int(shape.layers))),
            embedding=share.start == 0,
            head=share.stop == last,
        )
        for share in shares
    ]


def _simulated(
    shape: Shape,
    engine: EngineConstants,
    cluster: Cluster,
    plan: Plan,
    places: Sequence[GroupSpeed],
    sized: bool,
) -> _StepOverGroups:
    """Simulate a step with stages ``sized`` by speed, or equally; raise :class:`WeftError` if it does not fit."""
    name, chunks, pp = schedules()[int(plan.schedule)], chunks_of(plan), int(plan.pp)
    m = int(plan.microbatches)
    most = max(pp, LARGEST // (2 * pp * chunks) // pp * pp)
    sizes = [min(m, most), max(pp, min(m, most) // 2 // pp * pp)]
    virtual = int(plan.virtual) if builder_of(name).free else None
    tables = [build(name, pp, size, virtual) for size in dict.fromkeys(sizes)]
    held = [0] * tables[0].stages
    for rank in range(pp):
        for stage in tables[0].held(rank):
            held[stage] = rank
    stages = _cut(shape, places, held, sized)
    nodes = _nodes(cluster, places, int(plan.world / plan.pp), int(plan.tp * plan.cp))
    placed = PlacedPipeline(shape, engine, cluster, plan, nodes, stages, held)
    step = placed.step(tables)
    layers = [placed.layers(rank) for rank in range(pp)]
    return _StepOverGroups(step.seconds, layers, step.gib)


def _nodes(
    cluster: Cluster, places: Sequence[GroupSpeed], ranks: int, inner: int
) -> list[list[int]]:
    """Return the node of each replica of each pipeline rank, where a group's devices are taken in their order.

    ``ranks``: devices of a pipeline rank; ``inner``: those of one replica.
    """
    first, taken = dict[int, int](), dict[int, int]()
    count = 0
    for index, group in enumerate(cluster.groups):
        first[index] = count
        count += -(-group.count // node_size(cluster, group))
    numbers = {id(group): index for index, group in enumerate(cluster.groups)}
    rows = []
    for place in places:
        number = numbers[id(place.group)]
        start = taken.get(number, 0)
        taken[number] = start + ranks
        size = node_size(cluster, place.group)
        rows.append(
            [first[number] + d // size for d in range(start, start + ranks, inner)]
        )
    return rows
