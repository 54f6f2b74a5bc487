"""A schedule is a table: for every rank its actions in the order of execution, with what each reads and writes.

Kinds are open (:mod:`weft.schedule.kinds`). The passes of a pipeline, declared below, are ``F`` forward, ``B``
backward, and, where backward is split (Qi et al. 2023), ``I`` the gradient of the input and ``W`` that of the weights.
Builders (:mod:`weft.schedule.build`) give the order as plain ``(kind, stage, microbatch)`` triples; :func:`assemble`
adds the values that each action reads and writes. A table holds no moves between ranks:
:func:`weft.schedule.lower.lower` derives them from values that are read on another rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.errors import WeftError, nearest
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

#: Values that never leave the rank that made them.
LOCAL = ("saved", "tape")


class Key(NamedTuple):
    """Name of an action in a schedule's table: its kind, stage and microbatch.

    ``kind``: name of the action's kind, such as ``F``; ``stage``, ``microbatch``: numbers of the stage and of the
    microbatch that the action works on. As long as a table has no transfers, no two of its actions have the same key.
    Transfers, which :func:`weft.schedule.lower.lower` inserts, may share one.
    """

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
    """An entry of a schedule's table: one thing that one rank does.

    Attributes:
        ``rank``: number of the rank in the pipeline.
        ``kind``: name of the action's kind (:class:`weft.schedule.kinds.Kind`), such as ``F``.
        ``stage``, ``microbatch``: stage and microbatch that the action works on.
        ``deps``: keys of actions that must end first, although this action reads none of their values.
        ``reads``, ``writes``: values that the action uses and makes.
        ``peer``: the other rank of a send or receive; -1 for all other actions.
    """

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
        values = self.declared.inserted and ", ".join(
            map(str, self.reads or self.writes)
        )
        return f"{self.kind}({values or f'{self.stage},{self.microbatch}'}){moved} on rank {self.rank}"


@dataclass(frozen=True)
class Table:
    """A pipeline schedule as a table: for each rank of the pipeline, its actions in the order in which it runs them.

    Attributes:
        ``name``: name of the schedule.
        ``ranks[r]``: the actions of rank ``r``.
        ``stages``: number of stages of the model. A rank may hold several. In some schedules (DualPipe) two ranks hold
            the same stage.
        ``paths[m]``: numbers of the stages that microbatch ``m`` passes, in order. These are all stages, unless the
            schedule lets microbatches skip some (SkipPipe).
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
        """Return the ranks that compute with the parameters of ``stage``, ascending."""
        ranks = {a.rank for a in self if a.stage == stage}
        return tuple(sorted(ranks))

    def held(self, rank: int) -> tuple[int, ...]:
        """List the indices of the stages that ``rank`` computes, in model order."""
        stages = {a.stage for a in self.ranks[rank] if a.stage < self.stages}
        return tuple(sorted(stages))

    def map(self, change: Callable[[Action], Action]) -> "Table":
        """Return the table with every action replaced by ``change(action)``."""
        return replace(
            self,
            ranks=tuple(tuple(change(a) for a in actions) for actions in self.ranks),
        )


class ScheduleError(WeftError):
    """Raised for a table that cannot run; the message names the actions."""


def assemble(
    name: str, orders: Sequence[Order], stages: int, paths: Sequence[Sequence[int]]
) -> Table:
    """Make the table ``name`` from each rank's order of actions.

    ``orders[r]``: the ``(kind, stage, microbatch)`` triples of rank ``r``; ``stages``: number of stages; ``paths[m]``:
    the stages that microbatch ``m`` passes. The values that an action reads and writes follow from the declaration of
    its kind (``flow`` of :class:`weft.schedule.kinds.Kind`) and from the microbatch's path. Raises
    :class:`ScheduleError` for a kind whose declaration has no flow, or for a stage that is not on the microbatch's
    path.
    """
    visits = {
        (stage, m): Visit(stage, m, before, after)
        for m, path in enumerate(paths)
        for before, stage, after in zip(
            (None, *path), path, (*path[1:], None), strict=False
        )
    }
    ranks = []
    for rank, order in enumerate(orders):
        actions = []
        for kind, stage, microbatch in order:
            flow = kind_of(kind).flow
            if flow is None:
                known = [kind.name for kind in KINDS.values() if kind.flow]
                raise ScheduleError(
                    f"unknown kind {kind!r} in schedule {name}; declare it, or {nearest(str(kind), known, True)}"
                )
            if (stage, microbatch) not in visits:
                raise ScheduleError(
                    f"{kind}({stage},{microbatch}) of schedule {name} is on no microbatch's path"
                )
            values = flow(visits[stage, microbatch])
            actions.append(Action(rank, kind, stage, microbatch, (), *values))
        ranks.append(tuple(actions))
    return Table(name, tuple(ranks), stages, tuple(tuple(p) for p in paths))


def forward_half(table: Table) -> Table:
    """Return the forward half of a table, which evaluation runs.

    Actions of backward are left out, and so are values that only backward reads.
    """
    kept = [[a for a in actions if a.declared.forward] for actions in table.ranks]
    written = {value for actions in kept for a in actions for value in a.writes}
    read = {value for actions in kept for a in actions for value in a.reads}

    def trim(a: Action) -> Action:
        reads = tuple(v for v in a.reads if v in written)
        return replace(a, reads=reads, writes=tuple(v for v in a.writes if v in read))

    return replace(table, ranks=tuple(map(tuple, kept))).map(trim)


def _forward(at: Visit) -> Flow:
    sent = () if at.after is None else (at.value("act"),)
    return Flow(at.input(), (*sent, at.value("saved")))


def _backward(at: Visit) -> Flow:
    return Flow((*at.output_gradient(), at.value("saved")), at.input_gradient())


def _input_gradient(at: Visit) -> Flow:
    reads, writes = _backward(at)
    return Flow(reads, (*writes, at.value("tape")))


def _weight_gradient(at: Visit) -> Flow:
    return Flow((at.value("tape"),), ())


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
