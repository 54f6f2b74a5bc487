"""Execution of one rank's part of a lowered table: operations compute its actions, and a wire moves its values."""

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

#: Computes an action: from the values that it reads to those that it writes, each in the order of the action.
Op = Callable[[Action, Sequence[Any]], Sequence[Any]]


@dataclass
class Executed:
    """Measurements of one run of a table on a rank.

    ``times``: start and end of each action that computes, in seconds of ``time.perf_counter``. ``peak``: the largest
    number of results that the rank held at once for backward. A stage's saved activations for one microbatch count 1,
    and so does the input of a postponed weight gradient.
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
    """Run the actions of rank ``rank`` in ``table``. Every rank of the pipeline calls it with its own number.

    Args:
        ``table``: a schedule with all transfers, as :func:`weft.schedule.validate.validate` returns it.
        ``rank``: number of this rank in the pipeline.
        ``ops``: for each kind of action, the function that computes it. Inserted kinds (transfers, gathers, frees) may
            be missing.
        ``wire``: sends and receives values: tensors, tuples of tensors or None. It may be None if the pipeline has one
            rank.
        ``window``: how many values from each other rank are asked for in advance. It also limits the sends to a rank
            that have not ended; a further send waits. So the memory for transfers is bounded.

    Raises :class:`weft.net.lost.PeerLost` naming a rank that does not deliver within the wire's timeout, and
    :class:`ScheduleError` for a kind of action that ``ops`` lacks.
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

    for source in list(expected) * window:
        ask(source)
    for i, a in enumerate(actions):
        if a.kind == SEND:
            assert wire is not None
            wire.send(a.reads[0], there[a.reads[0]], a.peer, window)
        elif a.kind == RECV:
            assert wire is not None
            purpose = next((b for b in actions[i:] if b.peer < 0), a)
            there[a.writes[0]] = wire.take(a.writes[0], a.peer, str(purpose))
            ask(a.peer)
        elif a.kind == FREE:
            for value in a.reads:
                del there[value]
        elif op := ops.get(a.kind):
            # What a forward saves grows while it runs; what a backward leaves replaces what it has read.
            held = sum(value.name in LOCAL for value in there)
            saved = sum(value.name == "saved" for value in a.writes)
            run.peak = max(run.peak, held + saved)
            run.times.append(_compute(a, op, there))
    if wire is not None:
        wire.flush()
    return run


def _compute(a: Action, op: Op, there: dict[Value, Any]) -> Timed:
    """Run an action on the values that are ``there``, add its results to them, and return its times."""
    start = time.perf_counter()
    with record_function(f"weft:{a.kind}"):
        results = op(a, [there[value] for value in a.reads if not _empty(value)])
    values = [value for value in a.writes if not _empty(value)]
    there.update(dict.fromkeys(a.writes))
    there.update(zip(values, results or (), strict=True))
    return Timed(a, start, time.perf_counter())


def _empty(value: Value) -> bool:
    """Return whether a value only says that an action has ended."""
    return value.name.startswith("done:")
