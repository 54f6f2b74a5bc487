"""The agent of a member: a thread that watches the other members and agrees with them on views.

Every member has an agent, which works whatever the process's main thread does; there is no central process. Each agent
connects to all others, over a channel of the processes' endpoints (:mod:`weft.net.endpoint`), sends its state with
every heartbeat, and detects members that are gone, stopped or silent. The consequences are decided in
:mod:`weft.resilience.agreement`; ``docs/explanations/resilience.md`` states the guarantees.
"""

from __future__ import annotations

import json
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.net.endpoint import Endpoint
from weft.net.poller import PolledConnection, Poller
from weft.net.process import look_at
from weft.net.wire import SealedConnection
from weft.resilience.agreement import Agreement
from weft.resilience.census import Message
from weft.resilience.views import (
    GONE,
    NEWCOMER,
    STOPPED,
    Address,
    Fatal,
    Member,
    TooFew,
    View,
    this_process,
)

#: Heartbeats in the time after which a silent member is lost.
BEATS = 6
#: How many times longer a silent member is waited for if its process, on the same machine, works; also any member
#: that has sent nothing yet.
PATIENCE = 10
#: Seconds between two checks whether to go on waiting.
LOOK_S = 0.2
#: Seconds before a member is dialled again: one whose connection has ended, and one that was never reached.
DIAL_S, PAUSE_S = 0.01, 0.05
#: Seconds for which a newcomer tries addresses where nobody listens, and for which a process that has been told to
#: end still waits for others.
REFUSED_S, LEAVES_S = 5.0, 10.0
#: Seconds for which the last messages are sent at the end.
GOODBYE_S = 1.0
#: The channel of agents.
CHANNEL = "members"


@dataclass
class _Link:
    """The connection to another process, and what it has shown of that process."""

    member: Member
    # when its last message came; before the first one, a time in the future that allows for its start
    heard: float
    wire: PolledConnection | None = None  # the connection that this agent dialled
    dialled: float = 0.0
    cut: bool = False  # a connection has ended since it was heard last
    sure: bool = True  # it was heard since this process itself did not run for a while
    refused: float = 0.0  # since when nobody listens there
    looked: float = 0.0
    ticks: int = -1


class Membership:
    """Agent of this process: a thread that watches the other members of the run, and agrees with them on views.

    A view is the set of members that take part in the run. A member can publish values for the others with
    :meth:`publish`. The attribute ``published`` has these values, by the number of the member.

    Args:
        ``detect``: seconds of silence after which a member counts as lost.
        ``token``: the run's secret.
        ``on_break``: function that is called with a reason when the present view can do no further step. It runs in the
            agent's thread, and must return soon, as no heartbeats are sent meanwhile.
        ``endpoint``: listener of this process, which is closed with the agent; None: a new one on this machine.
        ``number``: number of this member; the default stands for a newcomer, which has none yet.
        ``interrupted``: function that says whether the process was told to end. If it was, the agent soon stops waiting
            for others.
    """

    def __init__(
        self,
        detect: float,
        token: str,
        on_break: Callable[[str], None],
        endpoint: Endpoint | None = None,
        number: int = NEWCOMER,
        interrupted: Callable[[], object] = lambda: False,
    ) -> None:
        self.endpoint, self.token = endpoint or Endpoint("127.0.0.1"), token
        me = this_process(number, self.endpoint.address)
        self.published: dict[int, dict[str, Any]] = {}
        self._detect, self._beat, self._on_break = detect, detect / BEATS, on_break
        self._interrupted = interrupted
        # guards all that follows; notified of anything that may be new
        self._lock = self.news = threading.Condition()
        self._agreement = Agreement(me, self._send_to)
        self._census = self._agreement.census
        self._links: dict[Address, _Link] = {}
        # connections that others dialled
        self._incoming: set[PolledConnection] = set()
        self._facts: dict[str, Any] = {}  # published
        self._said: Message = {}  # to all, last
        self._closing = False
        self._last = self._next_beat = time.monotonic()
        self._poller = Poller()
        self._channel = self.endpoint.open(CHANNEL, token, self._take_in)
        self._thread = threading.Thread(
            target=self._run, name="weft-members", daemon=True
        )
        self._thread.start()

    # What the process's other threads call.

    @property
    def me(self) -> Member:
        return self._agreement.me

    @property
    def view(self) -> View | None:
        """Last view on which this process has agreed with the others; None before the first view."""
        return self._agreement.seen

    @property
    def why(self) -> str:
        """Reason why the present view can do no further step; "" while it can."""
        return self._census.why

    def begin(
        self,
        members: Sequence[Member],
        about: dict[str, Any],
        facts: Sequence[dict[str, Any]] = (),
    ) -> View:
        """Return the first view of a run. All members must call this with the same arguments.

        ``members``: all members, by rank; ``about``: JSON values about the run for members that join later; ``facts``:
        JSON values about each member for the others, by rank.
        """
        numbers = max(member.number for member in members) + 1
        view = View(
            1,
            tuple(members),
            tuple(facts) or ({},) * len(members),
            (),
            json.loads(json.dumps(about)),
            numbers,
            {},
        )
        with self._lock:
            self._agreement.begin(view)
        self._wake()
        return view

    def join(self, contacts: Sequence[Address], limit: float) -> None:
        """Ask the members at the addresses ``contacts`` to let this process into the run, and wait for an answer.

        Afterwards :meth:`next` waits for the view that includes this process. Raises :class:`TooFew` if no member
        answers within ``limit`` seconds.
        """
        with self._lock:
            self._agreement.start_over([(host, port) for host, port in contacts])
            self._drop_links(list(self._links))
            self._wake()
            if why := self._wait(lambda: self._agreement.noted, limit):
                places = ", ".join(f"{host}:{port}" for host, port in contacts)
                raise TooFew(f"no member of the run has answered at {places} {why}")

    def next(
        self, facts: dict[str, Any], limit: float, patience: float | None = None
    ) -> View:
        """Agree with the other members on the next view (set of members of the run), and return it.

        ``facts``: JSON values about this member; the returned view has those of every member. ``limit``: seconds that
        the agreement may take. ``patience``: after so many seconds, a member that is alive but has not asked for the
        next view is left out. It has an effect only if the present view has lost a member, and is half of ``limit`` by
        default.

        Raises :class:`LeftOut` if the others go on without this member, :class:`TooFew` if no view is agreed on in
        time, and :class:`Fatal` if a member says that the run must end.
        """
        agreement = self._agreement
        with self._lock:
            agreement.want(facts, limit, patience)
            self._wake()
            why = self._wait(
                lambda: agreement.outcome or not self._thread.is_alive(),
                limit + GOODBYE_S,
            )
            outcome = agreement.take() or (
                TooFew(f"there is no next view {why}") if why else None
            )
            self._wake()
        if isinstance(outcome, View):
            return outcome
        raise outcome or Fatal(
            agreement.fatal or f"the agent of member {self.me.number} has ended"
        )

    def _wait(self, done: Callable[[], object], limit: float) -> str:
        """Wait with the lock until ``done()``; return "", or the end of a sentence with the reason for a failure."""
        begun = time.monotonic()
        # a newcomer ends at once when it is to end
        gives_up_at = begun if self._census.view is None else math.inf
        while not self._lock.wait_for(done, LOOK_S):
            now = time.monotonic()
            if now > begun + limit:
                return f"within {limit:g} s"
            if self._interrupted():
                gives_up_at = min(gives_up_at, now + LEAVES_S)
                if now > gives_up_at:
                    return "before this process was told to end"
            if self._census.view is None and self._nobody_listens(now):
                return "any more: they have ended"
        return ""

    def _nobody_listens(self, now: float) -> bool:
        links = self._links.values()
        return bool(links) and all(
            link.refused and now - link.refused > REFUSED_S for link in links
        )

    @property
    def called(self) -> bool:
        """Whether all members should call :meth:`next`.

        They should if a member has called it, or if a process wants to join or to leave.
        """
        with self._lock:
            return self._census.called

    @property
    def lost(self) -> set[int]:
        """Numbers of the members of the present view that are known to be lost."""
        with self._lock:
            return {
                peer.member.number
                for address, peer in self._census.peers.items()
                if address in self._census.lost
            }

    def wants_change(self) -> bool:
        """Return whether a process wants to join or to leave the run.

        If so, all members should call :meth:`next` after the present step.
        """
        with self._lock:
            return self._census.wants_change()

    def report(self, text: str) -> None:
        """Report that a collective failed with the error ``text``, so that the present view can do no further step."""
        with self._lock:
            self._census.break_view(text)
        self._wake()

    def leave(self) -> None:
        """Announce that this process will leave, at the next view or at the end of the run."""
        with self._lock:
            self._census.leaving = True
        self._wake()

    @property
    def leaving(self) -> bool:
        """Whether this member is about to leave the run, by its own wish or because it was asked to."""
        with self._lock:
            return self._census.leaving

    def remove(self, number: int) -> None:
        """Ask the member with the number ``number`` to leave the run."""
        if number == self.me.number:
            self.leave()
        with self._lock:
            for address, link in self._links.items():
                if link.member.number == number:
                    self._send_to(address, {"t": "remove"})

    def fatal(self, text: str) -> None:
        """End the run at every member, for the reason ``text``.

        Returns when the message has been sent to all members, or after :data:`GOODBYE_S` seconds.
        """
        with self._lock:
            self._agreement.fatal = text
            self._send_to_all({"t": "fatal", "text": text})
        self._flush()

    def end(self, limit: float) -> None:
        """Announce that this process has finished the run, and wait up to ``limit`` seconds until all others have.

        No collective is used for this, because a collective that is broken off at this moment may wait for ever
        (:mod:`weft.net.hangup`).
        """
        with self._lock:
            self._agreement.ended = True
            self._wake()
            self._lock.wait_for(
                lambda: self._census.all_ended or not self._thread.is_alive(), limit
            )

    def publish(self, **facts: Any) -> None:
        """Send ``facts``, small JSON values by name, to all other members.

        The others find them in their ``published``, under this member's number. Facts published earlier stay unless
        they are overwritten.
        """
        with self._lock:
            self._facts = {**self._facts, **facts}
        self._wake()

    def close(self) -> None:
        """Tell the other members that this process leaves, and end the agent's thread."""
        with self._lock:
            if self._closing:
                return
            self._census.leaving = True
            self._send_to_all({"t": "bye"})
        self._flush()
        self._closing = True
        self._wake()
        self._thread.join(GOODBYE_S)
        self._close_connections()

    def _flush(self) -> None:
        deadline = time.monotonic() + GOODBYE_S
        while time.monotonic() < deadline:
            self._wake()
            with self._lock:
                if not any(
                    link.wire and link.wire.waiting for link in self._links.values()
                ):
                    return
            time.sleep(DIAL_S)

    def _wake(self) -> None:
        self._poller.wake()

    def _take_in(self, connection: SealedConnection) -> None:
        """Serve another agent's connection, in a thread of the endpoint."""
        host, port = connection.hello["host"], connection.hello["port"]
        with self._lock:
            if not self._closing:
                wire = PolledConnection(connection.socket, self._poller, (host, port))
                self._incoming.add(wire)
                wire.begin(connection.session)
        self._wake()

    def _close_connections(self) -> None:
        self._channel.close()
        self.endpoint.close()
        with self._lock:
            self._poller.close()

    # The agent's thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:  # a process without its agent would wait for ever, and others for it
            traceback.print_exc()
            with self._lock:
                self._agreement.fatal = (
                    f"the agent of member {self.me.number} has failed: {error!r}"
                )
                self._census.break_view(self._agreement.fatal)
            self._call_on_break()
            self._close_connections()
        with self._lock:
            self._lock.notify_all()

    def _turn(self) -> None:
        dials = any(
            link.wire is None and not self._is_gone(link)
            for link in self._links.values()
        )
        pause = max(0.0, self._next_beat - time.monotonic())
        events = self._poller.wait(
            min(pause, DIAL_S) if dials or self._agreement.held else pause
        )
        with self._lock:
            now = time.monotonic()
            self._note_absence(now)
            for wire, readable, writable in events:
                self._handle(wire, readable, writable, now)
            self._follow(now)
            self._watch(now)
            self._agreement.step()
            self._tell(now)
            self._lock.notify_all()
        self._call_on_break()

    def _call_on_break(self) -> None:
        while self._census.breaks:
            try:
                self._on_break(self._census.breaks.pop(0))
            except Exception:
                traceback.print_exc()

    def _note_absence(self, now: float) -> None:
        """Do not count the time in which this process itself did not run as silence of others.

        They may have gone on meanwhile. Their messages have been read by now, unless they were lost on the way from
        another machine.
        """
        away = now - max(self._last, self._next_beat)
        if away > self._beat:
            for link in self._links.values():
                link.heard += away
                link.sure = link.member.machine == self.me.machine
        self._last = now

    def _handle(
        self, wire: PolledConnection, readable: bool, writable: bool, now: float
    ) -> None:
        if wire.closed:  # by what came in the same moment
            return
        try:
            if writable:
                wire.flush()
            if readable:
                for message in wire.receive():
                    self._hear(wire, message, now)
        except OSError as error:
            self._cut(wire, error)

    def _hear(self, wire: PolledConnection, message: Message, now: float) -> None:
        self._agreement.hear(
            wire.address, message, lambda answer: self._send(wire, answer)
        )
        if link := self._links.get(wire.address):
            link.heard, link.cut, link.sure, link.refused = now, False, True, 0.0
            if message["t"] == "stand":
                self.published[message["from"]] = message["facts_published"]

    def _send(self, wire: PolledConnection, message: Message) -> None:
        try:
            wire.send(message | {"from": self.me.number})
        except OSError as error:
            self._cut(wire, error)

    def _send_to(self, address: Address, message: Message) -> None:
        link = self._links.get(address)
        if link and link.wire:
            self._send(link.wire, message)

    def _send_to_all(self, message: Message) -> None:
        for address in list(self._links):
            self._send_to(address, message)

    def _tell(self, now: float) -> None:
        """Send this member's state to all, when it has changed and with every heartbeat."""
        said = {**self._agreement.stand(), "facts_published": self._facts}
        if said != self._said or now >= self._next_beat:
            self._said = said
            self._send_to_all(said)
        if now >= self._next_beat:
            self._agreement.repeat()
            self._next_beat = now + self._beat

    def _cut(self, wire: PolledConnection, error: Exception) -> None:
        """Close a connection that has ended with ``error``. If its process then refuses a new one, it is gone."""
        wire.close()
        self._incoming.discard(wire)
        link = self._links.get(wire.address)
        if link is None:
            return
        if link.wire is wire:
            link.wire = None
        if not isinstance(error, ConnectionRefusedError):
            link.cut, link.dialled = True, 0.0
        else:
            self._refused(link)

    def _refused(self, link: _Link) -> None:
        """Note that nobody listens there. If all connections of the process have ended and were read, it is gone."""
        link.refused = link.refused or time.monotonic()
        if link.cut and not any(
            wire.address == link.member.address for wire in self._incoming
        ):
            self._lose(link, GONE, proved=link.sure)

    def _follow(self, now: float) -> None:
        """Keep a link to each process that the agreement knows, and to no other."""
        peers = self._census.peers
        self._drop_links([address for address in self._links if address not in peers])
        for address, peer in peers.items():
            grace = 0.0 if peer.said else (PATIENCE - 1) * self._detect
            link = self._links.setdefault(address, _Link(peer.member, now + grace))
            link.member = peer.member

    def _drop_links(self, addresses: Sequence[Address]) -> None:
        for address in addresses:
            link = self._links.pop(address)
            if link.wire:
                link.wire.close()

    def _watch(self, now: float) -> None:
        """Dial processes that are not connected, and detect lost ones."""
        for link in list(self._links.values()):
            if self._is_gone(link):
                continue
            if link.wire is None and now - link.dialled > (
                DIAL_S if link.cut else PAUSE_S
            ):
                self._dial(link, now)
            if now - link.heard > self._detect / 2 and now - link.looked > self._beat:
                self._look(link, now)

    def _dial(self, link: _Link, now: float) -> None:
        link.dialled = now
        try:
            wire = self._channel.dial_polled(
                link.member.address,
                {"host": self.me.host, "port": self.me.port},
                self._poller,
            )
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):
                self._refused(link)
            return
        link.wire = wire
        self._send(wire, {**self._agreement.stand(), "facts_published": self._facts})

    def _look(self, link: _Link, now: float) -> None:
        """Judge a silent member: by its process, if that is on this machine, and by the time of its silence."""
        link.looked, limit = now, self._detect
        if link.member.machine == self.me.machine:
            sight, link.ticks = look_at(
                link.member.pid, link.member.started, link.ticks
            )
            if sight in ("gone", "stopped"):
                self._lose(link, GONE if sight == "gone" else STOPPED, proved=True)
                return
            limit *= PATIENCE if sight in ("works", "blocked") else 1
        if now - link.heard > limit:
            self._lose(
                link, f"has not answered for {now - link.heard:.1f} s", proved=False
            )

    def _is_gone(self, link: _Link) -> bool:
        loss = self._census.lost.get(link.member.address)
        return loss is not None and loss.proved

    def _lose(self, link: _Link, why: str, proved: bool) -> None:
        if link.member.address in self._census.peers:
            self._census.lose(link.member.address, why, proved)
