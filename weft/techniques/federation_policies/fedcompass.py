"""FedCompass: clients of different speed get so many steps that they arrive together (Li et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, PositiveInt, model_validator

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

#: Weight of a client's earlier speed against a new measurement.
EARLIER_SPEED = 0.1
#: Steps that are whole but for rounding.
ROUNDING = 1e-9


class FedCompassSettings(Section):
    """Settings of FedCompass: limits of a client's local steps, and how long a group of clients waits."""

    min_steps: PositiveInt = Field(
        20, description="Smallest number of local steps that the server gives a client."
    )
    max_steps: PositiveInt = Field(
        100,
        description=(
            "Largest number of local steps that the server gives a client. A new client first takes this many, "
            "so that its speed can be measured."
        ),
    )
    latest: float = Field(
        1.5,
        ge=1,
        description=(
            "How long the server waits for a group of clients that should arrive together, as a multiple of the "
            "time that it expects them to take. Later updates become part of the next change."
        ),
    )
    normalise: bool = Field(
        False,
        description=(
            "Whether an update is divided by the client's number of local steps and multiplied by federated.steps "
            "(FedNova), so that clients with more steps do not count more."
        ),
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_steps > self.max_steps:
            raise ValueError(
                f"min_steps = {self.min_steps} is more than max_steps = {self.max_steps}; lower it"
            )
        return self


@dataclass
class ArrivalGroup:
    """Clients whose updates are planned to arrive at the same time.

    Attributes:
        ``expected``: planned time of arrival in seconds.
        ``latest``: time after which the group no longer waits.
        ``waiting``: clients whose updates are still to come.
        ``arrived``: the updates that have come, each with its staleness.
    """

    expected: float
    latest: float
    waiting: list[str] = field(default_factory=list)
    arrived: list[tuple[ClientUpdate, int]] = field(default_factory=list)


@register(
    "federation-policy",
    "fedcompass",
    title="FedCompass: clients of different speed arrive together",
    paper="Li et al. 2024",
    recipe="federated.toml",
    proof="tests/federated/test_degenerate.py, tests/federated/test_classifiers.py",
    figure=(
        "equal speeds are FedAvg after the first round, to the last bit; on speeds `1, 1, 2, 4, "
        "8` a loss after 0.4 of the time of FedAvg with as many steps at most, with 1 to 4 steps "
        "after 0.857 of that of FedAvg with a single one (`bench/federated.py`)"
    ),
    settings=FedCompassSettings,
    draws={"max_steps": (40, 100), "normalise": (True, False)},
)
class FedCompass(FederationPolicy):
    """Chooses each client's number of local steps so that the updates of a group of clients arrive together (Li et al.
    2024). The server measures each client's speed, in seconds for a step. A client that begins joins the group whose
    expected arrival leaves it the most steps between ``min_steps`` and ``max_steps``. If there is no such group, the
    client opens a group of its own. That group is planned to arrive at the same time as the next round of an open
    group. The model changes when the last client of a group has arrived, or at the group's latest time. Updates that
    come later are part of the next change. An update is weighted by its client's share among all clients, less if it is
    stale. A client's first work, by which its speed is measured, changes the model by itself.
    """

    def __init__(self, settings: Federated) -> None:
        super().__init__(settings)
        self.own = settings.own(FedCompassSettings)
        self.speeds: dict[str, float] = {}
        self.groups: dict[int, ArrivalGroup] = {}
        self.group_of: dict[str, int] = {}
        self.late: list[tuple[ClientUpdate, int]] = []
        self._next_group = 0

    def starts(self, now: float) -> Sequence[AssignedWork]:
        # those that have arrived wait for the rest of their group
        idle = [client for client in self.idle() if client not in self.group_of]
        known = sorted((c for c in idle if c in self.speeds), key=self.speeds.__getitem__)  # fmt: skip
        new = [client for client in idle if client not in self.speeds]
        work = [AssignedWork(client, self._assign(client, now)) for client in known]
        return [*work, *(AssignedWork(client, self.own.max_steps) for client in new)]

    def _assign(self, client: str, now: float) -> int:
        """Put a client into a group, and return its number of steps."""
        speed = self.speeds[client]
        joined = [
            (steps, number)
            for number, group in self.groups.items()
            if group.waiting
            and self.own.min_steps <= (steps := _whole_steps(group.expected - now, speed)) <= self.own.max_steps
        ]  # fmt: skip
        if joined:
            steps, number = max(joined, key=lambda option: option[0])
            self.groups[number].waiting.append(client)
            self.group_of[client] = number
            return steps
        steps = self._steps_of_new_group(speed, now)
        duration = steps * speed
        group = ArrivalGroup(now + duration, now + self.own.latest * duration, [client])
        self.groups[self._next_group] = group
        self.group_of[client] = self._next_group
        self._next_group += 1
        return steps

    def _steps_of_new_group(self, speed: float, now: float) -> int:
        """Return the steps after which a client arrives together with the next round of an open group."""
        most = self.own.max_steps
        options = []
        for group in self.groups.values():
            if now < group.latest and group.waiting:
                fastest = min(self.speeds[client] for client in group.waiting)
                steps = _whole_steps(group.latest + most * fastest - now, speed)
                options += [steps] if steps <= most else []
        return max(self.own.min_steps, max(options, default=most))

    def received(
        self, update: ClientUpdate, staleness: int, now: float
    ) -> ModelChange | None:
        client = update.client
        measured = (now - self.members[client].began) / max(1, update.steps)
        before = self.speeds.get(client)
        if before is not None:
            measured = EARLIER_SPEED * before + (1 - EARLIER_SPEED) * measured
        self.speeds[client] = measured
        number = self.group_of.get(client)
        if before is None:
            return self._aggregate([(update, staleness)])
        if number is None:
            # its group has gone on without it
            self.late.append((update, staleness))
            return None
        group = self.groups[number]
        group.waiting.remove(client)
        group.arrived.append((update, staleness))
        return None if group.waiting else self._end(number)

    def left(self, client: str, now: float) -> None:
        number = self.group_of.get(client)
        if number is None or client not in self.groups[number].waiting:
            return
        del self.group_of[client]
        group = self.groups[number]
        group.waiting.remove(client)
        if not group.waiting:
            group.latest = now

    def next_time(self) -> float | None:
        return min((group.latest for group in self.groups.values()), default=None)

    def time_up(self, now: float) -> ModelChange | None:
        due = [number for number, group in self.groups.items() if group.latest <= now]
        return self._end(due[0]) if due else None

    def _end(self, number: int) -> ModelChange | None:
        """Close a group, and change the model by its updates and those that came late to earlier ones."""
        group = self.groups.pop(number)
        for client in [*group.waiting, *(update.client for update, _ in group.arrived)]:
            del self.group_of[client]
        updates = group.arrived + self.late
        self.late = []
        return self._aggregate(updates) if updates else None

    def _aggregate(self, updates: Sequence[tuple[ClientUpdate, int]]) -> ModelChange:
        weights = []
        for update, staleness in updates:
            weight = self.settings.rate * self.share(update.client)
            if self.own.normalise:
                weight *= self.settings.steps / update.steps
            weights.append(weight * self.discount(staleness))
        return self.change([update for update, _ in updates], weights)

    def own_state(self) -> dict[str, Any]:
        return {
            "speeds": dict(self.speeds),
            "groups": [
                [number, group.expected, group.latest, [*group.waiting], _stored(group.arrived)]
                for number, group in self.groups.items()
            ],
            "late": _stored(self.late),
            "next": self._next_group,
        }  # fmt: skip

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.speeds = dict(state["speeds"])
        self.late = _restored(state["late"])
        self._next_group = state["next"]
        self.groups, self.group_of = {}, {}
        for number, expected, latest, waiting, arrived in state["groups"]:
            group = ArrivalGroup(expected, latest, [*waiting], _restored(arrived))
            self.groups[number] = group
            clients = [*waiting, *(update.client for update, _ in group.arrived)]
            self.group_of |= dict.fromkeys(clients, number)


def _whole_steps(seconds: float, speed: float) -> int:
    """Return the number of whole steps of ``speed`` seconds each in ``seconds``."""
    return math.floor(seconds / speed + ROUNDING) if speed > 0 else 0


def _stored(updates: Sequence[tuple[ClientUpdate, int]]) -> list[list[Any]]:
    return [[update_state(update), staleness] for update, staleness in updates]


def _restored(state: Sequence[Sequence[Any]]) -> list[tuple[ClientUpdate, int]]:
    return [(ClientUpdate(**update), staleness) for update, staleness in state]
