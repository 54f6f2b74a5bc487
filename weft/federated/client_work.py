"""What a client is asked to do, what it answers, and the interface of whatever carries both between it and a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import torch

    from weft.parallel.state import State
    from weft.train.step import StepContext

    Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class CohortShare:
    """A client's part in a secure sum.

    Attributes:
        ``cohort``: name of the sum, new for every sum.
        ``members``: the public key of each client of the cohort, by the client's name.
        ``share``: the factor with which this client's difference stands in the sum.
    """

    cohort: str
    members: Mapping[str, str]
    share: float


@dataclass(frozen=True)
class WorkOrder:
    """Local steps that a server asks of a client.

    Attributes:
        ``token``: name of this work, which the answer repeats; no other work has it.
        ``version``: version of the model with which the client begins.
        ``steps``: number of local steps.
        ``parameters``: the server's learning parameters.
        ``sent``: further vectors of the policy, by name.
        ``beta``: weight of the client's gradient against the direction that the server sends.
        ``control``: whether gradients are corrected by control variates.
        ``secure``: the client's part in a secure sum; None if the server may see the update.
    """

    token: str
    version: int
    steps: int
    parameters: Named
    sent: Mapping[str, Named] = field(default_factory=dict)
    beta: float = 1.0
    control: bool = False
    secure: CohortShare | None = None

    @property
    def is_plain(self) -> bool:
        """Whether gradients stay as they are."""
        return self.beta == 1.0 and not self.control


@dataclass(frozen=True)
class WorkAnswer:
    """What the local steps of a work gave.

    Attributes:
        ``order``: the work.
        ``difference``: the client's parameters minus those that it was sent.
        ``steps``: number of local steps taken.
        ``seconds``: their duration as the client measured it.
        ``rates``: sum of their learning rates.
        ``loss``: mean loss of the steps.
        ``samples``: number of samples that the client holds.
        ``extra``: further differences by name, such as that of the client's control variate.
    """

    order: WorkOrder
    difference: Named
    steps: int
    seconds: float
    rates: float
    loss: float
    samples: int
    extra: Mapping[str, Named] = field(default_factory=dict)


class ServerEnded(Exception):
    """Raised when the server has ended the run.

    Attributes:
        ``why``: a line about the end.
        ``parameters``: the final model; empty if the server did not send it.
    """

    def __init__(self, why: str, parameters: Named) -> None:
        super().__init__(why)
        self.why, self.parameters = why, parameters


class WorkSource(Protocol):
    """Interface of what brings work from a server and takes answers to it. The first rank of a client has one."""

    def join(self, about: Mapping[str, Any]) -> None:
        """Tell the server that this client is there. ``about``: what the client says of itself, as JSON values."""

    def next_order(self, limit: float) -> WorkOrder | None:
        """Return the next work; None if none has come within ``limit`` seconds.

        Raises :class:`ServerEnded` at the end of the run, and :class:`weft.errors.WeftError` if the server refuses this
        client or cannot be reached for too long.
        """

    def answer(self, answer: WorkAnswer) -> None:
        """Send the answer to a work. Returns at once; the answer is sent again until the server says that it has it."""

    def settled(self, limit: float) -> bool | None:
        """Return whether the server has taken the last answer; None if it has not said so within ``limit`` seconds."""

    def close(self) -> None:
        """End the connection."""


@dataclass
class PresentWork:
    """What the loader and the step of a client's run share: the work at hand.

    Attributes:
        ``order``: the work; None between works.
        ``correction``: for each learning parameter of this rank, what is added to a gradient.
        ``mean_gradient``: the sum so far of the gradients of this work, by parameter; empty if nobody needs it.
        ``losses``: the losses of this work's steps.
        ``context``: what the phases of the run's steps work on; None before the step is built.
        ``before_change``: returns when parameters may change.
    """

    order: WorkOrder | None = None
    correction: dict[str, torch.Tensor] = field(default_factory=dict)
    mean_gradient: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    context: StepContext | None = None

    @property
    def before_change(self) -> Callable[[], None]:
        assert self.context is not None, "the step of a client has been built"
        return self.context.before_update


_present: WeakKeyDictionary[State, PresentWork] = WeakKeyDictionary()


def present_work(state: State) -> PresentWork:
    """Return the work at hand of the run that trains ``state``, for its loader and its step alike."""
    return _present.setdefault(state, PresentWork())
