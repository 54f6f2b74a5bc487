"""Kinds of actions. The technique that needs a kind declares it once, with its duties, values, cost and colour.

Validation, lowering, the simulator, pictures and the executor have no list of kinds. A technique that needs a new kind
(an exchange of experts, a copy to the host) declares it and puts such actions into tables.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag, auto
from functools import cached_property
from typing import Any, NamedTuple

from weft.schedule.times import ModelTimes


class Duty(Flag):
    """The parts of a stage's work for a microbatch, as flags: forward, input gradient and weight gradient.

    A schedule must contain each part once for every stage and microbatch, and the same rank must do all three.
    ``BACKWARD`` is ``INPUT_GRADIENT`` and ``WEIGHT_GRADIENT`` together. ``ALL`` is all three parts. ``NONE`` marks an
    action that does none of them, such as a transfer.
    """

    NONE = 0
    FORWARD = auto()
    INPUT_GRADIENT = auto()
    WEIGHT_GRADIENT = auto()
    BACKWARD = INPUT_GRADIENT | WEIGHT_GRADIENT
    ALL = FORWARD | BACKWARD


class Clock(Enum):
    """The stream of a rank on which an action runs: compute or communication.

    Each stream runs its actions one after the other, and both streams run at the same time.
    """

    COMPUTE = "compute"
    COMMUNICATION = "communication"


class Visit(NamedTuple):
    """A microbatch at one of the pipeline stages that it passes.

    ``stage``, ``microbatch``: their numbers. ``before``, ``after``: numbers of the stages that the microbatch passes
    just before and just after this one; None if there is none.
    """

    stage: int
    microbatch: int
    before: int | None
    after: int | None

    def value(self, name: str) -> "Value":
        """Return the value called ``name``, such as ``saved``, of this microbatch at this stage."""
        return Value(name, self.stage, self.microbatch)

    def input(self) -> "tuple[Value, ...]":
        """Return the output of the stage before, which this stage's forward reads; empty at the first stage."""
        if self.before is None:
            return ()
        return (Value("act", self.before, self.microbatch),)

    def output_gradient(self) -> "tuple[Value, ...]":
        """Return the gradient of the next stage's input, which this stage's backward reads; empty at the last stage."""
        if self.after is None:
            return ()
        return (Value("grad", self.after, self.microbatch),)

    def input_gradient(self) -> "tuple[Value, ...]":
        """Return the gradient of this stage's input; empty at the first stage, where no other stage reads it."""
        return () if self.before is None else (self.value("grad"),)


class Value(NamedTuple):
    """Identifier of a result of one action that other actions read, such as a stage's output for one microbatch.

    ``name``: kind of the result; ``stage``, ``microbatch``: their numbers. Every schedule has these kinds: ``act``,
    the output of the stage; ``grad``, the gradient of the stage's input; ``saved``, the tensors that the stage's
    backward needs; ``tape``, the part of ``saved`` that a postponed weight gradient needs. ``saved`` and ``tape`` never
    leave the rank that has computed them.
    """

    name: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.name}({self.stage},{self.microbatch})"


class Flow(NamedTuple):
    """The values that an action ``reads`` and ``writes``.

    A value is a result of one action that other actions read, such as a stage's output.
    """

    reads: tuple[Value, ...]
    writes: tuple[Value, ...]


def duty_time(action: Any, times: ModelTimes) -> float:
    """Return the modelled time of ``action``: the sum of its stage's times for the duties that the action does.

    A duty is the forward or one of the two parts of backward (:class:`Duty`). ``times``: times of all stages of the
    model. A :class:`Kind` without a ``cost`` of its own uses this function.
    """
    stage, duties = times.stage(action.stage), action.declared.duties
    return (
        duties.forward * stage.forward
        + duties.input_gradient * stage.backward_input
        + duties.weight_gradient * stage.backward_weight
    )


class Duties(NamedTuple):
    """The duties of a kind of action: whether an action of the kind computes each of three parts of a stage's work.

    ``forward``: the stage's output; ``input_gradient``: the gradient of its input; ``weight_gradient``: the gradients
    of its weights.
    """

    forward: bool
    input_gradient: bool
    weight_gradient: bool


@dataclass(frozen=True)
class Kind:
    """A kind of action, as :func:`declare_kind` registers it.

    Attributes:
        ``name``: the name by which actions refer to the kind, such as ``F``.
        ``meaning``: a few words for legends.
        ``colour``: ``#rrggbb`` in pictures; "" takes a colour of the palette.
        ``duty``: which of a stage's forward, input gradient and weight gradient the action does. After a weight
            gradient, gradients of parameters are reduced.
        ``forward``: whether the action is part of evaluation, which runs no backward.
        ``flow``: function that returns the values which an action of the kind reads and writes when a microbatch visits
            a stage; None if each action states its values itself.
        ``cost``: function that returns the modelled time of an action, from the action and the model's times.
        ``clock``: the stream on which the action runs.
        ``parameters``: whether the action uses its stage's parameters, which are then gathered before it.
        ``inserted``: whether actions of the kind (transfers, gathers, frees) are added only by
            :func:`weft.schedule.lower.lower`. They take no time in the simulator. An executor without an operation for
            the kind skips them.
    """

    name: str
    meaning: str = ""
    colour: str = ""
    duty: Duty = Duty.NONE
    forward: bool = False
    flow: Callable[[Visit], Flow] | None = None
    cost: Callable[[Any, ModelTimes], float] = duty_time
    clock: Clock = Clock.COMPUTE
    parameters: bool = True
    inserted: bool = False

    @cached_property
    def duties(self) -> Duties:
        """The parts of a stage's work (forward, input gradient, weight gradient) that an action of this kind does."""
        return Duties(*(duty in self.duty for duty in Duty.ALL))


#: Declared kinds by name, in the order of declaration.
KINDS: dict[str, Kind] = {}


def declare_kind(kind: Kind) -> str:
    """Register ``kind``, and return its name, by which actions refer to it. Raises ValueError if the name is taken."""
    if kind.name in KINDS:
        raise ValueError(
            f"a kind {kind.name!r} is declared already ({KINDS[kind.name].meaning}); choose another name"
        )
    KINDS[kind.name] = kind
    return kind.name


def kind_of(name: str) -> Kind:
    """Return the declaration of the kind ``name``. An undeclared kind counts as a computation without duties."""
    return KINDS.get(name) or Kind(name)
