"""What a client does with a model that it is sent: its interface, for simulated and for real clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from weft.federated.policy import AssignedWork, ClientStep, Differences


@dataclass(frozen=True)
class LocalResult:
    """What a client's local steps gave.

    Attributes:
        ``difference``: its parameters minus those that it was sent.
        ``steps``: number of local steps.
        ``samples``: number of samples that the client holds.
        ``rates``: sum of the learning rates of its steps.
        ``loss``: mean loss of its steps.
        ``extra``: further differences by name.
    """

    difference: Differences
    steps: int
    samples: int
    rates: float
    loss: float
    extra: Mapping[str, Differences] = field(default_factory=dict)


class ClientCohort(Protocol):
    """Clients with their data, their optimizers, and what they keep from one work to the next.

    The samples of a work are a function of the seed, the client and the version of the model, so that work that is lost
    and given out again is the same work, on a virtual clock and in a process of its own.
    """

    def names(self) -> Sequence[str]:
        """Return the names of all clients."""

    def samples(self, client: str) -> int:
        """Return the number of samples that a client holds."""

    def train(
        self,
        work: Sequence[AssignedWork],
        version: int,
        parameters: Differences,
        sent: Mapping[str, Differences],
        step: ClientStep,
    ) -> list[LocalResult]:
        """Do the work of several clients that begin with the same model, and return a result for each.

        ``version``: version of the model ``parameters``. ``sent``: what a policy sends beside them. ``step``: how
        gradients are corrected. The arguments are not changed.
        """

    def settle(self, client: str, accepted: bool) -> None:
        """Keep what a client has learned in its last work (its control variate, the error that it fed back), or forget
        it, if the server has not taken its update.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what the clients keep between works, as tensors and plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
