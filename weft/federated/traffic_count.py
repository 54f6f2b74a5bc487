"""Bytes that simulated clients and their server would send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.federated.policy import Differences, FederationPolicy
    from weft.federated.virtual_clock import FederationEvent


class TrafficCount:
    """Counts the bytes of tensors that a simulated federation sends; names and headers are not counted.

    Clients receive the model and the policy's further vectors. They send the difference of their parameters and, with
    control variates, the change of their control variate, which has the same size. ``parameters``: the model.

    Attributes:
        ``down``: bytes that the server has sent so far.
        ``up``: bytes that clients have sent so far.
        ``by_client``: bytes in both directions by client.
    """

    def __init__(self, parameters: Differences) -> None:
        self._size = sum(t.numel() * t.element_size() for t in parameters.values())
        self.down = self.up = 0
        self.by_client: dict[str, int] = {}

    @property
    def total(self) -> int:
        """Number of bytes that were sent in both directions together."""
        return self.down + self.up

    def count(
        self, events: Iterable[FederationEvent], policy: FederationPolicy
    ) -> None:
        """Add the bytes that were sent for ``events``.

        ``policy``: tells which further vectors are sent with the model.
        """
        for event in events:
            bytes_sent = 0
            if event.kind == "start":
                # before the first change there is nothing beside the model
                beside = len(policy.sent()) if event.version else 0
                bytes_sent = self._size * (1 + beside)
                self.down += bytes_sent
            elif event.kind == "update":
                bytes_sent = self._size * (2 if policy.client_step.control else 1)
                self.up += bytes_sent
            if bytes_sent:
                self.by_client[event.client] = self.by_client.get(event.client, 0) + bytes_sent  # fmt: skip

    def state_dict(self) -> dict[str, object]:
        """Return the counts so far as plain values, for a checkpoint; :meth:`load_state_dict` restores them."""
        return {"down": self.down, "up": self.up, "by_client": dict(self.by_client)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the counts from ``state``, which :meth:`state_dict` returned."""
        self.down, self.up = state["down"], state["up"]  # type: ignore[assignment]
        self.by_client = dict(state["by_client"])  # type: ignore[call-overload]
