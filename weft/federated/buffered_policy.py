"""Buffers: the server changes its model as soon as a certain number of updates is there, whoever sent them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weft.federated.policy import (
    ClientUpdate,
    FederationPolicy,
    ModelChange,
    update_state,
)

if TYPE_CHECKING:
    from weft.recipe.federated_section import Federated


class BufferedPolicy(FederationPolicy):
    """Base class of asynchronous policies, which change the model after any ``size`` updates.

    A client continues with the newest model as soon as it has sent its update. A change sums ``size`` updates. Without
    correction, the weight of an update of client ``i`` is ``N p_i / size``. Here ``N`` is the number of clients, and
    ``p_i`` the client's share. Fast clients then count more than their share. With correction (``unbiased``) the weight
    is ``p_i / f_i``, where ``f_i`` is the client's mean number of updates per change so far. The mean weight of each
    client is then its share (Fraboni et al. 2023). Stale updates are discounted.
    """

    size = 1
    unbiased = False

    def __init__(self, settings: Federated) -> None:
        super().__init__(settings)
        self.buffer: list[tuple[ClientUpdate, int]] = []
        self.counts: dict[str, int] = {}

    def received(
        self, update: ClientUpdate, staleness: int, now: float
    ) -> ModelChange | None:
        self.buffer.append((update, staleness))
        self.counts[update.client] = self.counts.get(update.client, 0) + 1
        if len(self.buffer) < self.size:
            return None
        buffer = self.buffer
        self.buffer = []
        weights = [self._weight(update.client) * self.discount(staleness) for update, staleness in buffer]  # fmt: skip
        return self.change([update for update, _ in buffer], weights)

    def _weight(self, client: str) -> float:
        """Return the weight of a fresh update."""
        weight = self.settings.rate * self.share(client)
        if self.unbiased:
            return weight * ((self.version + 1) / self.counts[client])
        return weight * (len(self.members) / self.size)

    def own_state(self) -> dict[str, Any]:
        return {
            "buffer": [[update_state(update), staleness] for update, staleness in self.buffer],
            "counts": dict(self.counts),
        }  # fmt: skip

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.buffer = [(ClientUpdate(**update), staleness) for update, staleness in state["buffer"]]  # fmt: skip
        self.counts = dict(state["counts"])
