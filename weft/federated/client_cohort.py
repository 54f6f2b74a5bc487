"""What a client does with a model that it is sent: its interface, for simulated and for real clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from weft.federated.policy import AssignedWork, ClientStep, Differences


@dataclass(frozen=True)
class LocalResult:
    """Result of a client's local steps.

    Attributes:
        ``difference``: the client's parameters minus those that it was sent.
        ``steps``: number of local steps.
        ``samples``: number of samples that the client holds.
        ``rates``: sum of the learning rates of its steps.
        ``loss``: mean loss of its steps.
        ``extra``: further differences by name, such as the change of its control variate.
    """

    difference: Differences
    steps: int
    samples: int
    rates: float
    loss: float
    extra: Mapping[str, Differences] = field(default_factory=dict)


class ClientCohort(Protocol):
    """Interface of simulated clients: their data, their optimizers, and their state between two rounds of local steps.

    The samples of local steps depend only on the seed, the client and the version of the model. So steps that are lost
    and repeated use the same samples, and so do simulated clients and clients in processes of their own.
    """

    def names(self) -> Sequence[str]:
        """Return the names of all simulated clients, in a fixed order."""

    def samples(self, client: str) -> int:
        """Return the number of samples that the client named ``client`` holds."""

    def train(
        self,
        work: Sequence[AssignedWork],
        version: int,
        parameters: Differences,
        sent: Mapping[str, Differences],
        step: ClientStep,
    ) -> list[LocalResult]:
        """Take the local steps of several clients that begin with the same model, and return a result for each.

        ``work``: the clients, and how many steps each takes. ``version``: version of the model ``parameters``.
        ``sent``: further vectors of the policy, by name. ``step``: how gradients are corrected. The arguments are not
        changed.
        """

    def settle(self, client: str, accepted: bool) -> None:
        """Tell a client whether the server ``accepted`` its last update.

        If so, it keeps its new control variate and compression error; otherwise it goes back to the ones before.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that clients keep between local steps, as tensors and plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``, which :meth:`state_dict` returned: what clients keep between two rounds of local steps."""
