"""A schedule is a table: for every rank its actions in the order of execution, with what each reads and writes.

Kinds are open (:mod:`weft.schedule.kinds`). The passes of a pipeline, declared below, are ``F`` forward, ``B``
backward, and, where backward is split (Qi et al. 2023), ``I`` the gradient of the input and ``W`` that of the weights.
Builders (:mod:`weft.schedule.build`) give the order as plain ``(kind, stage, microbatch)`` triples; :func:`assemble`
adds what each reads and writes. Moves between ranks are not part of it: :func:`weft.schedule.lower.lower` derives them
from values that are read on another rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.errors import WeftError
from weft.schedule.kinds import (
    KINDS,
    Duty,
    Flow,
    Kind,
    Value,
    Visit,
    declare_kind,
    kind_of,
)

#: Values that stay where they were made.
LOCAL = ("saved", "tape")


class Key(NamedTuple):
    """Names an action in the dependencies of another one; unique in a table before lowering."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}({self.stage},{self.microbatch})"


#: One entry of an order: ``(kind, stage, microbatch)``.
Entry = tuple[str, int, int]

#: The order of one rank.
Order = Sequence[Entry]


@dataclass(frozen=True)
class Action:
    """One entry of a table. ``deps``: actions that must end before it, although it reads nothing from them."""

    rank: int
    kind: str
    stage: int
    microbatch: int
    deps: tuple[Entry, ...] = ()
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    peer: int = -1  # the other rank of a move

    @property
    def key(self) -> Key:
        return Key(self.kind, self.stage, self.microbatch)

    @property
    def declared(self) -> Kind:
        return kind_of(self.kind)

    def __str__(self) -> str:
        moved = f" {'->' if self.reads else '<-'} {self.peer}" if self.peer >= 0 else ""
        values = (
            ", ".join(map(str, self.reads or self.writes))
            if self.declared.inserted
            else ""
        )
        return f"{self.kind}({values or f'{self.stage},{self.microbatch}'}){moved} on rank {self.rank}"


@dataclass(frozen=True)
class Table:
    """``ranks[r]``: the actions of rank ``r`` in the order in which it runs them.

    ``stages``: model stages, in model order; a stage may be held by several ranks (DualPipe) and a rank may hold
    several. ``paths[m]``: the stages that microbatch ``m`` passes, in order (all of them, but for SkipPipe).
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    stages: int
    paths: tuple[tuple[int, ...], ...]

    @property
    def microbatches(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[Action]:
        return (action for actions in self.ranks for action in actions)

    def holders(self, stage: int) -> tuple[int, ...]:
        """The ranks that compute with ``stage``'s parameters."""
        return tuple(
            r
            for r, actions in enumerate(self.ranks)
            if any(a.stage == stage for a in actions)
        )

    def held(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` computes with, in model order."""
        return tuple(
            sorted({a.stage for a in self.ranks[rank] if a.stage < self.stages})
        )

    def map(self, change: Callable[[Action], Action]) -> "Table":
        return replace(
            self,
            ranks=tuple(tuple(change(a) for a in actions) for actions in self.ranks),
        )


class ScheduleError(WeftError):
    """A table that cannot run; the message names the actions."""


def assemble(
    name: str, orders: Sequence[Order], stages: int, paths: Sequence[Sequence[int]]
) -> Table:
    """The table with these orders, one per rank: what is read follows from kinds and from each microbatch's path.

    Raises :class:`ScheduleError` for a kind that is not declared with a flow, or a stage that is not on the
    microbatch's path.
    """
    places = {
        (stage, m): Visit(
            stage,
            m,
            path[i - 1] if i else None,
            path[i + 1] if i + 1 < len(path) else None,
        )
        for m, path in enumerate(paths)
        for i, stage in enumerate(path)
    }
    ranks = []
    for rank, order in enumerate(orders):
        actions = []
        for kind, stage, microbatch in order:
            flow = kind_of(kind).flow
            if flow is None:
                known = ", ".join(
                    name for name, declared in KINDS.items() if declared.flow
                )
                raise ScheduleError(
                    f"unknown kind {kind!r} in schedule {name}; declare it, or use one of {known}"
                )
            if (stage, microbatch) not in places:
                raise ScheduleError(
                    f"{kind}({stage},{microbatch}) of schedule {name} is on no microbatch's path"
                )
            actions.append(
                Action(
                    rank, kind, stage, microbatch, (), *flow(places[stage, microbatch])
                )
            )
        ranks.append(tuple(actions))
    return Table(name, tuple(ranks), stages, tuple(tuple(p) for p in paths))


def forward_half(table: Table) -> Table:
    """The part of a table that evaluation runs: no actions of the backward half, nor values that only they read."""
    kept = [[a for a in actions if a.declared.forward] for actions in table.ranks]
    made = {value for actions in kept for a in actions for value in a.writes}
    read = {value for actions in kept for a in actions for value in a.reads}

    def trim(a: Action) -> Action:
        return replace(
            a,
            writes=tuple(v for v in a.writes if v in read),
            reads=tuple(v for v in a.reads if v in made),
        )

    return replace(table, ranks=tuple(tuple(map(trim, actions)) for actions in kept))


def _forward(at: Visit) -> Flow:
    reads = () if at.before is None else (Value("act", at.before, at.microbatch),)
    sent = () if at.after is None else (Value("act", at.stage, at.microbatch),)
    return Flow(reads, (*sent, Value("saved", at.stage, at.microbatch)))


def _backward(at: Visit) -> Flow:
    # The gradient that a stage reads is that of the next stage's input.
    reads = () if at.after is None else (Value("grad", at.after, at.microbatch),)
    writes = () if at.before is None else (Value("grad", at.stage, at.microbatch),)
    return Flow((*reads, Value("saved", at.stage, at.microbatch)), writes)


def _input_gradient(at: Visit) -> Flow:
    reads, writes = _backward(at)
    return Flow(reads, (*writes, Value("tape", at.stage, at.microbatch)))


def _weight_gradient(at: Visit) -> Flow:
    return Flow((Value("tape", at.stage, at.microbatch),), ())


# Hues and lightnesses that survive colour blindness and a grey printer.
F = declare_kind(
    Kind("F", "forward", "#2563eb", Duty.FORWARD, forward=True, flow=_forward)
)
B = declare_kind(Kind("B", "backward", "#15803d", Duty.BACKWARD, flow=_backward))
I = declare_kind(
    Kind("I", "input gradient", "#0b7a6e", Duty.INPUT_GRADIENT, flow=_input_gradient)
)
W = declare_kind(
    Kind("W", "weight gradient", "#f0a021", Duty.WEIGHT_GRADIENT, flow=_weight_gradient)
)

#: The passes of a microbatch at a stage, in order, by whether backward is split.
PASSES = {False: (F, B), True: (F, I, W)}
