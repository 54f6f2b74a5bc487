"""Runs one rank's part of a lowered table: actions are computed by a dictionary of operations, values are moved."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.profiler import record_function

from weft.schedule.actions import LOCAL, Action, ScheduleError, Table, Value
from weft.schedule.lower import FREE, RECV, SEND
from weft.schedule.pipeline_wire import Wire
from weft.schedule.simulate import Timed
from weft.schedule.validate import WINDOW

#: Computes one action: what it reads, in the order of ``action.reads``, to what it writes, in the order of ``writes``.
Op = Callable[[Action, Sequence[Any]], Sequence[Any]]


@dataclass
class Executed:
    """Measurements of a run. ``times``: of computing actions only, in seconds of ``time.perf_counter``.

    ``peak``: the most local values (``saved`` and ``tape``) that were alive at once.
    """

    times: list[Timed] = field(default_factory=list)
    peak: int = 0


def execute(
    table: Table,
    rank: int,
    ops: Mapping[str, Op],
    wire: Wire | None,
    *,
    window: int = WINDOW,
) -> Executed:
    """Run rank ``rank`` of a lowered ``table``; every rank of the pipeline calls this with its own number.

    ``ops[kind]`` computes an action; what lowering has inserted does nothing where ``ops`` has none. Values
    that travel are tensors, tuples of tensors or None. Receives are posted up to ``window`` ahead, and a send waits
    while ``window`` earlier ones to the same rank are under way, so buffers are bounded. A rank that does not deliver
    within the wire's timeout is named in a :class:`weft.net.lost.PeerLost`. ``wire``: None on a single rank.
    """
    actions = table.ranks[rank]
    unknown = {a.kind for a in actions if a.kind not in ops and not a.declared.inserted}
    if unknown:
        raise ScheduleError(
            f"schedule {table.name} has actions of kind {', '.join(sorted(unknown))}, which no op runs"
        )
    there: dict[Value, Any] = {}
    run = Executed()
    # arrivals not yet asked for, per source
    expected: dict[int, deque[Value]] = defaultdict(deque)
    for a in actions:
        if a.kind == RECV:
            expected[a.peer].append(a.writes[0])

    def ask(source: int) -> None:
        if wire is not None and expected[source]:
            wire.ask(expected[source].popleft(), source)

    for source in list(expected):
        for _ in range(window):
            ask(source)
    for i, a in enumerate(actions):
        if a.kind == SEND:
            assert wire is not None
            wire.send(a.reads[0], there[a.reads[0]], a.peer, window)
        elif a.kind == RECV:
            assert wire is not None
            there[a.writes[0]] = wire.take(a.writes[0], a.peer, _next(actions, i))
            ask(a.peer)
        elif a.kind == FREE:
            for value in a.reads:
                del there[value]
        elif op := ops.get(a.kind):
            # What a forward saves grows while it runs; what a backward leaves replaces what it has read.
            held = sum(value.name in LOCAL for value in there)
            run.peak = max(
                run.peak, held + sum(value.name == "saved" for value in a.writes)
            )
            run.times.append(_compute(a, op, there))
    if wire is not None:
        wire.flush()
    return run


def _compute(a: Action, op: Op, there: dict[Value, Any]) -> Timed:
    """Run one action on the values that are ``there``, and add its results to them; returns when it ran."""
    start = time.perf_counter()
    with record_function(f"weft:{a.kind}"):
        results = op(a, [there[value] for value in a.reads if not _empty(value)])
    there.update(
        zip(
            [value for value in a.writes if not _empty(value)],
            results or (),
            strict=True,
        )
    )
    there.update(dict.fromkeys(filter(_empty, a.writes)))
    return Timed(a, start, time.perf_counter())


def _empty(value: Value) -> bool:
    """Values that only say that something has happened."""
    return value.name.startswith("done:")


def _next(actions: Sequence[Action], i: int) -> str:
    return str(next((a for a in actions[i:] if a.peer < 0), actions[i]))


def replay(table: Table, ops: Mapping[str, Op]) -> list[Executed]:
    """Run all ranks of a table in this process, one action at a time: the same values, without any move.

    ``table`` as built, not lowered. The reference for what ranks compute together.
    """
    there: dict[Value, Any] = {}
    queues = [deque(actions) for actions in table.ranks]
    runs = [Executed() for _ in queues]
    done: set[Any] = set()
    moved = True
    while moved:
        moved = False
        for queue, run in zip(queues, runs, strict=True):
            while (
                queue
                and all(v in there for v in queue[0].reads)
                and done.issuperset(queue[0].deps)
            ):
                a, moved = queue.popleft(), True
                start = time.perf_counter()
                results = ops[a.kind](a, [there[v] for v in a.reads])
                there.update(zip(a.writes, results or (), strict=True))
                run.times.append(Timed(a, start, time.perf_counter()))
                done.add(a.key)
    stuck = [queue[0] for queue in queues if queue]
    if stuck:
        raise ScheduleError(
            f"schedule {table.name} cannot go on at {', '.join(map(str, stuck))}"
        )
    return runs
