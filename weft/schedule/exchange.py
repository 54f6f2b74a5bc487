"""Exchanges of experts as actions: stages are cut at dispatch and combine, so that others compute while rows travel.

====  =========================================================================================
Fa    forward of a layer up to its dispatch: attention and router
Fd    rows travel to their experts
Fx    forward of the experts
Fc    what they have made of the rows travels back
Bc    gradients of the latter travel to the experts
Bx    backward of the experts, or Ix, of their input alone
Bd    gradients of the rows travel back
Ba    backward of what comes before dispatch, or Ia, of its input alone
====  =========================================================================================

What travels is on a rank's communication stream. Two microbatches on a rank then take turns: a forward and a backward
(DualPipe, DeepSeek-V3, 2412.19437; interleaved 1F1B), or two of a kind (its inference, 2505.09343).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from itertools import accumulate, pairwise, zip_longest

from weft.schedule.actions import Action, Entry, ScheduleError, Table, Value, assemble
from weft.schedule.kinds import Clock, Duty, Flow, Kind, Visit, declare_kind
from weft.schedule.simulate import Costs, Simulation, simulate
from weft.schedule.times import ModelTimes, Times


class Beside(Enum):
    """What takes turns with a microbatch's pass: nothing, the other pass of another one, or the same of another one."""

    NOTHING = "nothing"
    OTHER_PASS = "other pass"
    SAME_PASS = "same pass"


def _travels(
    name: str,
    meaning: str,
    colour: str,
    flow: Callable[[Visit], Flow],
    time: Callable[[Times], float],
) -> str:
    """What moves rows of a layer."""

    def cost(a: Action, times: ModelTimes) -> float:
        return time(times.stage(a.stage))

    ahead = name[0] == "F"
    return declare_kind(
        Kind(
            name,
            meaning,
            colour,
            Duty.NONE,
            ahead,
            flow,
            cost,
            Clock.COMMUNICATION,
            parameters=False,
        )
    )


def _computes(
    name: str,
    meaning: str,
    colour: str,
    duty: Duty,
    flow: Callable[[Visit], Flow],
    time: Callable[[Times], float],
) -> str:
    """The part of a pass that is the experts' (``x``), or what comes before dispatch (``a``)."""

    def cost(a: Action, times: ModelTimes) -> float:
        found = times.stage(a.stage)
        return time(found) * (found.routed if name[1] == "x" else 1 - found.routed)

    return declare_kind(Kind(name, meaning, colour, duty, name[0] == "F", flow, cost))


def _local(read: str, write: str) -> Callable[[Visit], Flow]:
    """From one value to another of the same layer."""
    return lambda at: Flow(
        (Value(read, at.stage, at.microbatch),),
        (Value(write, at.stage, at.microbatch),),
    )


def _begin(at: Visit) -> Flow:
    reads = () if at.before is None else (Value("act", at.before, at.microbatch),)
    return Flow(reads, (Value("rows", at.stage, at.microbatch),))


def _experts(at: Visit) -> Flow:
    reads, writes = _local("arrived", "made")(at)
    return Flow(reads, (*writes, Value("saved", at.stage, at.microbatch)))


def _combine(at: Visit) -> Flow:
    reads, writes = _local("made", "combined")(at)
    return Flow(
        reads,
        writes
        if at.after is None
        else (Value("act", at.stage, at.microbatch), *writes),
    )


def _combine_back(at: Visit) -> Flow:
    reads, writes = _local("combined", "d_made")(at)
    return Flow(
        reads if at.after is None else (Value("grad", at.after, at.microbatch), *reads),
        writes,
    )


def _begin_back(at: Visit) -> Flow:
    reads = (
        Value("d_rows", at.stage, at.microbatch),
        Value("saved", at.stage, at.microbatch),
    )
    return Flow(
        reads, () if at.before is None else (Value("grad", at.stage, at.microbatch),)
    )


def _begin_input(at: Visit) -> Flow:
    reads, writes = _begin_back(at)
    return Flow(reads, (*writes, Value("tape", at.stage, at.microbatch)))


#: What each pass of a layer with experts consists of, in order; any other has no exchange in it.
PARTS = {
    "F": (
        _computes("Fa", "forward to dispatch", "#2563eb", Duty.NONE, _begin, lambda t: t.forward),
        _travels("Fd", "dispatch", "#b91c1c", _local("rows", "arrived"), lambda t: t.dispatch),
        _computes("Fx", "experts", "#60a5fa", Duty.FORWARD, _experts, lambda t: t.forward),
        _travels("Fc", "combine", "#f472b6", _combine, lambda t: t.combine),
    ),
    "B": (
        _travels("Bc", "gradients of combine", "#7c5a3a", _combine_back, lambda t: t.combine * t.back),
        _computes("Bx", "backward of experts", "#4ade80", Duty.NONE, _local("d_made", "d_arrived"),
                  lambda t: t.backward),
        _travels("Bd", "gradients of dispatch", "#a3a31a", _local("d_arrived", "d_rows"),
                 lambda t: t.dispatch * t.back),
        _computes("Ba", "backward to the input", "#15803d", Duty.BACKWARD, _begin_back, lambda t: t.backward),
    ),
}  # fmt: skip
PARTS["I"] = (
    "Bc",
    _computes("Ix", "input gradient of experts", "#5eead4", Duty.NONE, _local("d_made", "d_arrived"),
              lambda t: t.backward_input),
    "Bd",
    _computes("Ia", "input gradient", "#0b7a6e", Duty.INPUT_GRADIENT, _begin_input, lambda t: t.backward_input),
)  # fmt: skip


def with_exchanges(
    table: Table, layers: Sequence[int], beside: Beside = Beside.NOTHING
) -> Table:
    """``table`` layer by layer, each a stage with an exchange in it; ``layers``: how many each of its stages has.

    Beside nothing, an action begins when the one before it on its rank has ended, as :func:`weft.schedule.execute` runs
    them; a rank waits for what travels.
    """
    first = [0, *accumulate(layers)]

    def parts(entry: Entry) -> list[Entry]:
        kind, stage, m = entry
        inside = range(first[stage], first[stage + 1])
        return [
            (part, i, m)
            for i in (inside if kind == "F" else inside[::-1])
            for part in PARTS.get(kind, (kind,))
        ]

    orders = []
    for actions in table.ranks:
        order: list[Entry] = []
        for one, other in _turns([a.key for a in actions], beside):
            # of two of a kind, one computes as the other sends
            late = [None] if other and one[0] == other[0] else []
            pairs = zip_longest(parts(one), [*late, *(parts(other) if other else [])])
            order += [part for pair in pairs for part in pair if part]
        orders.append(order)
    paths = [
        [i for s in path for i in range(first[s], first[s + 1])] for path in table.paths
    ]
    found = assemble(table.name, orders, first[-1], paths)
    if beside is Beside.NOTHING:
        ranks = [
            [*actions[:1], *(replace(b, deps=(a.key,)) for a, b in pairwise(actions))]
            for actions in found.ranks
        ]
        found = replace(found, ranks=tuple(map(tuple, ranks)))
    return found


def _turns(
    order: Sequence[Entry], beside: Beside
) -> Iterator[tuple[Entry, Entry | None]]:
    """The entries of ``order``, those that take turns in pairs."""
    i = 0
    while i < len(order):
        one, other = order[i], order[i + 1] if i + 1 < len(order) else None
        if other and (
            one[0] not in PARTS or one[2] == other[2] or not _match(one, other, beside)
        ):
            other = None
        yield one, other
        i += 1 + (other is not None)


def _match(one: Entry, other: Entry, beside: Beside) -> bool:
    if beside is Beside.SAME_PASS:
        return one[:2] == other[:2]
    return beside is Beside.OTHER_PASS and one[0] == "F" and other[0] in ("B", "I")


def best_turns(
    table: Table, layers: Sequence[int], costs: Costs
) -> dict[Beside, Simulation]:
    """``table`` with its exchanges one after the other, and beside other microbatches in each way in which it runs."""
    found = {}
    for beside in Beside:
        try:
            found[beside] = simulate(with_exchanges(table, layers, beside), costs)
        except ScheduleError:  # ranks would wait for each other in a circle
            continue
    return found
