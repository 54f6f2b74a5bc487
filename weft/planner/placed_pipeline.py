"""Time of a pipeline whose ranks have places: nodes of unlike devices, network cards that ranks share, slow rings.

A node's network card serves all ranks of the node, so what a transfer gets of it depends on who else sends at the same
time. Replicas of one stage may be in unlike nodes: each pipeline then takes its own time, and a ring of gradients is
as fast as its slowest link. Cards of two kinds cannot talk RDMA; between groups all go at ``across`` (Yang et al. 2024,
2312.03549; Li et al. 2022, 2210.07297).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from weft.errors import UsageError
from weft.planner.cost import Plan, element_bytes, gradients, rest
from weft.planner.engine_constants import EngineConstants
from weft.planner.group_speed import (
    GroupSpeed,
    group_speeds,
    network_share,
    node_size,
    nodes_by_group,
)
from weft.planner.layout_search import USABLE
from weft.planner.machine import Cluster
from weft.planner.memory import held_bytes, logit_bytes, rank_memory
from weft.planner.stage_seconds import StageWaits, makespan_of, stage_times
from weft.schedule.actions import Table
from weft.schedule.simulate import Simulation, simulate
from weft.schedule.stages import Stage, stage_costs
from weft.schedule.times import ModelTimes, Times
from weft.shapes.shape import Shape

#: Bytes of a message that NCCL takes from a sender before the receiver asks for it: its buffer, ``NCCL_BUFFSIZE``.
BUFFER = 4 * 2**20


class PlacedStep(NamedTuple):
    """Predicted time and memory of a step.

    ``seconds``: time of the step. ``gradients``: the part of this time in which ranks only wait for gradients to be
    summed. ``gib``: GiB of memory on the fullest rank.
    """

    seconds: float
    gradients: float
    gib: float


@dataclass(frozen=True)
class PlacedPipeline:
    """A plan whose pipeline ranks are in nodes of a mixed cluster.

    Attributes:
        ``shape``, ``engine``, ``cluster``, ``plan``: the model, the program's constants, the cluster and the layout.
        ``nodes[rank][replica]``: number of the node with the tp ranks of this pipeline rank in this replica.
        ``stages``: the part of the model at each stage; ``held[s]``: pipeline rank of stage ``s``.
        ``measured``: speed of each group of ``cluster``, where layers have been timed on its devices; empty: presets.
    """

    shape: Shape
    engine: EngineConstants
    cluster: Cluster
    plan: Plan
    nodes: Sequence[Sequence[int]]
    stages: Sequence[Stage]
    held: Sequence[int]
    measured: Sequence[GroupSpeed] = ()

    def step(self, tables: Sequence[Table], checked: bool = True) -> PlacedStep:
        """Simulate a step; ``tables``: its schedule for one or two numbers of microbatches, the larger one first.

        Raises :class:`UsageError` if a rank does not fit in its device's memory, unless ``checked`` is false.
        """
        speeds = self.measured or group_speeds(
            self.shape, self.engine, self.cluster, self.plan
        )
        kinds = nodes_by_group(self.cluster)
        span = gib = 0.0
        known: dict[Any, float] = {}
        for replica in range(len(self.nodes[0])):
            places = [speeds[kinds[row[replica]]] for row in self.nodes]
            hops = self.hops(places, replica)
            key = (tuple(id(place) for place in places), tuple(sorted(hops.items())))
            if key not in known:
                costs = self._costs(places, hops)
                runs = [simulate(table, costs) for table in tables]
                known[key] = makespan_of(runs, int(self.plan.microbatches))
                gib = max(gib, fullest(self, places, tables[0], runs[0], checked))
            span = max(span, known[key])
        sums, update = self._gradients(speeds, kinds)
        seconds = span + sums + update
        seconds += float(rest(self.plan, self.engine, seconds))
        return PlacedStep(seconds, sums, gib)

    def layers(self, rank: int) -> int:
        """Return the number of layers of a pipeline rank."""
        return sum(
            len(stage.layers)
            for stage, holder in zip(self.stages, self.held, strict=True)
            if holder == rank
        )

    def hops(
        self, places: Sequence[GroupSpeed], replica: int
    ) -> dict[tuple[int, int], float]:
        """Return the seconds to send a microbatch's activations between neighbouring pipeline ranks of a replica.

        The keys of the result are pairs (sender, receiver) of pipeline ranks, in both directions. ``places``: the group
        and machine of each pipeline rank. ``replica``: index of the data-parallel replica.
        """
        transfers = {}
        for source, target in set(zip(self.held, self.held[1:], strict=False)):
            for a, b in ((source, target), (target, source)):
                if a != b:
                    sent = self.sent(a, b)
                    transfers[a, b] = self._transfer(places, replica, a, b, sent)
        return transfers

    def sent(self, source: int, target: int) -> float:
        """Return the bytes that the tp ranks of pipeline rank ``source`` send together to ``target`` per microbatch.

        They are activations, and masks where the program sends them, or the activations' gradient.
        """
        plan, engine = self.plan, self.engine
        tokens = float(plan.micro_batch * plan.seq / plan.cp)
        sent = float(element_bytes(plan)) * tokens * float(self.shape.embed)
        forward = (source, target) in set(zip(self.held, self.held[1:], strict=False))
        if forward:
            return sent + float(engine.masks) * 2 * float(plan.seq) ** 2 * float(plan.tp)  # fmt: skip
        return sent * (float(plan.tp) if float(engine.whole_gradients) else 1.0)

    def _transfer(
        self,
        places: Sequence[GroupSpeed],
        replica: int,
        source: int,
        target: int,
        sent: float,
    ) -> float:
        """Return the seconds in which all tp ranks of ``source`` send ``sent`` bytes together to those of ``target``.

        All replicas send at once; those in the same node share its network card.
        """
        start, end = self.nodes[source][replica], self.nodes[target][replica]
        machine = places[source].machine
        if start == end:
            rate = float(machine.link) * float(self.plan.tp)
            return sent / rate + float(machine.link_latency)
        sharing = sum(
            a == start and b != start
            for a, b in zip(self.nodes[source], self.nodes[target], strict=True)
        )
        slowest = min(float(machine.link), float(places[target].machine.link))
        card = self._card(places[source], places[target]) / sharing
        rate = min(card, slowest * float(self.plan.tp))
        return sent / rate + float(machine.network_latency)

    def _card(self, source: GroupSpeed, target: GroupSpeed) -> float:
        """Return the bytes per second from a node of one group to a node of another, or of the same group."""
        sizes = [node_size(self.cluster, end.group) for end in (source, target)]
        ends = [
            float(end.machine.network) * size
            for end, size in zip((source, target), sizes, strict=True)
        ]
        if source.group is not target.group:
            ends.append(1e9 * float(self.cluster.across or 1) * min(sizes))
        return min(ends) * network_share(self.engine, source.group, target.group)

    def _costs(
        self, places: Sequence[GroupSpeed], hops: dict[tuple[int, int], float]
    ) -> Any:
        blocks = float(self.engine.blocks)
        times = [
            stage_times(self.shape, stage, places[rank].times, self._waits(s, hops))
            for s, (stage, rank) in enumerate(zip(self.stages, self.held, strict=True))
        ]
        ends = Times(0.0, 0.0, 0.0), Times(0.0, 0.0, 0.0)
        kept = float(held_bytes(self.shape, self.plan, self.engine))
        costs = stage_costs(ModelTimes(times, *ends, len(places)), self.stages, kept)

        def move(value: Any, source: int, target: int) -> float:
            return (1 - blocks) * hops.get((source, target), 0.0)

        return replace(costs, move=move)

    def _waits(self, stage: int, hops: dict[tuple[int, int], float]) -> StageWaits:
        """Return the seconds in which the rank of ``stage`` waits for its transfers in a program with paired calls.

        It waits for all that it receives. What it sends it waits for beyond what NCCL's buffer takes at once.
        """
        last = len(self.stages) - 1
        blocks = float(self.engine.blocks)

        def both(source: int, target: int) -> float:
            waits = 0.0
            if 0 <= source <= last:
                waits += hops.get((self.held[source], self.held[stage]), 0.0)
            if 0 <= target <= last:
                pair = self.held[stage], self.held[target]
                message = self.sent(*pair) / float(self.plan.tp)
                waits += max(0.0, 1 - BUFFER / message) * hops.get(pair, 0.0)
            return blocks * waits

        return StageWaits(both(stage - 1, stage + 1), both(stage + 1, stage - 1))

    def _gradients(
        self, speeds: Sequence[GroupSpeed], kinds: Sequence[int]
    ) -> tuple[float, float]:
        """Return the exposed seconds of sums of gradients, and those of the update, of the slowest stage."""
        m = int(self.plan.microbatches)
        slowest = update = 0.0
        for rank, row in enumerate(self.nodes):
            count = self.layers(rank)
            for kind in {kinds[node] for node in row}:
                times, machine = speeds[kind].times, speeds[kind].machine
                group = speeds[kind].group
                share = network_share(self.engine, group, group)
                engine = replace(self.engine, network=share)
                turn = count * (times.forward + times.backward + times.again)
                sums, own_update = gradients(
                    self.shape, machine, self.plan, engine, count, m * turn, turn
                )
                update = max(update, float(own_update))
                if len({kinds[node] for node in row}) > 1:
                    moved = self._ring(rank, speeds, kinds)
                    hidden = (1 - float(self.engine.exposed_dp)) * moved
                    sums = moved - min(hidden, float(turn))
                slowest = max(slowest, float(sums))
        return slowest + self._tied(speeds, kinds), update

    def _ring(
        self, rank: int, speeds: Sequence[GroupSpeed], kinds: Sequence[int]
    ) -> float:
        """Return the seconds of the sums of a stage's gradients over replicas in unlike nodes.

        Each tp rank has a ring of its own. All rings that leave a node share its card, those of other stages as well.
        """
        plan, shape = self.plan, self.shape
        weights = self.layers(rank) * (shape.dense_weights + shape.expert_weights)
        ends = (rank == 0) + (rank == len(self.nodes) - 1)
        weights = float(weights + shape.table * min(ends, 2 - float(shape.tied)))
        ring = sorted(self.nodes[rank])
        rate = float("inf")
        for a, b in zip(ring, ring[1:] + ring[:1], strict=True):
            source, target = speeds[kinds[a]], speeds[kinds[b]]
            if a == b:
                rate = min(rate, float(source.machine.link) * float(plan.tp))
            else:
                leaving = sum(a in row and len(set(row)) > 1 for row in self.nodes)
                rate = min(rate, self._card(source, target) / leaving)
        share = (len(ring) - 1) / len(ring)
        sharded = float(plan.zero) >= 1
        sent = 2 * float(self.engine.gradient)
        if sharded:
            sent = float(self.engine.gradient) + float(element_bytes(plan))
        return share * sent * weights / rate

    def _tied(self, speeds: Sequence[GroupSpeed], kinds: Sequence[int]) -> float:
        """Return the seconds in which first and last stage sum the gradients of the table that both hold."""
        first, last = self.nodes[0], self.nodes[-1]
        if len(self.nodes) < 2 or not float(self.shape.tied):
            return 0.0
        table = float(self.shape.table) * float(element_bytes(self.plan))
        slowest = 0.0
        for replica, (a, b) in enumerate(zip(first, last, strict=True)):
            places = [speeds[kinds[row[replica]]] for row in self.nodes]
            if a != b:
                seconds = self._transfer(places, replica, 0, len(self.nodes) - 1, table)
                slowest = max(slowest, seconds)
        return slowest


def fullest(
    placed: PlacedPipeline,
    places: Sequence[GroupSpeed],
    table: Table,
    run: Simulation,
    checked: bool,
) -> float:
    """Return the memory in GiB that the fullest pipeline rank of ``placed`` needs.

    ``places``: the group and machine of each pipeline rank. ``table``: the pipeline schedule; ``run``: its simulation.
    Raises :class:`UsageError` if a rank needs more memory than its device has, unless ``checked`` is false.
    """
    shape, plan, engine = placed.shape, placed.plan, placed.engine
    most = 0.0
    for rank in range(len(places)):
        stages = [placed.stages[s] for s in table.held(rank)]
        head = float(any(stage.head for stage in stages))
        loss = head * float(logit_bytes(shape, plan, engine))
        tables = sum(stage.embedding + stage.head for stage in stages)
        layers = sum(len(stage.layers) for stage in stages)
        peak = run.peaks[rank] + loss
        held = rank_memory(shape, plan, engine, layers, tables, peak, loss)
        memory = float(held.total)
        if checked and memory > float(places[rank].machine.memory) * USABLE:
            raise UsageError(f"pipeline rank {rank} needs {memory / 2**30:.0f} GiB")
        most = max(most, memory / 2**30)
    return most
