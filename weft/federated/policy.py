"""Federation policies: who works for how long, and how updates become changes of the server's model.

A policy looks at no clock and knows no sockets, so that one object is driven by a virtual clock
(:mod:`weft.federated.virtual_clock`) and by a real server alike. Whoever drives a policy hands it the time, applies the
changes that it returns, and starts the work that it names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.federated.weighted_sum import weighted_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from weft.recipe.federated_section import Federated

#: Tensors by the logical name of the parameter that they belong to: differences of parameters, gradients, directions.
Differences = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class ClientUpdate:
    """Update of a client: the result of its local steps.

    Attributes:
        ``client``: name of the client.
        ``version``: version of the server's model with which the client began.
        ``steps``: number of local steps.
        ``samples``: number of samples that the client holds, for its share in the objective.
        ``difference``: the client's parameters minus those with which it began.
        ``seconds``: duration of the work as the client measured it.
        ``rates``: sum of the learning rates of all local steps; 0 if the client does not know it.
        ``extra``: further differences by name, such as the change of the client's control variate (``"control"``).
    """

    client: str
    version: int
    steps: int
    samples: int
    difference: Differences
    seconds: float = 0.0
    rates: float = 0.0
    extra: Mapping[str, Differences] = field(default_factory=dict)


class AssignedWork(NamedTuple):
    """Work for one client: ``steps`` local steps, beginning with the server's present model."""

    client: str
    steps: int


@dataclass(frozen=True)
class ModelChange:
    """Change of the server's model.

    Attributes:
        ``difference``: tensors to add to the server's parameters, by name.
        ``clients``: the clients whose updates are part of it.
        ``weights``: the weight of each of these updates.
    """

    difference: Differences
    clients: tuple[str, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class ClientStep:
    """How a client corrects each of its gradients: ``beta (gradient - c_i + c) + (1 - beta) g``.

    The vectors ``g`` and ``c`` are the server's (:meth:`FederationPolicy.sent`, ``"direction"`` and ``"control"``). The
    vector ``c_i`` is the client's own: the mean of the gradients of its last work, zero before.

    Attributes:
        ``beta``: weight of the client's gradient against the direction of the server's last change.
        ``control``: whether gradients are corrected by control variates (SCAFFOLD). The client then sends the change
            of its ``c_i`` as ``extra["control"]``.
    """

    beta: float = 1.0
    control: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether gradients stay as they are: ``beta`` is 1, and there is no control variate."""
        return self.beta == 1.0 and not self.control


@dataclass
class JoinedClient:
    """State of a client in a policy.

    Attributes:
        ``samples``: number of samples that it holds; 0 if unknown.
        ``version``: version of the model that it trains; None while it is idle.
        ``began``: time at which its local steps were ordered.
        ``given_up``: whether the policy no longer waits for the result of its work.
        ``present``: whether the client is connected.
    """

    samples: int = 0
    version: int | None = None
    began: float = 0.0
    given_up: bool = False
    present: bool = True


class FederationPolicy:
    """Base class of federation policies: they decide which client trains when, and how updates change the model.

    A policy implements :meth:`received` and :meth:`starts`, and :meth:`time_up` if it acts at certain times. This class
    keeps track of the clients that are present and of the work of each. It drops updates that are not expected: a
    second answer, a forged version, or an answer to work that was given up. The argument ``now`` of all methods is the
    time in seconds since the run began.

    Attributes:
        ``settings``: the recipe's section ``[federated]``.
        ``version``: number of changes so far, which is the version of the server's model.
        ``members``: every client that has ever joined, by name, in the order of joining.
        ``client_step``: how clients correct their gradients.
        ``combine``: the weighted sum of updates; an aggregation tree or a robust rule can take its place.
    """

    client_step = ClientStep()

    def __init__(self, settings: Federated) -> None:
        self.settings = settings
        self.version = 0
        self.members: dict[str, JoinedClient] = {}
        self.combine: Callable[[Sequence[Differences], Sequence[float]], Differences] = weighted_sum  # fmt: skip
        self._first_join: float | None = None
        self._begun = False

    # What drives a policy calls these.

    def join(self, client: str, now: float, samples: int = 0) -> None:
        """Add the client named ``client``, which is idle: it is new or has come back. ``samples``: number of samples
        that it holds; 0 if unknown.
        """
        member = self.members.setdefault(client, JoinedClient())
        self.members[client] = JoinedClient(samples or member.samples)
        if self._first_join is None:
            self._first_join = now

    def leave(self, client: str, now: float) -> None:
        """Mark the client named ``client`` as absent, and drop its unfinished work."""
        member = self.members.get(client)
        if member is not None:
            member.present = False
            member.version = None
            self.left(client, now)

    def expects(self, update: ClientUpdate) -> bool:
        """Return whether the policy waits for this update. :meth:`on_update` drops all other updates."""
        member = self.members.get(update.client)
        return (
            member is not None
            and member.present
            and member.version == update.version
            and not member.given_up
        )

    def on_update(
        self, update: ClientUpdate, staleness: int, now: float
    ) -> ModelChange | None:
        """Process an update. Returns the change of the model that it completes, or None.

        ``staleness``: number of changes of the server's model since the one with which the client began.
        """
        member = self.members.get(update.client)
        if member is None or member.version != update.version:
            return None
        wanted = self.expects(update)
        member.version = None
        member.given_up = False
        if not wanted:
            return None
        member.samples = update.samples or member.samples
        return self._counted(self.received(update, staleness, now))

    def on_tick(self, now: float) -> ModelChange | None:
        """Return the change of the model that is due at the time ``now``, or None."""
        return self._counted(self.time_up(now))

    def next_tick(self) -> float | None:
        """Return the time at which :meth:`on_tick` has to be called; None if the policy only waits for updates."""
        if self._begun:
            return self.next_time()
        return (
            self._first_join + self.settings.patience
            if self.idle() and self._first_join is not None
            else None
        )

    def ready(self, now: float) -> Sequence[AssignedWork]:
        """Return the work that begins now, on the server's present model.

        No work begins before ``federated.clients`` clients have joined, or ``federated.patience`` seconds have passed
        since the first has. After that time, work begins with the clients that have joined.
        """
        if not self._begun:
            late = self._first_join is not None and now >= self._first_join + self.settings.patience  # fmt: skip
            if not (self._complete() or (late and self.idle())):
                return ()
            self._begun = True
        work = self.starts(now)
        for client, _ in work:
            member = self.members[client]
            member.version = self.version
            member.began = now
        return work

    def sent(self) -> Mapping[str, Differences]:
        """Return further vectors that clients get together with the model, by name. By default there are none."""
        return {}

    # What a policy implements.

    def received(
        self, update: ClientUpdate, staleness: int, now: float
    ) -> ModelChange | None:
        """Process an expected update. Returns the change of the model that it completes, or None.

        ``staleness``: number of changes of the server's model since the one with which the client began.
        """
        raise NotImplementedError

    def starts(self, now: float) -> Sequence[AssignedWork]:
        """Return the local steps that begin now, one entry per client."""
        return [AssignedWork(client, self.settings.steps) for client in self.idle()]

    def time_up(self, now: float) -> ModelChange | None:
        """Return the change of the model that is due at the time ``now``, or None."""
        return None

    def next_time(self) -> float | None:
        """Return the time at which :meth:`time_up` is to be called; None if there is none."""
        return None

    def left(self, client: str, now: float) -> None:
        """React to the loss of ``client``, which is already marked as absent. By default nothing is done."""

    # What policies compute with.

    def idle(self) -> list[str]:
        """Return the clients that are present and idle, in the order of joining."""
        return [
            name
            for name, member in self.members.items()
            if member.present and member.version is None
        ]

    def share(self, client: str, among: Sequence[str] | None = None) -> float:
        """Return the weight of a client in the objective, so that the weights of all clients add up to 1.

        With ``federated.weights = "samples"`` the weight is proportional to the client's samples, otherwise all weights
        are equal. ``among``: the clients whose weights add up to 1, by default all that have ever joined.
        """
        return self.sample_share(client) / self.total_share(among)

    def total_share(self, among: Sequence[str] | None = None) -> float:
        """Return the sum of the unnormalised weights (:meth:`sample_share`) of the clients ``among``, by default of all
        clients that have ever joined.
        """
        return sum(map(self.sample_share, self.members if among is None else among))

    def change(
        self, updates: Sequence[ClientUpdate], weights: Sequence[float]
    ) -> ModelChange:
        """Return the change of the model ``sum_i weights_i difference_i`` over ``updates``. ``weights``: one number for
        each update. The sum is formed in the order in which the clients joined, so that rounding does not depend on the
        order of arrival.
        """
        places = {name: place for place, name in enumerate(self.members)}
        order = sorted(range(len(updates)), key=lambda i: places[updates[i].client])
        weights = [weights[i] for i in order]
        updates = [updates[i] for i in order]
        difference = self.combine([update.difference for update in updates], weights)
        return ModelChange(
            difference, tuple(update.client for update in updates), tuple(weights)
        )

    def discount(self, staleness: int) -> float:
        """Return the factor ``(1 + staleness)^(-federated.staleness)`` of a stale update."""
        return math.pow(1 + staleness, -self.settings.staleness)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the policy's state as tensors and plain values, for a checkpoint; :meth:`load_state_dict` restores
        it.
        """
        return {
            "version": self.version,
            "first_join": self._first_join,
            "begun": self._begun,
            "members": {name: vars(member) | {} for name, member in self.members.items()},
            "own": self.own_state(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned.

        The caller then calls :meth:`leave` for clients that are gone.
        """
        self.version = state["version"]
        self._first_join = state["first_join"]
        self._begun = state["begun"]
        self.members = {name: JoinedClient(**member) for name, member in state["members"].items()}  # fmt: skip
        self.load_own_state(state["own"])

    def own_state(self) -> dict[str, Any]:
        """Return the part of the policy's state that a subclass adds to the state of this class."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``, which :meth:`own_state` returned. A subclass with a state of its own overrides both
        methods.
        """

    def _counted(self, change: ModelChange | None) -> ModelChange | None:
        self.version += change is not None
        return change

    def _complete(self) -> bool:
        present = sum(member.present for member in self.members.values())
        return present >= self.settings.clients

    def sample_share(self, client: str) -> float:
        """Return the unnormalised weight of ``client`` in the objective: its number of samples, or 1 if all clients
        weigh the same. A client that has not told its number counts as one sample.
        """
        if self.settings.weights == "equal":
            return 1.0
        # a client that has not said how many samples it has counts as one sample
        return float(self.members[client].samples or 1)


def update_state(update: ClientUpdate) -> dict[str, Any]:
    """Return an update as tensors and plain values, for checkpoints. ``ClientUpdate(**state)`` restores it."""
    return vars(update) | {
        "difference": dict(update.difference),
        "extra": {name: dict(values) for name, values in update.extra.items()},
    }
