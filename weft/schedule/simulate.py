"""The clock of a table: makespan, bubble, memory over time, or the deadlock that it runs into."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from weft.schedule.actions import MOVES, Action, ScheduleError, Table, Value


@dataclass(frozen=True)
class Costs:
    """What actions and moves take, in any one unit of time.

    ``compute(action)``; ``move(value, source, target)``; ``size(value)``: memory that a value holds on a rank from its
    making (or arrival) to the end of its last reader there. With ``exclusive`` links, an ordered pair of ranks carries
    one value at a time.
    """

    compute: Callable[[Action], float]
    move: Callable[[Value, int, int], float] = lambda value, source, target: 0.0
    size: Callable[[Value], float] = lambda value: float(value.name in ("saved", "tape"))
    exclusive: bool = False


def uniform(
    table: Table, forward: float = 1.0, backward_input: float = 1.0, backward_weight: float = 1.0, move: float = 0.0
) -> Costs:
    """Times per rank and microbatch, shared evenly by the stages that a rank holds for a microbatch.

    A stage's saved activations are then ``1 / v`` of a rank's, and alive from its forward to its weight gradient.
    """
    chunks = table.stages / len(table.ranks)
    times = {"F": forward, "I": backward_input, "W": backward_weight, "B": backward_input + backward_weight}
    return Costs(
        lambda a: times.get(a.kind, 0.0) / chunks,
        lambda value, source, target: move,
        lambda value: float(value.name in ("saved", "tape")) / chunks,
    )


@dataclass(frozen=True)
class Timed:
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """``timeline[r]``: rank r's computing actions with their times; ``moves``: ``(value, source, target, start, end)``.

    ``memory[r]``: ``(time, level)`` after every change.
    """

    table: Table
    timeline: tuple[tuple[Timed, ...], ...]
    moves: tuple[tuple[Value, int, int, float, float], ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]

    @cached_property
    def elapsed(self) -> float:
        """From the first action anywhere to the last."""
        return max((t.end for rank in self.timeline for t in rank), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Longest time from a rank's first action to its last.

        This is the time per step in a run of many steps: the ranks of a pipeline need not start a step together.
        """
        return max((rank[-1].end - rank[0].start for rank in self.timeline if rank), default=0.0)

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
    """Run the table by the clock: ranks run their actions in order, as soon as what they read is there.

    Moves overlap compute. Raises :class:`ScheduleError` naming the actions that wait for each other in a circle.
    """
    queues = [[a for a in actions if a.kind not in MOVES] for actions in table.ranks]
    readers: dict[Value, dict[int, None]] = defaultdict(dict)  # the ranks that read a value
    for queue in queues:
        for a in queue:
            for value in a.reads:
                readers[value][a.rank] = None
    ended: dict[object, float] = {}  # by action key and by (value, rank)
    waiting: dict[object, list[int]] = defaultdict(list)  # ranks whose next action waits for this to end
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    at, free = [0] * len(queues), [0.0] * len(queues)
    timeline: list[list[Timed]] = [[] for _ in queues]
    moves: list[tuple[Value, int, int, float, float]] = []
    able: list[tuple[float, int]] = []  # heap of (start, rank) of the next actions that have all they need

    def look(rank: int) -> None:
        """Enter the next action of ``rank`` among those that are able to start, or note what it waits for."""
        if at[rank] == len(queues[rank]):
            return
        a, start = queues[rank][at[rank]], free[rank]
        for need in (*a.deps, *((value, rank) for value in a.reads)):
            if need not in ended:
                waiting[need].append(rank)
                return
            start = max(start, ended[need])
        heappush(able, (start, rank))

    def end(what: object, time: float) -> None:
        ended[what] = time
        for rank in waiting.pop(what, ()):
            look(rank)

    for rank in range(len(queues)):
        look(rank)
    while able:  # the earliest first: with exclusive links the order of sends depends on it
        start, r = heappop(able)
        a = queues[r][at[r]]
        at[r] += 1
        free[r] = now = start + costs.compute(a)
        timeline[r].append(Timed(a, start, now))
        end(a.key, now)
        for value in a.writes:
            end((value, r), now)
            for other in readers[value]:
                if other != r:
                    begin = max(now, link_free[r, other]) if costs.exclusive else now
                    link_free[r, other] = arrival = begin + costs.move(value, r, other)
                    moves.append((value, r, other, begin, arrival))
                    end((value, other), arrival)
        look(r)
    left = [queue[i:] for queue, i in zip(queues, at, strict=True)]
    if any(left):
        raise ScheduleError(deadlock(table.name, left, {v: a for q in queues for a in q for v in a.writes}))
    return Simulation(table, tuple(map(tuple, timeline)), tuple(moves), _memory(timeline, moves, readers, costs.size))


def deadlock(name: str, left: list[list[Action]], producer: dict[Value, Action]) -> str:
    """Why nothing of what is ``left`` can start: a circle of actions, or a value that nobody makes."""
    pending = {a.key: a for actions in left for a in actions}
    heads = [actions[0] for actions in left if actions]
    head_of = {a.rank: a for a in heads}
    for start in heads:
        seen: list[Action] = []
        a: Action | None = start
        while a is not None and a not in seen:
            seen.append(a)
            needs = [producer.get(v) for v in a.reads] + [pending.get(k) for k in a.deps]
            absent = [v for v in a.reads if v not in producer]
            if absent:
                return f"schedule {name}: {a} reads {absent[0]}, which no action writes"
            # Wait for the first need that has not ended; it is behind the head of its rank's queue.
            blocked = next((n for n in needs if n is not None and n.key in pending), None)
            if blocked is None:
                gone = [k for k in a.deps if k not in pending]
                return f"schedule {name}: {a} depends on {gone}, which is not in the table"
            a = head_of[blocked.rank]
            if a == seen[-1] or a in seen:
                circle = seen[seen.index(a) :]
                chain = " -> ".join(map(str, circle))
                return f"schedule {name} deadlocks: {chain} -> waits for {blocked} behind {a}"
    return f"schedule {name} deadlocks"


def _memory(
    timeline: list[list[Timed]],
    moves: list[tuple[Value, int, int, float, float]],
    readers: dict[Value, dict[int, None]],
    size: Callable[[Value], float],
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Level of live values per rank. What is read for the last time is freed before what the reader made counts."""
    levels = []
    for rank, actions in enumerate(timeline):
        changes: list[tuple[float, int, float]] = []  # time, frees first, change
        last = {value: t.end for t in actions for value in t.action.reads}
        for t in actions:
            for value in t.action.writes:
                # An action's results occupy memory from its start: forward fills what it saves as it goes.
                begin = t.start if value.name == "saved" else t.end
                changes.append((begin, 1, size(value)))
                if rank in readers[value]:
                    changes.append((last[value], 0, -size(value)))
                else:
                    changes.append((t.end, 2, -size(value)))
        for value, _, target, _, arrival in moves:
            if target == rank:
                changes += [(arrival, 1, size(value)), (last[value], 0, -size(value))]
        level, track = 0.0, []
        for time, _, change in sorted(changes):
            if change:
                level += change
                track.append((time, level))
        levels.append(tuple(track))
    return tuple(levels)
