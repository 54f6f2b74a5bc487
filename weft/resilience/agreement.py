"""How members agree on the next view: one member's side of the protocol, without sockets and threads.

It is a two-phase commit. The *leader* is the member with the lowest number among those that can go on together. It
waits until all of them have asked for the next view, proposes one under a higher epoch than any that they have
acknowledged, and commits it when all have acknowledged it. A member acknowledges one proposal per epoch, and only if
the proposed members are a quorum of every view that it may be in. So a late leader is refused, and the next leader
starts over. Every heartbeat repeats a member's state, and a message may arrive twice: none needs to arrive at all.
Who can go on together is worked out in :mod:`weft.resilience.census`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from weft.resilience.census import Census, Message, OtherMember
from weft.resilience.views import (
    LEFT,
    NEWCOMER,
    Address,
    Fatal,
    LeftOut,
    Member,
    TooFew,
    View,
    is_quorum,
)

Send = Callable[[Message], None]

#: Seconds for which a leader that was refused waits before it proposes again, so that two of them do not race for long.
HOLD_S = 0.01, 0.04


class Agreement:
    """State of one member in the protocol by which members agree on the next view (the set of members of the run).

    The caller passes every received message to :meth:`hear`, and calls :meth:`step` after each message and at regular
    intervals. ``me``: description of this member; ``clock``: function that returns the time in seconds.

    Attributes:
        ``census``: what this member knows of the others.
        ``send``: ``send(address, message)`` sends a message to the member at ``(host, port)``, and may lose the
            message.
        ``seen``: the last view that was committed and passed on to this process; None before the first.
        ``fatal``: reason why the run must end at all members; "" while it may go on.
        ``ended``: whether this process has come to the end of the run.
        ``outcome``: result of :meth:`want`: the next view, or the error that prevents it; None while it is undecided.
        ``noted``: for a newcomer, whether a member of the run has answered its request to join.
    """

    def __init__(
        self,
        me: Member,
        send: Callable[[Address, Message], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.census, self.send, self._clock = Census(me), send, clock
        self.seen: View | None = None  # the one that the process was given last
        self.fatal = ""
        self.ended = False  # the process has come to the end of the run
        self.outcome: View | Exception | None = None
        self.noted = False  # as a newcomer: somebody has answered
        self._promised = 0  # highest epoch acknowledged
        # acknowledged since the view was committed; any may be committed somewhere
        self._accepted: list[View] = []
        self._proposal: View | None = None
        # what the proposal was made from; once that has changed, it is void
        self._basis: Any = None
        self._acked: set[Address] = set()
        self._hold = 0.0  # no proposal before this time
        # counts what the process wants; an acknowledgement is for one of these
        self._call = 0
        self._facts: Message | None = None
        self._since = self._deadline = self._patience = 0.0
        self._life = 0
        self._random = random.Random(str(me.address))

    # Called by this member's own process and agent.

    @property
    def me(self) -> Member:
        return self.census.me

    def begin(self, view: View) -> None:
        """Take ``view`` as the present view without an agreement, because it is the first view of the run."""
        self._adopt(view)
        self.seen = view

    def start_over(self, contacts: Collection[Address]) -> None:
        """Become a newcomer that asks the members at the addresses ``contacts`` to let this process into the run."""
        self._life += 1
        self.census.me = replace(self.me, number=NEWCOMER)
        self.census.start_over(contacts)
        self._accepted, self._promised = [], 0
        self.seen, self.noted, self.outcome = None, False, None

    def want(self, facts: Message, limit: float, patience: float | None = None) -> None:
        """Ask for the next view. Within ``limit`` seconds ``outcome`` is that view, or the error that prevents it.

        ``facts``: what this member tells all members of the next view, as JSON. ``patience``: seconds to wait for
        members that are alive but have not asked for the next view, if the present view is broken. After that time they
        are left out. Default: half of ``limit``.
        """
        self._call += 1
        self._facts = json.loads(json.dumps(facts))  # as others will see them
        self._since = self._clock()
        self._deadline = self._since + limit
        self._patience = limit / 2 if patience is None else patience
        if not isinstance(self.outcome, LeftOut):
            self.outcome = None

    def take(self) -> View | Exception | None:
        """Withdraw the request of :meth:`want`, and return its outcome: the next view, or the error that prevents
        it.

        Returns None if it was still undecided.
        """
        outcome, self.outcome, self._facts = self.outcome, None, None
        if isinstance(outcome, View):
            self.seen = outcome
        return outcome

    @property
    def held(self) -> bool:
        """Whether this member waits before it proposes the next view again, so that the caller must call :meth:`step`
        soon.

        The wait has a random length. It begins when another member has refused a proposal, so that two proposing
        members do not refuse each other for ever.
        """
        return self._hold > self._clock()

    @property
    def waits(self) -> bool:
        """Whether this member has asked for the next view and still waits for the outcome."""
        return self._facts is not None and self.outcome is None

    # Messages to others, and from them.

    def stand(self) -> Message:
        """Return the message by which this member tells the others its state: what it asks for, and whom it considers
        lost.

        Its type, the key ``"t"``, is ``stand``.
        """
        census = self.census
        return {
            "t": "stand", "epoch": census.epoch, "promised": self._promised, "call": self._call, "facts": self._facts,
            "lost": [[*address, loss.why, loss.proved] for address, loss in census.lost.items()],
            "broken": census.why, "leaving": census.leaving, "ended": self.ended,
            "hears": [list(peer.member.address) for peer in census.newcomers()],
            "life": self._life, "noted": self.noted, "calls": self.waits, "member": asdict(self.me),
            "knows": [] if census.view else [list(address) for address in census.peers],
        }  # fmt: skip

    def repeat(self) -> None:
        """Send this member's proposal of the next view, if any, again to the members that have not acknowledged it."""
        if self._proposal:
            for member in self._proposal.members:
                if member.address not in self._acked:
                    self.send(member.address, self._propose_message())

    def hear(self, address: Address, message: Message, reply: Send) -> None:
        """Handle ``message`` from the member at ``address``.

        ``reply(answer)`` sends an answer over the connection on which the message came.
        """
        kind, number, census = message["t"], message["from"], self.census
        if census.view is None:
            census.lost.pop(address, None)
            if kind == "noted":
                self.noted = True
                census.know([Member(**member) for member in message["members"]])
        elif kind == "stand" and number == NEWCOMER:
            self._greet(address, message, reply)
        elif kind == "stand" and message["epoch"] < census.epoch:
            self._put_right(number, reply)
        peer = census.peers.get(address)
        if kind == "remove":
            census.leaving = True
        elif kind == "leftout":
            self._on_left_out(message)
        if peer is None or peer.member.number not in (NEWCOMER, number):
            return
        if kind == "stand":
            census.hear(peer, message)
        elif kind == "propose":
            self._on_propose(address, message)
        elif kind in ("ack", "nack"):
            self._on_answer(address, message)
        elif kind == "commit":
            self._on_commit(message["epoch"])
        elif kind == "bye":
            census.lose(address, LEFT, proved=True)
        elif kind == "fatal" and census.view and census.view.at(address):
            self.fatal = message["text"]
            census.break_view(self.fatal)

    def _greet(self, address: Address, message: Message, reply: Send) -> None:
        """Answer a newcomer: it has been let in already, or it must ask these other members."""
        census, view = self.census, self.census.view
        assert view is not None
        if view.at(address):
            # it has found out before us that it was left out
            if message["life"] > census.peers[address].life:
                census.lose(address, LEFT, proved=True)
            else:  # it does not know yet that it is let in
                reply({"t": "commit", "epoch": view.epoch})
            return
        if address not in census.peers:
            census.lost.pop(address, None)
            census.peers[address] = OtherMember(Member(**message["member"]))
        if not message["noted"] or message["knows"] != [
            list(member.address) for member in view.members
        ]:
            reply(
                {"t": "noted", "members": [asdict(member) for member in view.members]}
            )

    def _put_right(self, number: int, reply: Send) -> None:
        """Tell a member in an older view that the present view is committed, or has left it out."""
        census = self.census
        assert census.view is not None
        if census.view.rank(number) is not None:
            reply({"t": "commit", "epoch": census.epoch})
        else:
            reply(
                {
                    "t": "leftout",
                    "epoch": census.epoch,
                    "why": census.reason_left_out(number),
                }
            )

    def _on_left_out(self, message: Message) -> None:
        view = self.census.view
        if (
            view
            and message["epoch"] > view.epoch
            and not isinstance(self.outcome, LeftOut)
        ):
            asked = message["why"] == LEFT
            text = (
                "it was asked to leave"
                if asked
                else f"they found that it {message['why']}"
            )
            rank = view.rank(self.me.number)
            self.outcome = LeftOut(
                f"the others have gone on without rank {rank}: {text}", asked
            )
            self.census.break_view(str(self.outcome))

    # The two phases.

    def step(self) -> None:
        """Make this member's next move in the agreement, if a move is due.

        The leader, which is the remaining member with the lowest number, proposes or commits the next view. Any member
        gives up when the time limit of its request (:meth:`want`) is over.
        """
        now = self._clock()
        if not self.waits:
            return
        if self.fatal:
            self.outcome = Fatal(self.fatal)
        elif now > self._deadline:
            self.outcome = TooFew(self.census.missing(self._deadline - self._since))
        elif self.census.view is not None:
            if self.census.why and now - self._since > self._patience:
                self.census.lose_absent(now - self._since)
            self._lead(now)

    def _lead(self, now: float) -> None:
        census = self.census
        kept = census.kept()
        if not kept and census.leaving:
            self.outcome = LeftOut("all members leave", asked=True)
        if not kept or kept[0].address != self.me.address:
            self._proposal = None
            return
        joiners = census.joiners(kept)
        ready = [census.peers[member.address] for member in kept[1:]] + joiners
        basis = (
            [(peer.member.address, peer.said.get("call")) for peer in ready],
            self._call,
        )
        if self._basis != basis:
            self._proposal, self._basis = None, basis
        if not all(
            peer.wants
            and peer.said["epoch"] == (0 if peer in joiners else census.epoch)
            for peer in ready
        ):
            self._proposal = None
        elif self._proposal is None and now >= self._hold:
            self._propose(kept, ready, joiners)
        if self._proposal and len(self._acked) == len(self._proposal.members):
            proposal = self._proposal
            for member in proposal.members:
                self.send(member.address, {"t": "commit", "epoch": proposal.epoch})
            self._on_commit(proposal.epoch)

    def _propose(
        self, kept: list[Member], ready: list[OtherMember], joiners: list[OtherMember]
    ) -> None:
        """Propose a view of ``kept`` and ``joiners``; ``ready``: all of these except this member."""
        census, before = self.census, self.census.view
        assert before is not None and self._facts is not None
        numbers = max(view.numbers for view in [before, *self._accepted])
        members = kept + [
            replace(peer.member, number=number)
            for number, peer in enumerate(joiners, numbers)
        ]
        reasons = {
            m.number: census.reason(m.address) for m in before.members if m not in kept
        }
        epoch = max([self._promised, *(peer.said["promised"] for peer in ready)]) + 1
        facts = (self._facts, *(peer.said["facts"] for peer in ready))
        view = replace(
            before, epoch=epoch, members=tuple(members), facts=facts, lost=(), numbers=numbers + len(joiners),
            reasons={**(before.reasons or {}), **reasons},
        )  # fmt: skip
        # as the others will see it
        view = View.of(json.loads(json.dumps(view.message())), self.seen)
        if not self._refusal(view, self._call, census.excused(), census.stopped()):
            self._proposal, self._acked = view, {self.me.address}
            self._accept(view)
            self.repeat()

    def _propose_message(self) -> Message:
        assert self._proposal is not None
        calls = {
            address: peer.said.get("call")
            for address, peer in self.census.peers.items()
        }
        return {
            "t": "propose",
            "view": self._proposal.message(),
            "calls": [calls.get(member.address) for member in self._proposal.members],
            "excused": [*self.census.excused()],
            "stopped": [*self.census.stopped()],
        }

    def _on_propose(self, leader: Address, message: Message) -> None:
        view = View.of(message["view"], self.seen)
        me = view.at(self.me.address)
        if me is None:
            return
        if view not in self._accepted:
            excused = {
                (host, port) for host, port in message["excused"]
            } | self.census.excused()
            stopped = {
                (host, port) for host, port in message["stopped"]
            } | self.census.stopped()
            call = message["calls"][view.members.index(me)]
            if refusal := self._refusal(view, call, excused, stopped):
                nack = {
                    "t": "nack",
                    "epoch": view.epoch,
                    "promised": self._promised,
                    "why": refusal,
                }
                self.send(leader, nack)
                return
            self._accept(view)
        self.send(leader, {"t": "ack", "epoch": view.epoch})

    def _refusal(
        self, view: View, call: int, excused: set[Address], stopped: set[Address]
    ) -> str:
        """Return why this member does not acknowledge this proposal; "" if it does."""
        census = self.census
        if not self.waits or call != self._call:
            return "is not at this call"
        if view.epoch <= max(self._promised, census.epoch):
            return "has acknowledged a later one"
        if census.leaving:
            return "leaves"
        if any(member.address in census.lost for member in view.members):
            return "has lost a member of it"
        places = [member.address for member in view.members]
        # of the view committed last, and of all that were acknowledged since
        before = [census.view, *self._accepted] if census.view else self._accepted
        quorum = all(
            is_quorum(each.members, places, excused, stopped) for each in before
        )
        return "" if quorum else "is no quorum"

    def _accept(self, view: View) -> None:
        self._promised = view.epoch
        self._accepted.append(view)

    def _on_answer(self, address: Address, message: Message) -> None:
        if self._proposal is None or message["epoch"] != self._proposal.epoch:
            return
        if message["t"] == "ack":
            self._acked.add(address)
        else:
            self._promised = max(self._promised, message["promised"])
            self._proposal = None
            self._hold = self._clock() + self._random.uniform(*HOLD_S)

    def _on_commit(self, epoch: int) -> None:
        view = next((view for view in self._accepted if view.epoch == epoch), None)
        if view is not None and epoch > self.census.epoch:
            waits = self.waits
            self._adopt(view)
            if waits:
                self.outcome = view
            else:  # it has acknowledged two, and is told of both
                self.census.break_view("an agreement has come too late for this rank")

    def _adopt(self, view: View) -> None:
        """Make ``view`` the present one, and tell the members that it leaves out."""
        self._accepted = [later for later in self._accepted if later.epoch > view.epoch]
        self._promised = max(self._promised, view.epoch)
        self._proposal = None
        for member in self.census.adopt(view):
            self._put_right(member.number, partial(self.send, member.address))
