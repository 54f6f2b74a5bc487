"""Lowering: sends, receives, gathers, reductions and frees follow from the values and stages of a table."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from weft.schedule.actions import LOCAL, Action, Entry, Key, ScheduleError, Table, Value
from weft.schedule.kinds import Clock, Duty, Kind, declare_kind


def _inserted(name: str, meaning: str, clock: Clock) -> str:
    return declare_kind(
        Kind(name, meaning, clock=clock, parameters=False, inserted=True)
    )


SEND = _inserted("SEND", "a value leaves for another rank", Clock.COMMUNICATION)
RECV = _inserted("RECV", "a value arrives from another rank", Clock.COMMUNICATION)
FREE = _inserted("FREE", "a value is forgotten after its last use", Clock.COMPUTE)
GATHER = _inserted("GATHER", "a stage's parameters are made whole", Clock.COMMUNICATION)
RELEASE = _inserted(
    "RELEASE", "a stage's whole parameters are forgotten", Clock.COMPUTE
)
FETCH = _inserted(
    "FETCH",
    "the next stage's parameters begin to come from where they rest",
    Clock.COMMUNICATION,
)
REDUCE = _inserted(
    "REDUCE",
    "a stage's gradients are summed over the ranks that hold it",
    Clock.COMMUNICATION,
)


def links(lowered: Table) -> set[tuple[int, int]]:
    """Return all pairs ``(source, target)`` of ranks such that the table sends a value from ``source`` to ``target``.

    ``lowered``: a table with sends and receives, as :func:`lower` returns it.
    """
    return {(a.rank, a.peer) for a in lowered if a.kind == SEND}


def producers(table: Table) -> dict[Value, Action]:
    """Return, for each value of ``table``, the action that writes it.

    Raises :class:`ScheduleError` if two actions write one value.
    """
    writers: dict[Value, Action] = {}
    for a in table:
        for value in a.writes if a.kind != RECV else ():
            if value in writers:
                raise ScheduleError(
                    f"schedule {table.name}: both {writers[value]} and {a} write {value}"
                )
            writers[value] = a
    return writers


def lower(table: Table, zero: int = 1, streamed: bool = False) -> Table:
    """Insert the actions that compute nothing into ``table``: sends, receives, gathers, reductions and frees.

    A value that another rank reads is sent when it is made, and received before it is needed. Between two ranks,
    receives have the order of the sends, as NCCL wants it. A value is freed after its last use.

    ``zero``: the ZeRO stage (Rajbhandari et al. 2020), which decides how often parameters are gathered and gradients
    reduced. ZeRO-1 and ZeRO-2 gather a stage's parameters once in a step; ZeRO-3 gathers them for every run of the
    stage's actions. ZeRO-1 reduces gradients after the last microbatch; ZeRO-2 and ZeRO-3 after every microbatch.

    ``streamed``: whether parameters rest on the host or in a file. They are then gathered for every run of the stage's
    actions, and those of the next stage are fetched meanwhile. Gradients are reduced after the last microbatch.

    Raises :class:`ScheduleError` for a value that no action writes, or that cannot leave its rank.
    """
    table = _handed_over(table)
    writers = producers(table)
    # the ranks that read, in a fixed order
    needed: dict[Value, dict[int, None]] = defaultdict(dict)
    for a in table:
        for value in a.reads:
            if value not in writers:
                raise ScheduleError(
                    f"schedule {table.name}: {a} reads {value}, which no action writes"
                )
            if a.rank != writers[value].rank:
                if value.name in LOCAL:
                    raise ScheduleError(
                        f"schedule {table.name}: {a} reads {value}, which stays where {writers[value]} is"
                    )
                needed[value][a.rank] = None
    # The messages of every ordered pair of ranks, in the order in which they are made.
    sent: dict[tuple[int, int], deque[Value]] = defaultdict(deque)
    for a in table:
        for value in a.writes:
            for target in needed[value]:
                sent[a.rank, target].append(value)
    ranks = []
    for rank, actions in enumerate(table.ranks):
        out: list[Action] = []
        for a in actions:
            for value in a.reads:
                source = writers[value].rank
                queue = sent[source, rank]
                while source != rank and value in queue:
                    out.append(_move(RECV, rank, queue.popleft(), source))
            out.append(a)
            out += [
                _move(SEND, rank, value, target)
                for value in a.writes
                for target in needed[value]
            ]
        if streamed:
            out = _fetches(_parameters(out, 3, 1))
        else:
            out = _parameters(out, zero, zero)
        ranks.append(_frees(out))
    return replace(table, ranks=tuple(ranks))


def _move(kind: str, rank: int, value: Value, peer: int) -> Action:
    reads, writes = ((value,), ()) if kind == SEND else ((), (value,))
    return Action(rank, kind, value.stage, value.microbatch, (), reads, writes, peer)


def _handed_over(table: Table) -> Table:
    """Turn dependencies on actions of other ranks into empty values that those actions write."""
    rank_of: dict[Entry, int] = {a.key: a.rank for a in table}
    awaited: dict[Entry, Value] = {}

    def read(a: Action) -> Action:
        if not a.deps:
            return a
        missing = [key for key in a.deps if key not in rank_of]
        if missing:
            raise ScheduleError(
                f"schedule {table.name}: {a} depends on {Key(*missing[0])}, which is not in the table"
            )
        far = {
            key: Value(f"done:{key[0]}", *key[1:])
            for key in a.deps
            if rank_of[key] != a.rank
        }
        awaited.update(far)
        near = tuple(key for key in a.deps if key not in far)
        return replace(a, deps=near, reads=(*a.reads, *far.values()))

    def write(a: Action) -> Action:
        if a.key not in awaited:
            return a
        return replace(a, writes=(*a.writes, awaited[a.key]))

    return table.map(read).map(write)


def _parameters(actions: Sequence[Action], zero: int, reductions: int) -> list[Action]:
    """Insert gathers before and releases after the runs in which a stage's parameters are used, and reductions.

    ``zero`` and ``reductions``: the ZeRO stages of parameters and of gradients.
    """
    using = [a for a in actions if a.declared.parameters]
    last = {a.stage: a for a in using if _leaves_gradients(a)}
    held = None  # the stage whose parameters are gathered, under stage 3
    gathered: set[int] = set()
    out = []
    for a in actions:
        if a.declared.parameters and a.stage not in gathered:
            if zero == 3 and held is not None:
                out.append(Action(a.rank, RELEASE, held, -1))
                gathered.discard(held)
            out.append(Action(a.rank, GATHER, a.stage, -1))
            gathered.add(a.stage)
            held = a.stage
        out.append(a)
        if _leaves_gradients(a) and (reductions > 1 or last[a.stage] is a):
            out.append(Action(a.rank, REDUCE, a.stage, a.microbatch))
    return [*out, *(Action(a.rank, RELEASE, s, -1) for s in sorted(gathered))]


def _fetches(actions: Sequence[Action]) -> list[Action]:
    """Insert behind every gather a fetch of the stage that is gathered next."""
    gathers = [a for a in actions if a.kind == GATHER]
    following = dict(zip(map(id, gathers), gathers[1:], strict=False))
    out = []
    for a in actions:
        out.append(a)
        if id(a) in following:
            out.append(replace(following[id(a)], kind=FETCH))
    return out


def _leaves_gradients(a: Action) -> bool:
    return a.declared.parameters and Duty.WEIGHT_GRADIENT in a.declared.duty


def _frees(actions: Sequence[Action]) -> tuple[Action, ...]:
    last: dict[Value, Action] = {}
    for a in actions:
        last.update(dict.fromkeys((*a.reads, *a.writes), a))
    dying: dict[int, list[Value]] = defaultdict(list)
    for value, a in last.items():
        dying[id(a)].append(value)
    out: list[Action] = []
    for a in actions:
        out.append(a)
        if freed := tuple(dying[id(a)]):
            out.append(Action(a.rank, FREE, a.stage, a.microbatch, (), freed))
    return tuple(out)
