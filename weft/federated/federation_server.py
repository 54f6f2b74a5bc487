"""Drives a federation policy with real clients: gives out work, judges what comes back, and names who is missing."""

from __future__ import annotations

import math
import queue
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.errors import WeftError
from weft.federated.adapter_products import AdapterProducts
from weft.federated.client_sessions import ClientSession, ClientSessions, SessionEvent
from weft.federated.client_work import WorkOrder
from weft.federated.federation_events import EventLog
from weft.federated.federation_frames import (
    FederationForms,
    order_head,
    read_numbers,
    read_tensors,
    text_under,
    travel_seed,
)
from weft.federated.policy import ClientUpdate
from weft.federated.secure_cohorts import SecureCohort, new_cohort, unanswered
from weft.federated.tensor_form import split_tensors
from weft.federated.update_journal import FollowedEvent, TakenUpdate, UpdateJournal
from weft.federated.update_judge import UpdateJudge, check_finite
from weft.federated.virtual_clock import EventKind, FederationEvent
from weft.net.wire import Head

if TYPE_CHECKING:
    from weft.federated.policy import AssignedWork, FederationPolicy, ModelChange

T = torch.Tensor
Named = Mapping[str, T]

#: Refused updates in a row after which a client is sent away.
MOST_REFUSED = 3
#: Work may take so many times ``patience``, after which whoever does it counts as stuck.
LATE = 3
#: Characters of a client's own words that the server repeats.
MOST_WHY = 200
#: Seconds within which clients must have got the final model.
FLUSH_S = 120.0
#: Seconds after which the server looks whether it is asked to end.
LOOK_S = 0.25


@dataclass
class GivenWork:
    """A work order that a client has not answered yet.

    Attributes:
        ``token``: name of the order.
        ``version``: version of the model that was sent.
        ``steps``: number of local steps.
        ``since``: time at which the order was sent, in seconds of the server's clock.
        ``cohort``: the secure sum that the answer belongs to; None if there is none.
        ``base``: the parameters that were sent, as the client has decoded them.
    """

    token: str
    version: int
    steps: int
    since: float
    cohort: SecureCohort | None = None
    base: Named = field(default_factory=dict)


@dataclass
class ClientRecord:
    """State of a client at the server.

    Attributes:
        ``session``: the client's connection; None while it has none.
        ``work``: the order that it works on; None if there is none.
        ``lost_at``: time at which its connection broke; None while it is connected or was given up.
        ``answered``: token of its last answer, and whether the answer was accepted.
        ``refused``: how many of its updates in a row were refused.
        ``view``: the model as this client has decoded it, if changes of the model are compressed.
        ``present``: whether the policy counts the client as present.
    """

    session: ClientSession | None = None
    work: GivenWork | None = None
    lost_at: float | None = None
    answered: tuple[str, bool] = ("", False)
    refused: int = 0
    view: dict[str, T] = field(default_factory=dict)
    present: bool = False


class WorkReport(NamedTuple):
    """The server's record of a client's last answered work order.

    ``loss``: mean loss of its steps. ``staleness``: number of changes of the model while the client worked.
    ``seconds``: duration that the client measured. ``steps``: number of its steps. ``began`` and ``arrived``: times of
    the order and of the answer.
    """

    loss: float = math.nan
    staleness: int = 0
    seconds: float = 0.0
    steps: int = 0
    began: float = 0.0
    arrived: float = 0.0


@dataclass(frozen=True)
class ServedChange:
    """A change of the server's model, with the reports of its clients.

    Attributes:
        ``change``: the change.
        ``loss``: mean loss of the clients' local steps, weighted like their updates.
        ``reports``: a report for each client whose update is part of the change.
    """

    change: ModelChange
    loss: float
    reports: tuple[WorkReport, ...]


class FederationServer:
    """Server of a federated run: drives ``policy`` with the clients of ``sessions``.

    Arguments:
        ``forms``: encodings of tensors.
        ``judge``: refuses updates that would damage the model.
        ``say``: prints a line.
        ``patience``: seconds without a connected client after which the run fails. A work order may take :data:`LATE`
            times as long.
        ``grace``: seconds in which a client whose connection broke may come back to its work.
        ``secure``: whether updates are masked.
        ``log``: records all events.
        ``began``: duration of the run before this process, in seconds.
        ``products``: averages products of adapters; None: their factors are averaged.
        ``journal``: keeps updates that no checkpoint holds yet; None: their work is done again after a crash.
        ``follow``: events since the checkpoint, which a restarted server repeats.
        ``answered``: by client, the token of the last answer and whether it counts.
    """

    def __init__(
        self,
        policy: FederationPolicy,
        sessions: ClientSessions,
        forms: FederationForms,
        judge: UpdateJudge,
        log: EventLog,
        say: Callable[[str], object],
        patience: float,
        grace: float,
        secure: bool = False,
        began: float = 0.0,
        products: AdapterProducts | None = None,
        journal: UpdateJournal | None = None,
        follow: Sequence[FollowedEvent] = (),
        answered: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self.policy, self.sessions, self.forms, self.judge = (
            policy,
            sessions,
            forms,
            judge,
        )
        self.log, self.say, self.patience, self.grace = log, say, patience, grace
        self.secure, self.products = secure, products
        self.clients: dict[str, ClientRecord] = {}
        self.parameters: Named = {}
        self._reports: dict[str, WorkReport] = {}
        self._masked: dict[
            str, ClientUpdate
        ] = {}  # those whose cohort is not complete, by client
        self._incarnation, self._count = secrets.token_hex(4), 0
        self._zero = time.monotonic() - began
        #: Seconds of the run, as the policy and the record of events see them.
        self.now = self._heard = began
        self._said_waiting = False
        self._cohorts: list[SecureCohort] = []
        self._refused_sums: list[str] = []  # in a row, each with its reason
        self.journal, self._follow = journal, deque(follow)
        self._awaited: set[str] = set()
        self._awaited_until = 0.0
        for name, (token, taken) in (answered or {}).items():
            self._record(name).answered = (token, taken)
        if not follow:
            self._await_known()

    # --- what the loop of the server calls ---

    def next_change(
        self, parameters: Named, interrupted: Callable[[], bool]
    ) -> ServedChange | None:
        """Send work orders for the present model ``parameters``, and return the next change of the model.

        Returns None if this process is asked to end. Raises :class:`WeftError` if no client is connected for
        ``patience`` seconds. ``interrupted``: returns whether this process is asked to end.
        """
        self.parameters = parameters
        if (change := self._followed()) is not None:
            return self._served(change)
        while not interrupted():
            self._look_at_clock()
            self._start()
            self._complain()
            change = self._happen()
            if change is not None:
                self._heard = self.now
                return self._served(change)
        return None

    def end(self, why: str, parameters: Named | None = None) -> None:
        """Tell all clients that the run has ended, and disconnect them.

        ``why``: a line about the end. ``parameters``: the final model, which is sent to the clients; None: it is not
        sent.
        """
        views: Sequence[memoryview] = ()
        if parameters:
            views = self.forms.whole.packed(parameters, 0).views

        def part_with(session: ClientSession) -> None:
            session.send({"kind": "end", "why": why}, views)
            session.close(FLUSH_S)

        for record in self.clients.values():
            if record.session is not None:
                part_with(record.session)
        # whoever is cut off now comes back, and hears of the end
        deadline = time.monotonic() + self.grace
        while (left := deadline - time.monotonic()) > 0 and any(
            each.present and each.session is None for each in self.clients.values()
        ):
            with suppress(queue.Empty):
                event = self.sessions.events.get(timeout=left)
                record = self._record(event.session.name)
                if event.kind == "joined":
                    record.session = event.session
                    part_with(event.session)
        self.sessions.close()
        self.flush()

    def pause(self) -> None:
        """Disconnect all clients without ending the run. They wait until the server comes back."""
        self.sessions.close()
        for record in self.clients.values():
            if record.session is not None:
                record.session.close()
        self.flush()

    def flush(self) -> None:
        """Wait until all queued frames are sent to clients, but not longer than a limit, and close the record of
        events.
        """
        deadline = time.monotonic() + FLUSH_S
        for record in self.clients.values():
            if record.session is not None:
                record.session.over.wait(max(0.0, deadline - time.monotonic()))
        self.log.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which another process continues: the policy's, and the server's clock and counters."""
        return {
            "policy": self.policy.state_dict(), "seconds": self.now,
            "events": self._follow[0].begin if self._follow else self.log.size, "norms": list(self.judge.norms),
            "answered": {name: list(each.answered) for name, each in self.clients.items()},
        }  # fmt: skip

    # --- events of an earlier process ---

    def _await_known(self) -> None:
        """Let the clients of an earlier process come back, for as long as after a cut; they get their work anew."""
        self._zero = time.monotonic() - self.now
        self._heard = self.now
        members = self.policy.members.items()
        self._awaited = {name for name, member in members if member.present}
        self._awaited_until = self.now + self.grace
        for name in self.policy.members:
            self._leave(name)

    def _followed(self) -> ModelChange | None:
        """Let events of an earlier process happen once more, and return the change that one of them completes."""
        while self._follow:
            followed = self._follow.popleft()
            change = self._once_more(followed)
            if not self._follow:
                self._await_known()
            if change is not None:
                return change
        return None

    def _once_more(self, followed: FollowedEvent) -> ModelChange | None:
        event, policy = followed.event, self.policy
        self.now = event.time
        if event.kind == "join":
            policy.join(event.client, self.now, event.samples)
        elif event.kind == "leave":
            policy.leave(event.client, self.now)
        elif event.kind == "tick":
            return policy.on_tick(self.now)
        elif event.kind == "start":
            policy.ready(self.now)
            if policy.members[event.client].version != event.version:
                self.say(
                    "the recipe is not that of the events since the last checkpoint, whose work is done again"
                )
                self._follow.clear()
                self.log.cut(followed.begin)
        elif followed.taken is not None:
            update, loss, began, token = followed.taken
            self._reports[event.client] = WorkReport(
                loss, event.staleness, event.seconds, event.steps, began, self.now
            )
            self._record(event.client).answered = (token, True)
            return policy.on_update(update, event.staleness, self.now)
        else:
            late = ClientUpdate(event.client, event.version, event.steps, event.samples, {})  # fmt: skip
            return policy.on_update(late, event.staleness, self.now)
        return None

    def _record(self, name: str) -> ClientRecord:
        return self.clients.setdefault(name, ClientRecord())

    # --- what happens ---

    def _look_at_clock(self) -> None:
        self.now = time.monotonic() - self._zero

    def _happen(self) -> ModelChange | None:
        """Wait for the next event, handle it, and return the change that it completes."""
        tick = self.policy.next_tick()
        if tick is not None and self.now >= tick:
            return self._tick()
        limit = LOOK_S if tick is None else min(LOOK_S, tick - self.now)
        try:
            event = self.sessions.events.get(timeout=max(0.0, limit))
        except queue.Empty:
            self._look_at_clock()
            return self._give_up()
        self._look_at_clock()
        record = self._record(event.session.name)
        if event.kind == "joined":
            self._joined(record, event.session)
            return None
        if (
            event.session is not record.session
        ):  # of a connection that another one has replaced
            return None
        if event.kind == "gone":
            record.session, record.lost_at = None, self.now
            if record.present:
                self.say(
                    f"client {event.session.name} is gone: {event.why}"
                    + f"; its work waits for it for {self.grace:g} s"
                    * (record.work is not None)
                )
            return self._give_up()
        try:
            return self._frame(record, event)
        except WeftError as error:
            return self._refuse(record, event.session, event.head, str(error))

    def _frame(self, record: ClientRecord, event: SessionEvent) -> ModelChange | None:
        kind = text_under(event.head, "kind", ("update", "seed", "failed"))
        self._heard = self.now
        if kind == "seed":
            return self._seed(event.session.name, event.head)
        if kind == "failed" and record.work is not None:
            raise WeftError(f"it could not send one: {text_under(event.head, 'why')[:MOST_WHY]}")  # fmt: skip
        return self._update(record, event)

    def _joined(self, record: ClientRecord, session: ClientSession) -> None:
        """Take in a client that has connected, with the work that it does if it is still the right one."""
        name = session.name
        if record.session is not None:
            record.session.close()
        record.session, record.lost_at = session, None
        record.view = {}
        self._heard, self._said_waiting = self.now, False
        tokens = {record.work.token if record.work else "", record.answered[0]}
        if (
            record.present
            and session.working
            and session.working in tokens
            and (record.work is None or record.work.token == session.working)
        ):
            self.say(f"client {name} is back, and goes on with its work")
            return
        if record.present:
            self._leave(name)
        samples = session.hello.get("samples")
        count = samples if type(samples) is int and samples > 0 else 0
        self._note("join", name, samples=count)
        self.policy.join(name, self.now, count)
        record.present, record.work = True, None
        if isinstance(sent := session.hello.get("sent"), str) and sent:
            # it was killed before it heard whether its last answer was taken
            taken = record.answered == (sent, True)
            why = "" if taken else "the server has not got it"
            session.send({"kind": "taken", "token": sent, "taken": taken, "why": why})
        there = sum(each.session is not None for each in self.clients.values())
        self.say(f"client {name} has joined with {count:,} samples; {there} are here")

    def _leave(self, name: str) -> None:
        """Tell the policy that a client is gone, together with its work."""
        record = self._record(name)
        work, record.work, record.present = record.work, None, False
        self._note("leave", name)
        self.policy.leave(name, self.now)
        if work is not None and work.cohort is not None:
            work.cohort.lose(name)

    def _give_up(self) -> ModelChange | None:
        """Give up clients that have not come back, or have not answered for too long."""
        now = self.now
        for name, record in self.clients.items():
            if not record.present:
                continue
            if record.lost_at is not None and now - record.lost_at >= self.grace * (
                record.work is not None
            ):
                if record.work is not None:
                    self.say(
                        f"client {name} has not come back for {self.grace:g} s; its work is given up"
                    )
                self._leave(name)
            elif (
                record.work is not None
                and now - record.work.since > LATE * self.patience
            ):
                self.say(
                    f"client {name} is connected and has not answered for {LATE * self.patience:g} s ({LATE} times "
                    "federated.patience); its work is given up"
                )
                self._dismiss(
                    record, "it has not answered for too long; join again to go on"
                )
        return self._secure_change()

    def _dismiss(self, record: ClientRecord, why: str) -> None:
        """End the connection with a client, which may come back."""
        assert record.session is not None
        name = record.session.name
        record.session.send({"kind": "refused", "why": why})
        record.session.close()
        record.session = None
        self._leave(name)

    def _tick(self) -> ModelChange | None:
        if self.secure and any(list(unanswered(cohort)) for cohort in self._cohorts):
            # whoever has not answered is lost to the sum, whose masks the others then take out
            for cohort in self._cohorts:
                for name in list(unanswered(cohort)):
                    record = self.clients[name]
                    if record.session is not None:
                        self._dismiss(
                            record, "it has not answered in time; join again to go on"
                        )
                    elif record.present:
                        self._leave(name)
                    cohort.lose(name)
            return self._secure_change()
        self._note("tick", version=self.policy.version)
        return self.policy.on_tick(self.now)

    # --- updates ---

    def _update(self, record: ClientRecord, event: SessionEvent) -> ModelChange | None:
        session, head = event.session, event.head
        token, numbers = text_under(head, "token"), read_numbers(head)
        if record.work is None or token != record.work.token:
            self._drop(record, session, token, numbers.version)
            return None
        work = record.work
        if (numbers.version, numbers.steps) != (work.version, work.steps):
            raise WeftError(
                f"it says {numbers.steps} steps on version {numbers.version}, and its work was {work.steps} on "
                f"version {work.version}: a forged update"
            )
        if work.cohort is not None:
            return self._masked_update(record, event, work.cohort, numbers)
        difference, extra = read_tensors(
            self.forms.up, event.payload, travel_seed(session.name, work.version), numbers.groups, self.forms.whole,
        )  # fmt: skip
        for tensors in extra.values():
            check_finite(tensors)
        difference = self.judge.accepted(difference, work.steps)
        if self.products is not None:
            difference = self.products.product_difference(difference, work.base)
        update = ClientUpdate(
            session.name, work.version, work.steps, numbers.samples, difference, numbers.seconds, numbers.rates,
            extra,
        )  # fmt: skip
        taken = self.policy.expects(update)
        late = (
            ""
            if taken
            else f"it came too late: the model is at version {self.policy.version}"
        )
        if late:
            self.say(
                f"an update of client {session.name} on version {work.version} was dropped: {late}"
            )
        if taken and self.journal is not None:
            self.journal.write(self.log.size, TakenUpdate(update, numbers.loss, work.since, token))  # fmt: skip
        change = self._deliver(update, numbers.loss, work.since)
        self._answered(record, session, token, taken, late)
        return change

    def _deliver(
        self, update: ClientUpdate, loss: float, began: float
    ) -> ModelChange | None:
        """Hand an update to the policy. ``began``: when its work was given out."""
        staleness = self.policy.version - update.version
        accepted = self.policy.expects(update)
        self._note(
            "update", update.client, update.version, update.steps, update.samples, update.seconds, accepted, staleness
        )  # fmt: skip
        self._reports[update.client] = WorkReport(
            loss, staleness, update.seconds, update.steps, began, self.now
        )
        return self.policy.on_update(update, staleness, self.now)

    def _answered(
        self,
        record: ClientRecord,
        session: ClientSession,
        token: str,
        taken: bool,
        why: str = "",
    ) -> None:
        """Note and say that a client's work has its answer."""
        record.work, record.answered = None, (token, taken)
        if taken:
            record.refused = 0
        session.send({"kind": "taken", "token": token, "taken": taken, "why": why})

    def _drop(
        self, record: ClientRecord, session: ClientSession, token: str, version: int
    ) -> None:
        """Drop an answer that nobody waits for: sent twice, replayed, or late."""
        again, taken = record.answered
        if token == again:
            self.say(
                f"client {session.name} has answered twice; the second answer was dropped"
            )
            session.send(
                {
                    "kind": "taken",
                    "token": token,
                    "taken": taken,
                    "why": "it came twice",
                }
            )
            return
        why = f"it is of version {version}, and this work is over; the model is at version {self.policy.version}"
        self.say(f"a late update of client {session.name} was dropped: {why}")
        session.send({"kind": "taken", "token": token, "taken": False, "why": why})

    def _refuse(
        self, record: ClientRecord, session: ClientSession, head: Head, why: str
    ) -> ModelChange | None:
        """Refuse an update. The client stays, and gets other work; who sends several such is sent away."""
        self.say(f"an update of client {session.name} was refused: {why}")
        token = str(head.get("token", ""))
        cohort = record.work.cohort if record.work else None
        self._leave(session.name)
        if cohort is not None:
            cohort.lose(session.name)
        self._answered(record, session, token, False, why)
        record.refused += 1
        if record.refused >= MOST_REFUSED:
            self.say(
                f"client {session.name} was sent away after {MOST_REFUSED} refused updates"
            )
            session.send(
                {
                    "kind": "refused",
                    "why": f"{MOST_REFUSED} updates in a row were refused: {why}",
                }
            )
            session.close()
            record.session = None
            self.sessions.known[session.name] = secrets.token_hex(
                16
            )  # nobody comes back by this name
            return self._secure_change()
        samples = session.hello.get("samples")
        count = samples if type(samples) is int and samples > 0 else 0
        self._note("join", session.name, samples=count)
        self.policy.join(session.name, self.now, count)
        record.present = True
        return self._secure_change()

    # --- secure sums ---

    def _masked_update(
        self,
        record: ClientRecord,
        event: SessionEvent,
        cohort: SecureCohort,
        numbers: Any,
    ) -> ModelChange | None:
        if event.payload.nbytes != 8 * self.forms.elements:
            raise WeftError(
                f"it has {event.payload.nbytes:,} bytes, and a masked update has {8 * self.forms.elements:,}"
            )
        name = event.session.name
        cohort.arrived[name] = torch.frombuffer(
            bytearray(event.payload), dtype=torch.int64
        )
        began = record.work.since if record.work else self.now
        self._reports[name] = WorkReport(numbers.loss, began=began)
        self._masked[name] = ClientUpdate(
            name,
            numbers.version,
            numbers.steps,
            numbers.samples,
            {},
            numbers.seconds,
            numbers.rates,
        )
        self._answered(record, event.session, text_under(event.head, "token"), True)
        return self._secure_change()

    def _seed(self, name: str, head: Head) -> ModelChange | None:
        """Take a seed that a client tells about a lost one."""
        for cohort in self._cohorts:
            if cohort.name == head.get("cohort"):
                try:
                    seed = bytes.fromhex(text_under(head, "seed"))
                except ValueError:
                    seed = b""
                if len(seed) != 32:
                    raise WeftError("it tells a seed that is none")
                cohort.revealed[name, text_under(head, "lost", sorted(cohort.lost))] = (
                    seed
                )
        return self._secure_change()

    def _secure_change(self) -> ModelChange | None:
        """Ask for the seeds that are needed, and hand complete cohorts to the policy."""
        for cohort in self._cohorts:
            self._ask_seeds(cohort)
            if not cohort.complete:
                continue
            self._cohorts.remove(cohort)
            arrived = [*cohort.arrived]
            if len(arrived) < 2:
                self._throw_away(
                    cohort,
                    f"{len(cohort.lost)} of them were lost, and fewer than 2 are left",
                )
                return None
            mean = split_tensors(
                cohort.mean().to(self.forms.up.dtype), self.forms.whole.shapes
            )
            try:
                mean = self.judge.accepted(mean, 1)
            except WeftError as error:
                self._refused_sums.append(str(error))
                self._throw_away(cohort, str(error))
                return None
            self._refused_sums.clear()
            changes = []
            for name in arrived:
                update = self._masked.pop(name)
                report = self._reports[name]
                changes.append(
                    self._deliver(_with(update, mean), report.loss, report.began)
                )
            return next((change for change in changes if change is not None), None)
        return None

    def _throw_away(self, cohort: SecureCohort, why: str) -> None:
        """Forget a secure sum, and let its clients work again."""
        self.say(f"the secure sum of {', '.join(cohort.keys)} was thrown away: {why}")
        for name in [*cohort.arrived]:
            self._masked.pop(name, None)
            self._leave(name)
            self._rejoin(name)

    def _rejoin(self, name: str) -> None:
        record = self.clients[name]
        if record.session is None:
            return
        self._note("join", name)
        self.policy.join(name, self.now)
        record.present = True

    def _ask_seeds(self, cohort: SecureCohort) -> None:
        """Ask the remaining clients of a cohort for their seeds with lost ones."""
        for name in [*cohort.keys]:
            record = self.clients.get(name)
            gone = record is None or (record.session is None and not record.present)
            if cohort.lost and name not in cohort.lost and gone:
                cohort.lose(name)
                self._masked.pop(name, None)
        for name, lost in cohort.to_ask():
            session = self.clients[name].session
            if session is not None:
                session.send({"kind": "tell", "cohort": cohort.name, "lost": lost})

    # --- work ---

    def _start(self) -> None:
        """Give out the work that begins now."""
        self._awaited -= {name for name, each in self.clients.items() if each.present}
        if self._awaited and self.now < self._awaited_until:
            return
        work = self.policy.ready(self.now)
        if not work:
            return
        cohort = self._cohort(work) if self.secure else None
        for each in work:
            self._give(each, cohort)

    def _cohort(self, work: Sequence[AssignedWork]) -> SecureCohort:
        self._count += 1
        clients = [each.client for each in work]
        sizes = {name: self.policy.share(name, clients) for name in clients}

        def public(name: str) -> str:
            session = self.clients[name].session
            return str(session.hello.get("public", "")) if session else ""

        cohort = new_cohort(
            f"{self._incarnation}-{self._count}", clients, public, sizes
        )
        self._cohorts.append(cohort)
        return cohort

    def _give(self, work: AssignedWork, cohort: SecureCohort | None) -> None:
        self._count += 1
        client, steps = work
        record, version = self.clients[client], self.policy.version
        record.work = GivenWork(
            f"{self._incarnation}-{self._count}", version, steps, self.now, cohort
        )
        self._note("start", client, version, steps)
        step = self.policy.client_step
        order = WorkOrder(
            record.work.token, version, steps, self.parameters, self.policy.sent(), step.beta, step.control,
            cohort.share_of(client) if cohort else None,
        )  # fmt: skip
        if record.session is not None:  # else it gets its work anew if it comes back
            head, views = self._encoded(record, order)
            record.session.send(head, views)
        record.work.base = record.view or self.parameters
        record.view = dict(record.view)

    def _encoded(
        self, record: ClientRecord, order: WorkOrder
    ) -> tuple[Head, list[memoryview]]:
        """Return the frame of a work: the whole model, or what has changed for this client."""
        down, base = self.forms.down, "whole"
        assert record.session is not None
        if down.compressor.exact or not record.view:
            views = [*self.forms.whole.packed(self.parameters, 0).views]
            if not down.compressor.exact:
                record.view = {name: x.clone() for name, x in self.parameters.items()}
        else:
            base = "change"
            seed = travel_seed(record.session.name, order.version, down=True)
            wanted = {
                name: x - record.view[name] for name, x in self.parameters.items()
            }
            # what is left out stays in the difference from the client's view, and so comes later
            packed = down.packed(wanted, seed)
            views = [*packed.views]
            for name, x in wanted.items():
                record.view[name] = record.view[name] + (x - packed.left[name])
        for group in sorted(order.sent):
            # copied, as the policy may change them before they are sent
            vectors = {name: x.clone() for name, x in order.sent[group].items()}
            views += self.forms.whole.packed(vectors, 0).views
        return order_head(order, base), views

    # --- records ---

    def _served(self, change: ModelChange) -> ServedChange:
        if self.products is not None:
            difference = self.products.factor_difference(
                change.difference, self.parameters
            )
            change = replace(change, difference=difference)
        reports = [self._reports.get(name, WorkReport()) for name in change.clients]
        total = sum(change.weights) or 1.0
        loss = (
            sum(w * r.loss for w, r in zip(change.weights, reports, strict=True))
            / total
        )
        return ServedChange(change, loss, tuple(reports))

    def _complain(self) -> None:
        """Say whom the server waits for, and end the wait if nobody is there for too long."""
        while not self.sessions.refused.empty():
            self.say(self.sessions.refused.get())
        if len(self._refused_sums) >= MOST_REFUSED:
            raise WeftError(
                f"{MOST_REFUSED} secure sums in a row were refused ({self._refused_sums[-1]}), and masks hide whose "
                "update it was; set federated.clip, which clients apply themselves, or leave federated.secure out to "
                "find the client, and go on with weft train --resume RUN"
            )
        there = [
            name for name, each in self.clients.items() if each.session is not None
        ]
        quiet = self.now - self._heard
        if not there and quiet > self.patience:
            known = ", ".join(self.clients) or "nobody"
            raise WeftError(
                f"no client is connected and none has come for {self.patience:g} s (federated.patience); known: "
                f"{known}; start clients with weft client --join, and go on with weft train --resume RUN"
            )
        if (
            quiet > 10.0
            and not self._said_waiting
            and not any(each.work for each in self.clients.values())
        ):
            self._said_waiting = True
            self.say(
                f"waiting for clients: {len(there)} are here, and federated.clients = "
                f"{self.policy.settings.clients} begin together"
            )

    def _note(
        self, kind: EventKind, client: str = "", version: int = 0, steps: int = 0, samples: int = 0,
        seconds: float = 0.0, accepted: bool = True, staleness: int = 0,
    ) -> None:  # fmt: skip
        self.log.write(
            FederationEvent(self.now, kind, client, version, steps, samples, seconds, accepted, staleness)
        )  # fmt: skip


def _with(update: ClientUpdate, difference: Named) -> ClientUpdate:
    return ClientUpdate(
        update.client,
        update.version,
        update.steps,
        update.samples,
        difference,
        update.seconds,
        update.rates,
    )
