"""Proof that a table can run: all duties exactly once, in a legal order, without deadlock or overrun of buffers."""

from collections import Counter, defaultdict, deque
from itertools import chain

from weft.schedule.actions import Action, Entry, Key, ScheduleError, Table, Value
from weft.schedule.kinds import Duty
from weft.schedule.lower import FREE, GATHER, RECV, RELEASE, SEND, lower, producers

#: Messages that may be on their way between two ranks before the sender waits, and receives posted ahead.
WINDOW = 4


def validate(
    table: Table, window: int = WINDOW, zero: int = 1, streamed: bool = False
) -> Table:
    """Check ``table``, and return it with transfers, gathers, reductions and frees inserted.

    Three things are checked. On its path, every microbatch has one forward and both parts of one backward per stage,
    all on one rank (in evaluation only the forward). Every value is written before it is read. The ranks can run the
    table to its end, without waiting for each other for ever, with at most ``window`` messages under way between two
    ranks.

    ``zero`` (the ZeRO stage) and ``streamed`` (whether parameters rest outside of the device's memory) decide when
    parameters are gathered and gradients reduced (:func:`weft.schedule.lower.lower`). Raises :class:`ScheduleError`
    naming the actions at fault.
    """
    _exactly_once(table)
    lowered = lower(table, zero, streamed)
    for actions in lowered.ranks:
        _legal_order(lowered.name, actions)
    run_dry(lowered, window)
    return lowered


def _exactly_once(table: Table) -> None:
    seen = Counter(a.key for a in table)
    twice = next((key for key, n in seen.items() if n > 1), None)
    if twice:
        raise ScheduleError(
            f"schedule {table.name}: {twice} stands {seen[twice]} times in the table"
        )
    here: dict[tuple[int, int], list[Action]] = {
        (s, m): [] for m, path in enumerate(table.paths) for s in path
    }
    for a in table:
        if a.declared.inserted:
            raise ScheduleError(
                f"schedule {table.name}: {a} is a move; moves are inserted by lowering"
            )
        if not 0 <= a.microbatch < table.microbatches:
            raise ScheduleError(
                f"schedule {table.name}: {a} is of none of the {table.microbatches} microbatches"
            )
        if (a.stage, a.microbatch) in here:
            here[a.stage, a.microbatch] += [a] * bool(a.declared.duty)
        elif a.declared.flow:  # which reads its neighbours on a path
            raise ScheduleError(
                f"schedule {table.name}: {a} is not on the path of microbatch {a.microbatch}"
            )
    owed = Duty.FORWARD if all(a.declared.forward for a in table) else Duty.ALL
    for (stage, m), actions in here.items():
        if Counter(duty for a in actions for duty in a.declared.duty) != Counter(owed):
            kinds = ", ".join(a.kind for a in actions) or "nothing"
            raise ScheduleError(
                f"schedule {table.name}: stage {stage} runs {kinds} for microbatch {m}; it must run forward, and make "
                "the gradients of its input and of its weights, once each: F and B, or F, I and W"
            )
        if len({a.rank for a in actions}) > 1:
            where = ", ".join(f"{a.kind} on rank {a.rank}" for a in actions)
            raise ScheduleError(
                f"schedule {table.name}: stage {stage} of microbatch {m} moves between ranks: {where}"
            )


def _legal_order(name: str, actions: tuple[Action, ...]) -> None:
    """Check the actions of a rank: no value is read before it is written, or after it is freed."""
    there: set[Value] = set()
    done: set[Entry] = set()
    gathered: set[int] = set()
    for a in actions:
        missing = next((v for v in a.reads if v not in there), None)
        if missing:
            raise ScheduleError(f"schedule {name}: {a} comes before {missing} is there")
        early = next((k for k in a.deps if k not in done), None)
        if early:
            raise ScheduleError(
                f"schedule {name}: {a} comes before {Key(*early)}, on which it depends"
            )
        if a.kind == FREE:
            there.difference_update(a.reads)
        if a.kind == GATHER:
            gathered.add(a.stage)
        if a.kind == RELEASE:
            gathered.discard(a.stage)
        if a.declared.parameters and a.stage not in gathered:
            raise ScheduleError(
                f"schedule {name}: {a} runs while its parameters are not gathered"
            )
        there.update(a.writes)
        done.add(a.key)
    if there:
        raise ScheduleError(
            f"schedule {name}: {next(iter(there))} is never freed on rank {actions[0].rank}"
        )


def run_dry(lowered: Table, window: int = WINDOW) -> dict[tuple[int, int], int]:
    """Check that the ranks can run a table to its end, by executing it without computing anything.

    Returns, for each pair of a sending and a receiving rank, the largest number of messages that were under way at
    once. A send waits while ``window`` messages to the same rank are under way. ``lowered``: table with all sends and
    receives (:func:`weft.schedule.lower.lower`). Raises :class:`ScheduleError` for a deadlock, for messages in the
    wrong order, and for messages that nobody receives.
    """
    queues = [deque(actions) for actions in lowered.ranks]
    under_way: dict[tuple[int, int], deque[Value]] = defaultdict(deque)
    most: Counter[tuple[int, int]] = Counter()
    moved = True
    while moved:
        moved = False
        for queue in queues:
            while queue and _can_run(queue[0], under_way, window):
                a, moved = queue.popleft(), True
                if a.kind == SEND:
                    pair = (a.rank, a.peer)
                    under_way[pair].append(a.reads[0])
                    most[pair] = max(most[pair], len(under_way[pair]))
                elif a.kind == RECV:
                    pair = (a.peer, a.rank)
                    value = under_way[pair].popleft()
                    if value != a.writes[0]:
                        raise ScheduleError(
                            f"schedule {lowered.name}: {a}, but {value} is sent to it first"
                        )
    stuck = [queue[0] for queue in queues if queue]
    if stuck:
        raise ScheduleError(
            f"schedule {lowered.name} deadlocks: {_circle(lowered, queues)}"
        )
    for pair, values in under_way.items():
        if values:
            raise ScheduleError(
                f"schedule {lowered.name}: {values[0]} is sent from rank {pair[0]} but never received"
            )
    return dict(most)


def why_stuck(table: Table) -> str:
    """Return a text that says why ``table`` cannot run to its end, and names the actions that wait.

    The reason holds however many messages may be under way.
    """
    try:
        lowered = lower(table)
        for actions in lowered.ranks:
            _legal_order(table.name, actions)
        run_dry(lowered, window=sum(map(len, lowered.ranks)))
    except ScheduleError as error:
        return str(error)
    return f"schedule {table.name} deadlocks"


def _can_run(
    a: Action, under_way: dict[tuple[int, int], deque[Value]], window: int
) -> bool:
    if a.kind == SEND:
        return len(under_way[a.rank, a.peer]) < window
    return a.kind != RECV or bool(under_way[a.peer, a.rank])


def _circle(table: Table, queues: list[deque[Action]]) -> str:
    """Describe the circle of actions that wait for each other."""
    heads = {queue[0].rank: queue[0] for queue in queues if queue}
    writers = producers(table)
    visited: list[Action] = []
    a = next(iter(heads.values()))
    while a not in visited:
        visited.append(a)
        if a.peer not in heads:
            return f"{a} waits for rank {a.peer}, which has ended"
        a = heads[a.peer]
    circle = visited[visited.index(a) :]
    parts = []
    for a in circle:
        value = (a.reads or a.writes)[0]
        what: object = f"room for {value}"
        if a.kind == RECV:
            what = writers.get(value, what)
        ahead = (b for b in chain(*queues) if b.rank == a.rank)
        blocked = next((b for b in ahead if not b.declared.inserted), a)
        parts.append(f"{blocked} waits for {what}")
    return "; ".join(parts)
