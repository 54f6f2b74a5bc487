"""A virtual clock: a policy and its clients in one process, in the order in which updates would arrive.

The clock drives the same policy object that a real server drives. It either makes the times of arrivals from the
clients' speeds (:meth:`VirtualClock.run`), or follows the events that a real server has recorded
(:meth:`VirtualClock.replay`), and then comes to the same model.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from weft.errors import WeftError
from weft.federated.policy import ClientUpdate

if TYPE_CHECKING:
    from weft.federated.client_cohort import ClientCohort, LocalResult
    from weft.federated.fresh_updates import FreshUpdates
    from weft.federated.policy import (
        AssignedWork,
        Differences,
        FederationPolicy,
        ModelChange,
    )

EventKind = Literal["join", "leave", "start", "update", "tick"]


@dataclass(frozen=True)
class FederationEvent:
    """Event at a federated server, with its time. The list of all events determines a run, so a real server records it.

    Attributes:
        ``time``: seconds since the run began, as the policy saw them.
        ``kind``: "join", "leave", "start" (work was given out), "update" (an update arrived) or "tick".
        ``client``: the client; empty for a tick.
        ``version``: version of the model with which the work began; for a tick, the server's version.
        ``steps``: number of local steps.
        ``samples``: number of the client's samples.
        ``seconds``: duration of the work as the client measured it.
        ``accepted``: whether the policy waited for this update.
        ``staleness``: number of changes of the model since the work began.
    """

    time: float
    kind: EventKind
    client: str = ""
    version: int = 0
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    accepted: bool = True
    staleness: int = 0


class WorkTime(NamedTuple):
    """Duration of a client's local steps in seconds, and whether the client is lost at their end instead of answering.

    ``away``: seconds after which a lost client comes back.
    """

    seconds: float
    lost: bool = False
    away: float = 0.0


class ClientSpeeds(Protocol):
    """Interface of objects that say how long simulated clients take for their local steps."""

    def work_time(self, client: str, version: int, steps: int) -> WorkTime:
        """Return how long a client takes for ``steps`` local steps on the model of ``version``."""


#: Kinds of what comes on a virtual clock, in the order in which they are handled at the same time.
_ARRIVAL, _LOSS, _RETURN, _TICK = range(4)


class _Coming(NamedTuple):
    """What will happen: at ``time``, of which ``kind``, ``number`` of its making, to which ``client``."""

    time: float
    kind: int
    number: int
    client: str
    away: float = 0.0


class _Doing(NamedTuple):
    """Work in flight: what it will give, the version it began with, and its duration."""

    result: LocalResult
    version: int
    seconds: float


class VirtualClock:
    """Simulates a federated run: drives a policy with simulated clients on a virtual time.

    Attributes:
        ``policy``: the policy.
        ``parameters``: the server's model; changed in place.
        ``cohort``: the clients.
        ``now``: the virtual time in seconds.
        ``events``: all past events, in order.
        ``last``: the last accepted update of each client.
        ``fresh``: replaces stale updates by estimates; None: stale updates are used as they are.
        ``on_change``: function that is called after every change of the model.
    """

    def __init__(
        self,
        policy: FederationPolicy,
        parameters: Differences,
        cohort: ClientCohort,
        speeds: ClientSpeeds | None = None,
        on_change: Callable[[ModelChange], object] | None = None,
    ) -> None:
        """``speeds``: how long clients work; None for :meth:`replay`."""
        self.policy = policy
        self.parameters = dict(parameters)
        self.cohort = cohort
        self.now = 0.0
        self.events: list[FederationEvent] = []
        self._speeds = speeds
        self.on_change = on_change
        self._coming: list[_Coming] = []
        self._count = 0
        self._doing: dict[str, _Doing] = {}
        self._joined = False
        self.last: dict[str, FederationEvent] = {}
        self.fresh: FreshUpdates | None = None

    def run(self, changes: int, seconds: float = 0.0) -> None:
        """Run until the model has been changed ``changes`` times in all, or ``seconds`` of virtual time have passed.

        ``seconds = 0`` sets no limit. All clients join at the beginning. Raises :class:`WeftError` if no event is left,
        because all clients are idle and the policy does not give them work.
        """
        if not self._joined:
            self._joined = True
            for client in self.cohort.names():
                self._join(client)
        while self.policy.version < changes:
            self._start()
            at = self._next_time()
            if seconds and at > seconds:
                break
            self.now = at
            self._happen()
            # what comes at the same time comes before anybody starts
            while self._coming and self._coming[0].time <= at and self.policy.version < changes:  # fmt: skip
                self._happen()

    def replay(self, events: Iterable[FederationEvent]) -> None:
        """Replay the events that a real server has recorded, and train as its clients did.

        Raises :class:`WeftError` if the policy orders other work than the server has recorded.
        """
        for event in events:
            self.now = event.time
            if event.kind == "join":
                self._join(event.client, event.samples)
            elif event.kind == "leave":
                self._leave(event.client)
            elif event.kind == "update":
                self._replay_update(event)
            elif event.kind == "tick":
                self._tick()
            else:
                self._replay_start(event)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the clock, its policy and its clients, as tensors and plain values.

        The list of past events is not part of it.
        """
        return {
            "parameters": dict(self.parameters),
            "now": self.now,
            "count": self._count,
            "coming": [list(coming) for coming in self._coming],
            "doing": {
                client: [
                    vars(doing.result)
                    | {
                        "difference": dict(doing.result.difference),
                        "extra": {name: dict(values) for name, values in doing.result.extra.items()},
                    },
                    doing.version,
                    doing.seconds,
                ]
                for client, doing in self._doing.items()
            },
            "policy": self.policy.state_dict(),
            "cohort": self.cohort.state_dict(),
            "fresh": self.fresh.state_dict() if self.fresh is not None else {},
            "joined": self._joined,
            "last": {client: vars(event) | {} for client, event in self.last.items()},
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of clock, policy and clients from ``state``, which :meth:`state_dict` returned."""
        from weft.federated.client_cohort import LocalResult

        self.parameters = dict(state["parameters"])
        self.now = state["now"]
        self._count = state["count"]
        self._coming = [_Coming(*coming) for coming in state["coming"]]
        self._doing = {
            client: _Doing(LocalResult(**result), version, seconds)
            for client, (result, version, seconds) in state["doing"].items()
        }
        self._joined = state["joined"]
        self.last = {
            client: FederationEvent(**event) for client, event in state["last"].items()
        }
        self.policy.load_state_dict(state["policy"])
        self.cohort.load_state_dict(state["cohort"])
        if self.fresh is not None:
            self.fresh.load_state_dict(state["fresh"])

    def _replay_start(self, event: FederationEvent) -> None:
        """Give out work as the server did; the first of several at one time gives out all of them."""
        recorded = FederationEvent(event.time, "start", event.client, event.version, event.steps)  # fmt: skip
        if recorded not in self._given_out():
            self._start()
        if recorded not in self._given_out():
            raise WeftError(
                f"the server gave {event.client} {event.steps} steps on version {event.version} at {event.time:g} s, "
                "and the virtual clock does not; the recipe is another than that of the recorded run"
            )

    def _given_out(self) -> list[FederationEvent]:
        """Return the newest events that are starts of work."""
        last: list[FederationEvent] = []
        for event in reversed(self.events):
            if event.kind != "start":
                break
            last.append(event)
        return last

    def _replay_update(self, event: FederationEvent) -> None:
        doing = self._doing.get(event.client)
        if doing is None or doing.version != event.version:
            # a second answer, or one to work that was given up: the policy drops it without looking at its values
            self.events.append(event)
            return
        self._doing[event.client] = doing._replace(seconds=event.seconds)
        self._arrive(event.client)

    def _happen(self) -> None:
        """Handle the next thing that happens."""
        if not self._coming or self._coming[0].time > self.now:
            self._tick()
            return
        coming = heapq.heappop(self._coming)
        if coming.kind == _ARRIVAL:
            self._arrive(coming.client)
        elif coming.kind == _LOSS:
            self._leave(coming.client)
            self._expect(self.now + coming.away, _RETURN, coming.client)
        else:
            self._join(coming.client)

    def _next_time(self) -> float:
        tick = self.policy.next_tick()
        times = [self._coming[0].time] if self._coming else []
        times += [max(tick, self.now)] if tick is not None else []
        if not times:
            raise WeftError(
                f"nobody works and nobody is waited for at {self.now:g} s of the virtual clock; clients: "
                f"{', '.join(self.policy.members) or 'none'}; lower federated.clients"
            )
        return min(times)

    def _join(self, client: str, samples: int = 0) -> None:
        samples = samples or self.cohort.samples(client)
        self._note("join", client, samples=samples)
        self.policy.join(client, self.now, samples)

    def _leave(self, client: str) -> None:
        self._note("leave", client)
        if self._doing.pop(client, None) is not None:
            self.cohort.settle(client, accepted=False)
        self.policy.leave(client, self.now)

    def _arrive(self, client: str) -> None:
        doing = self._doing.pop(client)
        result = doing.result
        update = ClientUpdate(
            client, doing.version, result.steps, result.samples, result.difference, doing.seconds, result.rates,
            result.extra,
        )  # fmt: skip
        accepted = self.policy.expects(update)
        staleness = self.policy.version - doing.version
        self._note(
            "update", client, doing.version, result.steps, result.samples, doing.seconds, accepted, staleness
        )  # fmt: skip
        self.cohort.settle(client, accepted)
        if accepted:
            self.last[client] = self.events[-1]
        if accepted and self.fresh is not None:
            update = self.fresh.refreshed(update, staleness, self.parameters)
            self.fresh.forget_models({doing.version for doing in self._doing.values()})
        self._apply(self.policy.on_update(update, staleness, self.now))

    def _tick(self) -> None:
        self._note("tick", version=self.policy.version)
        self._apply(self.policy.on_tick(self.now))

    def _apply(self, change: ModelChange | None) -> None:
        if change is None:
            return
        # a new mapping, as work in flight has begun with the old tensors
        self.parameters = {
            name: tensor + change.difference[name] if name in change.difference else tensor
            for name, tensor in self.parameters.items()
        }  # fmt: skip
        if self.on_change is not None:
            self.on_change(change)

    def _start(self) -> None:
        work = self.policy.ready(self.now)
        for batch in _equal_steps(work):
            version = self.policy.version
            if self.fresh is not None:
                self.fresh.keep_model(version, self.parameters)
            results = self.cohort.train(
                batch, version, self.parameters, self.policy.sent(), self.policy.client_step
            )  # fmt: skip
            for (client, steps), result in zip(batch, results, strict=True):
                self._note("start", client, version, steps)
                time = WorkTime(0.0)
                if self._speeds is not None:
                    time = self._speeds.work_time(client, version, steps)
                    kind = _LOSS if time.lost else _ARRIVAL
                    self._expect(self.now + time.seconds, kind, client, time.away)
                self._doing[client] = _Doing(result, version, time.seconds)

    def _expect(self, time: float, kind: int, client: str, away: float = 0.0) -> None:
        self._count += 1
        heapq.heappush(self._coming, _Coming(time, kind, self._count, client, away))

    def _note(
        self,
        kind: EventKind,
        client: str = "",
        version: int = 0,
        steps: int = 0,
        samples: int = 0,
        seconds: float = 0.0,
        accepted: bool = True,
        staleness: int = 0,
    ) -> None:
        self.events.append(
            FederationEvent(self.now, kind, client, version, steps, samples, seconds, accepted, staleness)
        )  # fmt: skip


def _equal_steps(work: Sequence[AssignedWork]) -> list[list[AssignedWork]]:
    """Divide work into groups of the same number of steps, which can be computed together."""
    groups: dict[int, list[AssignedWork]] = {}
    for each in work:
        groups.setdefault(each.steps, []).append(each)
    return list(groups.values())
