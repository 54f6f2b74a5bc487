"""The clock of a table: makespan, bubble, memory over time, or the deadlock that it runs into."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

from weft.schedule.actions import LOCAL, Action, ScheduleError, Table, Value
from weft.schedule.kinds import Clock
from weft.schedule.times import EQUAL, ModelTimes, Times
from weft.schedule.validate import why_stuck


@dataclass(frozen=True)
class Costs:
    """What actions and moves take, in any one unit of time.

    ``compute(action)``; ``move(value, source, target)``; ``size(value)``: memory that a value holds on a rank from its
    making (or arrival) to the end of its last reader there. With ``exclusive`` links, an ordered pair of ranks carries
    one value at a time.
    """

    compute: Callable[[Action], float]
    move: Callable[[Value, int, int], float] = lambda value, source, target: 0.0
    size: Callable[[Value], float] = lambda value: float(value.name in LOCAL)
    exclusive: bool = False


def by_kind(times: ModelTimes) -> Callable[[Action], float]:
    """What every action takes if its kind is asked."""
    return lambda a: a.declared.cost(a, times)


def uniform(table: Table, times: Times = EQUAL) -> Costs:
    """``times`` of a microbatch on a rank, shared evenly by the stages that the rank holds for it.

    A stage's saved activations are then ``1 / v`` of a rank's, and alive from its forward to its weight gradient.
    """
    chunks = table.stages / len(table.ranks)
    return Costs(
        by_kind(ModelTimes([times.scaled(1 / chunks)] * table.stages)),
        lambda value, source, target: times.move,
        lambda value: float(value.name in LOCAL) / chunks,
    )


class Timed(NamedTuple):
    """An action, and when it ran."""

    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    """A value on its way between two ranks."""

    value: Value
    source: int
    target: int
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """``timeline[r]``: rank r's actions on the compute stream with their times; ``beside[r]``: those on its
    communication stream. ``moves``: values between ranks. ``memory[r]``: ``(time, level)`` after every change.
    """

    table: Table
    timeline: tuple[tuple[Timed, ...], ...]
    beside: tuple[tuple[Timed, ...], ...]
    moves: tuple[Transfer, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]

    @cached_property
    def elapsed(self) -> float:
        """From the first action anywhere to the last."""
        return max((t.end for rank in (*self.timeline, *self.beside) for t in rank), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Longest time from a rank's first action to its last.

        This is the time per step in a run of many steps: the ranks of a pipeline need not start a step together.
        """
        ranks = (a + b for a, b in zip(self.timeline, self.beside, strict=True))
        return max((max(t.end for t in rank) - min(t.start for t in rank) for rank in ranks if rank), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(sum(t.end - t.start for t in rank) for rank in self.timeline)

    @property
    def bubble_rate(self) -> float:
        """Share of the makespan in which the average rank does not compute."""
        return 1 - sum(self.busy) / len(self.busy) / self.makespan if self.makespan else 0.0

    @property
    def peaks(self) -> tuple[float, ...]:
        """Highest memory level of each rank."""
        return tuple(max((level for _, level in rank), default=0.0) for rank in self.memory)


def simulate(table: Table, costs: Costs) -> Simulation:
    """Run the table by the clock: each stream of a rank runs its actions in order, as soon as what they read is there.

    Moves overlap compute. Raises :class:`ScheduleError` naming the actions that wait for each other in a circle.
    """
    count = len(table.ranks)
    # The compute streams of all ranks, then their communication streams.
    queues: list[list[Action]] = [[] for _ in range(2 * count)]
    readers: dict[Value, dict[int, None]] = defaultdict(dict)  # the ranks that read a value
    for a in table:
        kind = a.declared
        if not kind.inserted:
            queues[a.rank + count * (kind.clock is Clock.COMMUNICATION)].append(a)
            for value in a.reads:
                readers[value][a.rank] = None
    ended: dict[object, float] = {}  # by action key and by (value, rank)
    waiting: dict[object, list[int]] = defaultdict(list)  # streams whose next action waits for this to end
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    at, free = [0] * len(queues), [0.0] * len(queues)
    timeline: list[list[Timed]] = [[] for _ in queues]
    moves: list[Transfer] = []
    able: list[tuple[float, int]] = []  # heap of (start, stream) of the next actions that have all they need

    def look(stream: int) -> None:
        """Enter the next action of ``stream`` among those that are able to start, or note what it waits for."""
        if at[stream] == len(queues[stream]):
            return
        a, start = queues[stream][at[stream]], free[stream]
        for need in (*a.deps, *((value, a.rank) for value in a.reads)):
            if need not in ended:
                waiting[need].append(stream)
                return
            start = max(start, ended[need])
        heappush(able, (start, stream))

    def end(what: object, time: float) -> None:
        ended[what] = time
        for stream in waiting.pop(what, ()):
            look(stream)

    for stream in range(len(queues)):
        look(stream)
    while able:  # the earliest first: with exclusive links the order of sends depends on it
        start, stream = heappop(able)
        a = queues[stream][at[stream]]
        at[stream] += 1
        free[stream] = now = start + costs.compute(a)
        timeline[stream].append(Timed(a, start, now))
        end(a.key, now)
        for value in a.writes:
            end((value, a.rank), now)
            for other in readers[value]:
                if other != a.rank:
                    begin = max(now, link_free[a.rank, other]) if costs.exclusive else now
                    link_free[a.rank, other] = arrival = begin + costs.move(value, a.rank, other)
                    moves.append(Transfer(value, a.rank, other, begin, arrival))
                    end((value, other), arrival)
        look(stream)
    if any(i < len(queue) for queue, i in zip(queues, at, strict=True)):
        raise ScheduleError(why_stuck(table))
    lanes = tuple(map(tuple, timeline))
    both = [[*compute, *beside] for compute, beside in zip(lanes[:count], lanes[count:], strict=True)]
    return Simulation(table, lanes[:count], lanes[count:], tuple(moves), _memory(both, moves, readers, costs.size))


def _memory(
    timeline: list[list[Timed]],
    moves: list[Transfer],
    readers: dict[Value, dict[int, None]],
    size: Callable[[Value], float],
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Level of live values per rank. What is read for the last time is freed before what the reader made counts."""
    levels = []
    for rank, actions in enumerate(timeline):
        changes: list[tuple[float, int, float]] = []  # time, frees first, change
        last = {value: t.end for t in sorted(actions, key=lambda t: t.end) for value in t.action.reads}
        for t in actions:
            for value in t.action.writes:
                # An action's results occupy memory from its start: forward fills what it saves as it goes.
                begin = t.start if value.name == "saved" else t.end
                changes.append((begin, 1, size(value)))
                if rank in readers[value]:
                    changes.append((last[value], 0, -size(value)))
                else:
                    changes.append((t.end, 2, -size(value)))
        for move in moves:
            if move.target == rank:
                changes += [(move.end, 1, size(move.value)), (last[move.value], 0, -size(move.value))]
        level, track = 0.0, []
        for time, _, change in sorted(changes):
            if change:
                level += change
                track.append((time, level))
        levels.append(tuple(track))
    return tuple(levels)
