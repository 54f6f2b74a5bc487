"""Simulates a table by the clock: makespan, bubble, memory over time, or the deadlock that it runs into."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain
from operator import add
from typing import NamedTuple

from weft.schedule.actions import LOCAL, Action, ScheduleError, Table, Value
from weft.schedule.kinds import Clock
from weft.schedule.times import EQUAL, ModelTimes, Times
from weft.schedule.validate import why_stuck


@dataclass(frozen=True)
class Costs:
    """Times of actions and transfers, and memory of values, for a simulation. All times have the same unit.

    Attributes:
        ``compute``: function that returns the time of an action.
        ``move``: function that returns the time of the transfer of a value from the rank ``source`` to the rank
            ``target``.
        ``size``: function that returns the memory that a value takes on a rank. The value takes it from the time when
            it is computed or received until the last action on that rank that reads it has ended.
        ``exclusive``: whether a rank sends only one value at a time to the same other rank.
    """

    compute: Callable[[Action], float]
    move: Callable[[Value, int, int], float] = lambda value, source, target: 0.0
    size: Callable[[Value], float] = lambda value: float(value.name in LOCAL)
    exclusive: bool = False


def by_kind(times: ModelTimes) -> Callable[[Action], float]:
    """Return a function from an action to its modelled time, which its kind computes from the model's ``times``."""
    return lambda a: a.declared.cost(a, times)


def uniform_costs(table: Table, times: Times = EQUAL) -> Costs:
    """Return costs for simulating ``table`` if all its stages take equally long.

    ``times``: times of one microbatch on a rank. With ``v`` stages per rank each stage takes ``1 / v`` of them. The
    unit of memory is what a rank saves for the backward of one microbatch. A stage occupies ``1 / v`` of a unit, from
    its forward to its weight gradient.
    """
    chunks = table.stages / len(table.ranks)
    return Costs(
        by_kind(ModelTimes([times.scaled(1 / chunks)] * table.stages)),
        lambda value, source, target: times.move,
        lambda value: float(value.name in LOCAL) / chunks,
    )


class Timed(NamedTuple):
    """An action with the times at which it starts and ends, in the simulation's unit of time."""

    action: Action
    start: float
    end: float


class SimulatedTransfer(NamedTuple):
    """A transfer of a value between two ranks, in a simulation.

    ``value``: the value that is sent; ``source``, ``target``: the ranks that send and receive it; ``start``, ``end``:
    times at which the transfer starts and ends.
    """

    value: Value
    source: int
    target: int
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The result of simulating a table with modelled times.

    Attributes:
        ``table``: the table.
        ``timeline[r]``: the actions of rank ``r`` on its compute stream, with start and end.
        ``beside[r]``: the actions of rank ``r`` on its communication stream, with start and end.
        ``moves``: transfers between ranks.
        ``memory[r]``: ``(time, level)`` after every change of the memory in use on rank ``r``.
    """

    table: Table
    timeline: tuple[tuple[Timed, ...], ...]
    beside: tuple[tuple[Timed, ...], ...]
    moves: tuple[SimulatedTransfer, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]

    @cached_property
    def elapsed(self) -> float:
        """Time from the first action of any rank to the end of the last action of any rank."""
        return max((t.end for t in chain(*self.timeline, *self.beside)), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Longest time from a rank's first action to the end of its last action.

        This is the time per step in a run of many steps: the ranks of a pipeline need not start a step together.
        """
        spans = (
            max(t.end for t in rank) - min(t.start for t in rank)
            for rank in filter(None, map(add, self.timeline, self.beside))
        )
        return max(spans, default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time for which each rank computes, in the order of ranks, in the simulation's unit of time."""
        return tuple(sum(t.end - t.start for t in rank) for rank in self.timeline)

    @property
    def bubble_rate(self) -> float:
        """Share of the makespan in which a rank does not compute, averaged over ranks."""
        if not self.makespan:
            return 0.0
        return 1 - sum(self.busy) / len(self.busy) / self.makespan

    @property
    def peaks(self) -> tuple[float, ...]:
        """Highest level of memory in use on each rank, by rank, in the unit of the simulation's sizes."""
        levels = ((level for _, level in rank) for rank in self.memory)
        return tuple(max(rank, default=0.0) for rank in levels)


def simulate(table: Table, costs: Costs) -> Simulation:
    """Simulate ``table``: each stream of a rank runs its actions in order, once the values that they read have arrived.

    ``costs``: times of actions and transfers, and sizes of values; transfers overlap with computation. Raises
    :class:`ScheduleError` naming the actions that wait in a circle.
    """
    run, count = _Run(table, costs), len(table.ranks)
    run.all()
    lanes = tuple(map(tuple, run.timeline))
    compute, beside = lanes[:count], lanes[count:]
    both = [*map(add, compute, beside)]
    memory = _memory(both, run.moves, run.readers, costs.size)
    return Simulation(table, compute, beside, tuple(run.moves), memory)


class _Run:
    """The streams of all ranks: first the compute streams, then the communication streams."""

    def __init__(self, table: Table, costs: Costs) -> None:
        self.table, self.costs = table, costs
        count = len(table.ranks)
        self.queues: list[list[Action]] = [[] for _ in range(2 * count)]
        # the ranks that read a value
        self.readers: dict[Value, dict[int, None]] = defaultdict(dict)
        for a in table:
            kind = a.declared
            if not kind.inserted:
                stream = a.rank + count * (kind.clock is Clock.COMMUNICATION)
                self.queues[stream].append(a)
                for value in a.reads:
                    self.readers[value][a.rank] = None
        self.ended: dict[object, float] = {}  # by action key and by (value, rank)
        # streams whose next action waits for this to end
        self.waiting: dict[object, list[int]] = defaultdict(list)
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.at, self.free = [0] * len(self.queues), [0.0] * len(self.queues)
        self.timeline: list[list[Timed]] = [[] for _ in self.queues]
        self.moves: list[SimulatedTransfer] = []
        # heap of (start, stream) of the next actions that have all they need
        self.able: list[tuple[float, int]] = []

    def all(self) -> None:
        for stream in range(len(self.queues)):
            self._look(stream)
        # the earliest first: with exclusive links the order of sends depends on it
        while self.able:
            start, stream = heappop(self.able)
            a = self.queues[stream][self.at[stream]]
            self.at[stream] += 1
            self.free[stream] = now = start + self.costs.compute(a)
            self.timeline[stream].append(Timed(a, start, now))
            self._end(a.key, now)
            for value in a.writes:
                self._end((value, a.rank), now)
                self._send(value, a.rank, now)
            self._look(stream)
        if any(i < len(queue) for queue, i in zip(self.queues, self.at, strict=True)):
            raise ScheduleError(why_stuck(self.table))

    def _look(self, stream: int) -> None:
        """Push the next action of ``stream`` to the heap if it can start, or note the value that it waits for."""
        queue, place = self.queues[stream], self.at[stream]
        if place == len(queue):
            return
        a, start, ended = queue[place], self.free[stream], self.ended
        for need in (*a.deps, *((value, a.rank) for value in a.reads)):
            if need not in ended:
                self.waiting[need].append(stream)
                return
            start = max(start, ended[need])
        heappush(self.able, (start, stream))

    def _end(self, what: object, time: float) -> None:
        self.ended[what] = time
        for stream in self.waiting.pop(what, ()):
            self._look(stream)

    def _send(self, value: Value, source: int, now: float) -> None:
        """Send a value that is made at ``now`` to all other ranks that read it."""
        for target in self.readers[value]:
            if target != source:
                free = self.link_free[source, target] if self.costs.exclusive else now
                begin = max(now, free)
                arrival = begin + self.costs.move(value, source, target)
                self.link_free[source, target] = arrival
                transfer = SimulatedTransfer(value, source, target, begin, arrival)
                self.moves.append(transfer)
                self._end((value, target), arrival)


def _memory(
    timeline: Sequence[tuple[Timed, ...]],
    moves: list[SimulatedTransfer],
    readers: dict[Value, dict[int, None]],
    size: Callable[[Value], float],
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Return each rank's level of live values. A value is freed before the results of its last reader count."""
    levels = []
    for rank, actions in enumerate(timeline):
        changes: list[tuple[float, int, float]] = []  # time, frees first, change
        ended = sorted(actions, key=lambda t: t.end)
        last = {value: t.end for t in ended for value in t.action.reads}
        for t in actions:
            for value in t.action.writes:
                # An action's results occupy memory from its start: forward fills what it saves as it goes.
                begin = t.start if value.name == "saved" else t.end
                freed = (last[value], 0) if rank in readers[value] else (t.end, 2)
                changes += [(begin, 1, size(value)), (*freed, -size(value))]
        for move in moves:
            if move.target == rank:
                space = size(move.value)
                changes += [(move.end, 1, space), (last[move.value], 0, -space)]
        level, track = 0.0, []
        for time, _, change in sorted(changes):
            if change:
                level += change
                track.append((time, level))
        levels.append(tuple(track))
    return tuple(levels)
