"""FedFix: the model changes at fixed times, with unbiased weights (Fraboni et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, PositiveFloat

from weft.federated.policy import (
    AssignedWork,
    ClientUpdate,
    FederationPolicy,
    ModelChange,
    update_state,
)
from weft.registry import register
from weft.section import Section

if TYPE_CHECKING:
    from weft.recipe.federated_section import Federated


class FedFixSettings(Section):
    """Settings of FedFix: the time between two changes of the model, and the weight of slow clients."""

    tick: PositiveFloat = Field(
        60.0,
        description="Seconds between two changes of the model; if clients are simulated, seconds of simulated time.",
    )
    unbiased: bool = Field(
        True,
        description=(
            "Whether an update is multiplied by the number of ticks (see 'tick') that the client took for it. Slow "
            "clients, whose updates are rarer, then count as federated.weights says in the long run. If false, they "
            "count less."
        ),
    )


@register(
    "federation-policy",
    "fedfix",
    title="FedFix: changes at fixed times, unbiased",
    paper="Fraboni et al. 2023",
    recipe="federated.toml --set federated.policy=fedfix",
    proof="tests/federated/test_degenerate.py, tests/federated/test_shares.py",
    figure="a tick longer than the slowest client is FedAvg, to the last bit",
    settings=FedFixSettings,
    draws={"tick": (30.0, 1000.0), "unbiased": (True, False)},
)
class FedFix(FederationPolicy):
    """Changes the model every ``tick`` seconds by the updates that have come since the last change (Fraboni et al.
    2023). A client that has sent its update waits for the next tick, and then goes on with the new model. The update of
    client ``i`` is weighted by ``d_i p_i``. ``p_i`` is the client's share, and ``d_i`` the number of ticks from the
    beginning of its work to the change: ``ceil(time / tick)`` for work that begins at a tick. Over many ticks every
    client then has its share, whatever its speed, and no speed has to be known.
    """

    def __init__(self, settings: Federated) -> None:
        super().__init__(settings)
        own = settings.own(FedFixSettings)
        self.tick = own.tick
        self.unbiased = own.unbiased
        self.origin: float | None = None
        self.ticks = 0
        self.arrived: list[ClientUpdate] = []
        # number of the last tick before the client's work began
        self.begun_at: dict[str, int] = {}

    def starts(self, now: float) -> Sequence[AssignedWork]:
        if self.origin is None:
            self.origin = now
        if not self.arrived and not self._in_flight():
            self.ticks = max(self.ticks, math.floor((now - self.origin) / self.tick))
        waiting = {update.client for update in self.arrived}
        work = [each for each in super().starts(now) if each.client not in waiting]
        self.begun_at |= {client: self.ticks for client, _ in work}
        return work

    def received(
        self, update: ClientUpdate, staleness: int, now: float
    ) -> ModelChange | None:
        self.arrived.append(update)
        return None

    def next_time(self) -> float | None:
        if self.origin is None or not (self.arrived or self._in_flight()):
            return None
        return self.origin + (self.ticks + 1) * self.tick

    def time_up(self, now: float) -> ModelChange | None:
        due = self.next_time()
        if due is None or now < due:
            return None
        self.ticks += 1
        arrived = self.arrived
        self.arrived = []
        if not arrived:
            return None
        return self.change(arrived, [self._weight(update.client) for update in arrived])

    def _weight(self, client: str) -> float:
        ticks = self.ticks - self.begun_at[client] if self.unbiased else 1
        return self.settings.rate * self.share(client) * ticks

    def _in_flight(self) -> bool:
        return any(member.version is not None for member in self.members.values())

    def own_state(self) -> dict[str, Any]:
        return {
            "origin": self.origin,
            "ticks": self.ticks,
            "arrived": [update_state(update) for update in self.arrived],
            "begun_at": dict(self.begun_at),
        }

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.origin = state["origin"]
        self.ticks = state["ticks"]
        self.arrived = [ClientUpdate(**update) for update in state["arrived"]]
        self.begun_at = dict(state["begun_at"])
