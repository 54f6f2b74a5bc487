"""Exchanges of experts as actions: stages are cut at dispatch and combine, so that others compute while rows travel.

====  =========================================================================================
Fa    forward of a layer up to its dispatch: attention and router
Fd    rows travel to their experts
Fx    forward of the experts
Fc    results of the experts travel back
Bc    gradients of these results travel to the experts
Bx    backward of the experts, or Ix, of their input alone
Bd    gradients of the rows travel back
Ba    backward of attention and router, or Ia, of their input alone
====  =========================================================================================

Rows travel on a rank's communication stream. Two microbatches on a rank then take turns: a forward and a backward
(DualPipe, DeepSeek-V3, 2412.19437; interleaved 1F1B), or two of a kind (its inference, 2505.09343).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from itertools import accumulate, pairwise, zip_longest

from weft.schedule.actions import Action, Entry, ScheduleError, Table, assemble
from weft.schedule.kinds import Clock, Duty, Flow, Kind, Visit, declare_kind
from weft.schedule.simulate import Costs, Simulation, simulate
from weft.schedule.times import ModelTimes, Times


class Beside(Enum):
    """What a rank computes while tokens of a microbatch's pass travel to experts on other ranks and back.

    ``NOTHING``: the rank waits. ``OTHER_PASS``: it computes the opposite pass of another microbatch: a backward while a
    forward's tokens travel, and a forward while a backward's tokens travel. ``SAME_PASS``: it computes the same pass,
    forward or backward, of another microbatch.
    """

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
    """Declare a kind that moves rows of a layer."""
    return declare_kind(
        Kind(
            name,
            meaning,
            colour,
            forward=name[0] == "F",
            flow=flow,
            cost=lambda a, times: time(times.stage(a.stage)),
            clock=Clock.COMMUNICATION,
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
    """Declare the part of a pass that the experts compute (``x``), or the part before dispatch (``a``)."""

    def cost(a: Action, times: ModelTimes) -> float:
        stage = times.stage(a.stage)
        return time(stage) * (stage.routed if name[1] == "x" else 1 - stage.routed)

    return declare_kind(Kind(name, meaning, colour, duty, name[0] == "F", flow, cost))


def _local(read: str, *write: str) -> Callable[[Visit], Flow]:
    """Return the flow from one value of a layer to others of the same layer."""
    return lambda at: Flow((at.value(read),), tuple(map(at.value, write)))


def _begin(at: Visit) -> Flow:
    return Flow(at.input(), (at.value("rows"),))


def _combine(at: Visit) -> Flow:
    sent = () if at.after is None else (at.value("act"),)
    return Flow((at.value("made"),), (*sent, at.value("combined")))


def _combine_back(at: Visit) -> Flow:
    return Flow((*at.output_gradient(), at.value("combined")), (at.value("d_made"),))


def _begin_back(at: Visit) -> Flow:
    return Flow((at.value("d_rows"), at.value("saved")), at.input_gradient())


def _begin_input(at: Visit) -> Flow:
    reads, writes = _begin_back(at)
    return Flow(reads, (*writes, at.value("tape")))


#: The parts of each pass of a layer with experts, in order; other passes have no exchange in them.
PARTS = {
    "F": (
        _computes("Fa", "forward to dispatch", "#2563eb", Duty.NONE, _begin, lambda t: t.forward),
        _travels("Fd", "dispatch", "#b91c1c", _local("rows", "arrived"), lambda t: t.dispatch),
        _computes("Fx", "experts", "#60a5fa", Duty.FORWARD, _local("arrived", "made", "saved"),
                  lambda t: t.forward),
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
    """Return ``table`` with each layer as a stage of its own, and with the exchanges of tokens between experts.

    In a layer with experts, tokens travel to experts on other ranks and back. ``layers``: the number of layers of each
    stage of ``table``. ``beside``: what a rank computes while tokens travel. With ``Beside.NOTHING`` it waits until the
    tokens are back: each of its actions depends on the action before it.
    """
    first = [0, *accumulate(layers)]
    layers_of = [range(a, b) for a, b in pairwise(first)]

    def parts(entry: Entry) -> list[Entry]:
        kind, stage, m = entry
        inside = layers_of[stage]
        return [
            (part, i, m)
            for i in (inside if kind == "F" else inside[::-1])
            for part in PARTS.get(kind, (kind,))
        ]

    orders = []
    for actions in table.ranks:
        order: list[Entry] = []
        for entry, partner in _turns([a.key for a in actions], beside):
            # of two of a kind, one computes as the other sends
            late = [None] if partner and entry[0] == partner[0] else []
            pairs = zip_longest(
                parts(entry), [*late, *(parts(partner) if partner else [])]
            )
            order += [part for pair in pairs for part in pair if part]
        orders.append(order)
    paths = [[i for s in path for i in layers_of[s]] for path in table.paths]
    cut = assemble(table.name, orders, first[-1], paths)
    if beside is not Beside.NOTHING:
        return cut
    in_turn = [
        [*actions[:1], *(replace(b, deps=(a.key,)) for a, b in pairwise(actions))]
        for actions in cut.ranks
    ]
    return replace(cut, ranks=tuple(map(tuple, in_turn)))


def _turns(
    order: Sequence[Entry], beside: Beside
) -> Iterator[tuple[Entry, Entry | None]]:
    """Iterate over the entries of ``order``; entries that take turns come as a pair."""
    entries = deque(order)
    while entries:
        entry = entries.popleft()
        pairs = entries and _match(entry, entries[0], beside)
        yield entry, entries.popleft() if pairs else None


def _match(entry: Entry, following: Entry, beside: Beside) -> bool:
    """Return whether two neighbouring entries take turns: passes of different microbatches, as ``beside`` says."""
    (kind, stage, m), (next_kind, next_stage, next_m) = entry, following
    if kind not in PARTS or m == next_m:
        return False
    if beside is Beside.SAME_PASS:
        return (kind, stage) == (next_kind, next_stage)
    return beside is Beside.OTHER_PASS and kind == "F" and next_kind in ("B", "I")


def best_turns(
    table: Table, layers: Sequence[int], costs: Costs
) -> dict[Beside, Simulation]:
    """Simulate ``table`` with exchanges of tokens between experts, once for each value of :class:`Beside`.

    Each value is a choice of what a rank computes while tokens travel. Returns the simulation of each choice, without
    choices in which ranks would wait for each other for ever. ``layers``: number of layers of each stage; ``costs``:
    times of actions and transfers, and memory of the values that actions exchange.
    """
    simulations = {}
    for beside in Beside:
        with suppress(ScheduleError):
            cut = with_exchanges(table, layers, beside)
            simulations[beside] = simulate(cut, costs)
    return simulations
