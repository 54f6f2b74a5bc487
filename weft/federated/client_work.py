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
        ``share``: the factor of this client's difference in the sum.
    """

    cohort: str
    members: Mapping[str, str]
    share: float


@dataclass(frozen=True)
class WorkOrder:
    """Order of a server to a client: take local steps from this model.

    Attributes:
        ``token``: unique name of this order, which the answer repeats.
        ``version``: version of the model with which the client begins.
        ``steps``: number of local steps.
        ``parameters``: the server's learning parameters.
        ``sent``: further vectors of the policy, by name.
        ``beta``: weight of the client's own gradient, from 0 to 1; the rest is the weight of the server's direction.
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
        """Whether the client uses its gradients as they are, without a correction by vectors of the server."""
        return self.beta == 1.0 and not self.control


@dataclass(frozen=True)
class WorkAnswer:
    """Answer of a client to a work order: the result of its local steps.

    Attributes:
        ``order``: the work order.
        ``difference``: the client's parameters minus those that it was sent.
        ``steps``: number of local steps taken.
        ``seconds``: duration of the steps as the client measured it.
        ``rates``: sum of the steps' learning rates.
        ``loss``: mean loss of the steps.
        ``samples``: number of samples that the client holds.
        ``extra``: further differences by name, such as the change of the client's control variate.
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
    """Interface of a client's connection to its server: it receives work orders and sends answers.

    Only the client's first rank has it.
    """

    def join(self, about: Mapping[str, Any]) -> None:
        """Announce this client to the server. ``about``: the client's first message (hello), as JSON values."""

    def next_order(self, limit: float) -> WorkOrder | None:
        """Return the next work order; None if none has come within ``limit`` seconds.

        Raises :class:`ServerEnded` at the end of the run, and :class:`weft.errors.WeftError` if the server refuses this
        client or cannot be reached within the client's limit of time.
        """

    def answer(self, answer: WorkAnswer) -> None:
        """Queue the answer to a work order, and return at once. It is sent again until the server confirms it."""

    def settled(self, limit: float) -> bool | None:
        """Return whether the server has accepted the last answer; None without a reply within ``limit`` seconds."""

    def close(self) -> None:
        """End the connection to the server."""


@dataclass
class PresentWork:
    """The work order that a client works on, with its results so far; loader and step of the client's run share it.

    Attributes:
        ``order``: the work order; None between two orders.
        ``correction``: vector added to the gradient of each learning parameter of this rank.
        ``mean_gradient``: the sum so far of the order's gradients, by parameter; empty without control variates.
        ``losses``: the losses of the order's steps.
        ``context``: objects that the phases of the run's steps share; None before the step is built.
        ``before_change``: function to call before parameters are changed; it waits until that is safe.
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
    """Return the one :class:`PresentWork` of the run that trains ``state``; it is created at the first call."""
    return _present.setdefault(state, PresentWork())
