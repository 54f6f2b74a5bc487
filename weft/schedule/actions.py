"""A schedule is a table: for every rank its actions in program order, with what each reads and writes.

Kinds are open. The usual ones are ``F`` forward, ``B`` backward, and, where backward is split (Qi et al. 2023), ``I``
the gradient of the input and ``W`` that of the weights. Builders (:mod:`weft.schedule.build`) give the order as plain
``(kind, stage, microbatch)`` triples; :func:`assemble` adds who reads what. Moves between ranks are not written down:
:func:`weft.schedule.lower.lower` derives them, because a value that is read elsewhere must travel.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.errors import WeftError


class Value(NamedTuple):
    """What one action hands to others.

    ``act``: output of a stage; ``grad``: gradient of a stage's input; ``saved``: what a stage's backward needs;
    ``tape``: what is left of that for the weight gradient. The last two never leave their rank.
    """

    name: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.name}({self.stage},{self.microbatch})"


#: Values that stay where they were made.
LOCAL = ("saved", "tape")

#: What stands for an action in the dependencies of another: unique in a table before lowering.
Key = tuple[str, int, int]

#: The order of one rank: ``(kind, stage, microbatch)``.
Order = Sequence[Key]


@dataclass(frozen=True)
class Action:
    """One entry of a table. ``deps``: actions that must have ended although nothing is handed over."""

    rank: int
    kind: str
    stage: int
    microbatch: int
    deps: tuple[Key, ...] = ()
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    peer: int = -1  # the other rank of a move

    @property
    def key(self) -> Key:
        return (self.kind, self.stage, self.microbatch)

    def __str__(self) -> str:
        moved = f" {'->' if self.kind == 'SEND' else '<-'} {self.peer}" if self.peer >= 0 else ""
        what = (
            ", ".join(map(str, self.reads or self.writes)) if self.kind in MOVES else f"{self.stage},{self.microbatch}"
        )
        return f"{self.kind}({what}){moved} on rank {self.rank}"


#: Actions that :func:`weft.schedule.lower.lower` inserts and that compute nothing.
MOVES = ("SEND", "RECV", "FREE", "GATHER", "RELEASE", "REDUCE")


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
        return tuple(r for r, actions in enumerate(self.ranks) if any(a.stage == stage for a in actions))

    def held(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` computes with, in model order."""
        return tuple(sorted({a.stage for a in self.ranks[rank] if a.stage < self.stages}))

    def map(self, change: Callable[[Action], Action]) -> "Table":
        return replace(self, ranks=tuple(tuple(change(a) for a in actions) for actions in self.ranks))


class ScheduleError(WeftError):
    """A table that cannot run; the message names the actions."""


def assemble(name: str, orders: Sequence[Order], stages: int, paths: Sequence[Sequence[int]]) -> Table:
    """The table of these per-rank orders of F, B, I and W: what reads what follows from each microbatch's path.

    Raises :class:`ScheduleError` for a kind that is none of these or a stage that is not on the microbatch's path.
    """
    neighbours = [
        {s: (path[i - 1] if i else None, path[i + 1] if i + 1 < len(path) else None) for i, s in enumerate(path)}
        for path in paths
    ]
    ranks = []
    for rank, order in enumerate(orders):
        actions = []
        for kind, stage, microbatch in order:
            if kind not in FLOWS:
                raise ScheduleError(f"unknown kind {kind!r} in schedule {name}; a builder may use {', '.join(FLOWS)}")
            if not 0 <= microbatch < len(paths) or stage not in neighbours[microbatch]:
                raise ScheduleError(f"{kind}({stage},{microbatch}) of schedule {name} is on no microbatch's path")
            reads, writes = FLOWS[kind](stage, microbatch, *neighbours[microbatch][stage])
            actions.append(Action(rank, kind, stage, microbatch, (), reads, writes))
        ranks.append(tuple(actions))
    return Table(name, tuple(ranks), stages, tuple(tuple(p) for p in paths))


Flow = tuple[tuple[Value, ...], tuple[Value, ...]]


def _forward(s: int, m: int, before: int | None, after: int | None) -> Flow:
    reads = () if before is None else (Value("act", before, m),)
    sent = () if after is None else (Value("act", s, m),)
    return reads, (*sent, Value("saved", s, m))


def _backward(s: int, m: int, before: int | None, after: int | None) -> Flow:
    # The gradient that a stage reads is that of the next stage's input.
    reads = () if after is None else (Value("grad", after, m),)
    return (*reads, Value("saved", s, m)), () if before is None else (Value("grad", s, m),)


def _input(s: int, m: int, before: int | None, after: int | None) -> Flow:
    reads, writes = _backward(s, m, before, after)
    return reads, (*writes, Value("tape", s, m))


def _weight(s: int, m: int, before: int | None, after: int | None) -> Flow:
    return (Value("tape", s, m),), ()


#: Kind -> what it reads and writes, given stage, microbatch, and the stages before and after on the path.
FLOWS: dict[str, Callable[[int, int, int | None, int | None], Flow]] = {
    "F": _forward,
    "B": _backward,
    "I": _input,
    "W": _weight,
}
