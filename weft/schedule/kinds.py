"""The kinds of actions. Each is declared once, by the technique that needs it, with all that others must know of it.

Validation, lowering, the simulator, pictures and the executor have no list of kinds. A technique that needs a new one
(an exchange of experts, a copy to the host) declares it and puts such actions into tables; nothing here changes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag, auto
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from weft.schedule.times import ModelTimes


class Duty(Flag):
    """What must be done exactly once for every microbatch and every stage on its path, on one rank."""

    NONE = 0
    FORWARD = auto()
    INPUT_GRADIENT = auto()
    WEIGHT_GRADIENT = auto()
    BACKWARD = INPUT_GRADIENT | WEIGHT_GRADIENT
    ALL = FORWARD | BACKWARD


class Clock(Enum):
    """On which of a rank's two streams an action runs: each does its own actions in order, beside the other."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"


class Visit(NamedTuple):
    """A microbatch at a stage, and the stages before and after that one on its path (None at an end)."""

    stage: int
    microbatch: int
    before: int | None
    after: int | None


class Value(NamedTuple):
    """What one action makes for others.

    ``act``: output of a stage; ``grad``: gradient of a stage's input; ``saved``: what a stage's backward needs;
    ``tape``: what is left of that for the weight gradient. The last two never leave their rank.
    """

    name: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.name}({self.stage},{self.microbatch})"


class Flow(NamedTuple):
    """The values that an action reads and writes."""

    reads: tuple[Value, ...]
    writes: tuple[Value, ...]


class Declared(Protocol):
    """What the cost of an action follows from (:class:`weft.schedule.actions.Action`)."""

    @property
    def stage(self) -> int: ...

    @property
    def declared(self) -> "Kind": ...


def duty_time(action: Declared, times: ModelTimes) -> float:
    """The time of an action's duties on its stage: the cost of a kind that declares no other."""
    stage, (forward, inputs, weights) = (
        times.stage(action.stage),
        action.declared.duties,
    )
    return (
        forward * stage.forward
        + inputs * stage.backward_input
        + weights * stage.backward_weight
    )


@dataclass(frozen=True)
class Kind:
    """``name``: as it stands in actions; ``meaning``: in words, for legends; ``colour``: "" for one of a palette.

    ``duty``: what it does of a stage's duties; one with the duty of weight gradients leaves gradients of parameters
    behind, which are then reduced. ``forward``: belongs to the half that evaluation runs. ``flow``: what it reads and
    writes at a place of a microbatch's path; None if that does not follow from the path, so that whoever adds the
    action says it. ``cost(action, times)``: modelled time. ``parameters``: uses the parameters of its stage, which
    must then be gathered. ``inserted``: only lowering may add it, it takes no time in the simulator, and an executor
    without an operation for it passes over it.
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
    def duties(self) -> tuple[bool, bool, bool]:
        """Whether it runs forward, makes the gradient of the input, makes those of the weights."""
        return (
            Duty.FORWARD in self.duty,
            Duty.INPUT_GRADIENT in self.duty,
            Duty.WEIGHT_GRADIENT in self.duty,
        )


#: By name, in the order in which they were declared.
KINDS: dict[str, Kind] = {}


def declare_kind(kind: Kind) -> str:
    """Make ``kind`` known to all rooms. Returns its name, by which actions refer to it; a name is taken only once."""
    if kind.name in KINDS:
        raise ValueError(
            f"a kind {kind.name!r} is declared already ({KINDS[kind.name].meaning}); choose another name"
        )
    KINDS[kind.name] = kind
    return kind.name


def kind_of(name: str) -> Kind:
    """The declaration of this kind. A kind that nobody has declared counts as some computation without duties."""
    return KINDS.get(name) or Kind(name)
