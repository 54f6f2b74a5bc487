"""Rounds whose clients correct their gradients by vectors of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.federated.policy import ClientUpdate, Differences, ModelChange
from weft.federated.round_policy import RoundPolicy
from weft.federated.weighted_sum import weighted_sum


class CorrectedRounds(RoundPolicy):
    """Base class of round policies that correct clients' gradients with vectors sent along with the model.

    There are two vectors. The direction ``g`` is the mean gradient of the last round: ``sum_i w_i (x - x_i)``, divided
    by the sum of the learning rates of a client's steps. Here ``x`` is the model that clients were sent, ``x_i`` the
    model of client ``i`` after its steps, and ``w_i`` the weight of its update. The control variate ``c`` is the mean
    of the clients' own control variates, weighted by their shares among all clients.
    :class:`weft.federated.policy.ClientStep` defines the correction.
    """

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.direction: Differences = {}
        self.control: Differences = {}

    def sent(self) -> Mapping[str, Differences]:
        vectors: dict[str, Differences] = {}
        if self.client_step.beta != 1.0 and self.direction:
            vectors["direction"] = self.direction
        if self.client_step.control and self.control:
            vectors["control"] = self.control
        return vectors

    def round_change(
        self, change: ModelChange, answers: Sequence[ClientUpdate]
    ) -> ModelChange:
        total = sum(change.weights)
        rates = {update.client: update.rates for update in answers}
        travelled = sum(
            weight * rates[client]
            for client, weight in zip(change.clients, change.weights, strict=True)
        )
        if self.client_step.beta != 1.0 and travelled > 0:
            # sum_i w_i (x - x_i), without the server's rate, over the mean sum of learning rates
            factor = -1 / self.settings.rate / (travelled / total)
            self.direction = {name: tensor * factor for name, tensor in change.difference.items()}  # fmt: skip
        if self.client_step.control:
            moved = [update for update in answers if "control" in update.extra]
            shares = [self.share(update.client) for update in moved]
            if moved:
                change_of_control = weighted_sum([update.extra["control"] for update in moved], shares)  # fmt: skip
                self.control = {
                    name: self.control[name] + tensor if self.control else tensor
                    for name, tensor in change_of_control.items()
                }
        return change

    def own_state(self) -> dict[str, Any]:
        return super().own_state() | {
            "direction": dict(self.direction),
            "control": dict(self.control),
        }

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        super().load_own_state(state)
        self.direction = dict(state["direction"])
        self.control = dict(state["control"])
