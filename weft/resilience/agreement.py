"""How members agree on the next view: one member's side of the protocol, without sockets and threads.

It is a two-phase commit. The *leader* is the member with the lowest number among those that can go on together. It
waits until all of them have asked for the next view, proposes one under a higher epoch than any that they have
acknowledged, and commits it when all have acknowledged it. A member acknowledges one proposal per epoch, and only if
the proposed members are a quorum of every view that it may be in. So a late leader is refused, and the next leader
starts over. Every heartbeat repeats a member's state, and a message may arrive twice: none needs to arrive at all.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from weft.resilience import members as rules
from weft.resilience.members import (
    GONE,
    LEFT,
    NEWCOMER,
    STOPPED,
    Address,
    Fatal,
    LeftOut,
    Member,
    MemberLoss,
    TooFew,
    View,
)

#: Why a member is lost that is there, but does not come to agree.
ABSENT = "has not come back from its step"

Message = dict[str, Any]
Send = Callable[[Message], None]

#: Seconds for which a leader that was refused waits before it proposes again, so that two of them do not race for long.
HOLD_S = 0.01, 0.04


@dataclass
class OtherMember:
    """Another process. ``said``: the last ``stand`` message that it has sent, {} if there was none in this view."""

    member: Member
    said: Message = field(default_factory=dict)
    life: int = 0  # how often it had wanted to be let in when it was heard last

    @property
    def wants(self) -> bool:
        return self.said.get("facts") is not None


class Agreement:
    """One member's state in the protocol. ``send(address, message)`` may lose messages.

    Whoever drives it calls :meth:`hear` with every message that comes, and :meth:`step` after that and from time to
    time. Addresses are pairs (host, port).
    """

    def __init__(
        self,
        me: Member,
        send: Callable[[Address, Message], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.me, self.send, self._clock = me, send, clock
        self.view: View | None = None  # committed last
        self.seen: View | None = None  # the one that the process was given last
        self.why = ""  # why the view can do no further step
        self.fatal = ""
        self.leaving = False
        self.ended = False  # the process has come to the end of the run
        self.outcome: View | Exception | None = None
        self.breaks: list[str] = []  # every ``why``, for the agent to take away
        self.noted = False  # as a newcomer: somebody has answered
        self.peers: dict[Address, OtherMember] = {}
        self.lost: dict[Address, MemberLoss] = {}  # of this view
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

    def begin(self, view: View) -> None:
        """Be a member of the run's first view."""
        self._adopt(view)
        self.seen = view

    def start_over(self, contacts: Collection[Address]) -> None:
        """Be a newcomer from now on, which asks those at ``contacts`` to be let in."""
        self._life += 1
        self.me, self.view, self.seen = replace(self.me, number=NEWCOMER), None, None
        self._accepted, self._promised = [], 0
        self.lost, self.why, self.noted, self.leaving, self.outcome = (
            {},
            "",
            False,
            False,
            None,
        )
        places = {*contacts} - {self.me.address}
        self.peers = {
            (host, port): OtherMember(Member(NEWCOMER, host, port, "", 0, 0.0))
            for host, port in places
        }

    def want(self, facts: Message, limit: float, patience: float | None = None) -> None:
        """Ask for the next view. Within ``limit`` seconds ``outcome`` is that view, or the error why there is none.

        ``facts`` are handed to all members of that view. Where the present view is broken, members that are alive but
        have not asked for the next one within ``patience`` seconds (default: half of ``limit``) are left out of it.
        """
        self._call += 1
        self._facts = json.loads(json.dumps(facts))  # as others will see them
        self._since = self._clock()
        self._deadline = self._since + limit
        self._patience = limit / 2 if patience is None else patience
        if not isinstance(self.outcome, LeftOut):
            self.outcome = None

    def take(self) -> View | Exception | None:
        """The outcome of :meth:`want`, if there is one yet; ends the wish."""
        outcome, self.outcome, self._facts = self.outcome, None, None
        if isinstance(outcome, View):
            self.seen = outcome
        return outcome

    def break_view(self, why: str) -> None:
        """The present view can do no further step; ``why`` in words."""
        if not self.why:
            self.why = why
            self.breaks.append(why)

    def lose(
        self, address: Address, why: str, proved: bool, witnessed: bool = False
    ) -> None:
        """Note that the member at ``address`` is lost. ``proved``: it certainly is gone, and not just silent.

        ``witnessed``: another member found it, which was in contact with it to the end. Without that, a proof does not
        count if one of the two had taken the other for lost before: it may have gone on with others, and died later.
        """
        peer, known = self.peers[address], self.lost.get(address)
        if known and (known.proved or not witnessed):
            return
        accuses = any(
            (host, port) == self.me.address
            for host, port, _, _ in peer.said.get("lost", ())
        )
        self.lost[address] = MemberLoss(why, proved and (witnessed or not accuses))
        if self.view is None:
            return
        if self.view.at(address) is None:
            self.peers.pop(address)  # it comes back when it is heard of again
        elif not known and not (
            self.leaving and (why == LEFT or peer.said.get("leaving"))
        ):  # else all go home
            self.break_view(f"rank {self.view.rank(peer.member.number)} {why}")

    @property
    def held(self) -> bool:
        """Whether :meth:`step` is to be called again soon."""
        return self._hold > self._clock()

    def wishes(self) -> bool:
        """Whether somebody wants to join or to leave."""
        kept = self._kept()
        leaving = self.leaving or any(
            peer.said.get("leaving") for peer in self._others()
        )
        return self.view is not None and (leaving or bool(self._joiners(kept)))

    @property
    def called(self) -> bool:
        """Whether it is time to ask for the next view: another member has, or somebody wants to join or to leave."""
        return self.wishes() or any(peer.said.get("calls") for peer in self._others())

    @property
    def all_ended(self) -> bool:
        """Whether each other member of this view has ended the run, has asked for another view, or is lost."""
        return all(
            peer.said.get("ended") or peer.wants or peer.member.address in self.lost
            for peer in self._others()
        )

    # Messages to others, and from them.

    def stand(self) -> Message:
        """The message that tells others this member's state."""
        return {
            "t": "stand", "epoch": self._epoch, "promised": self._promised, "call": self._call, "facts": self._facts,
            "lost": [[*address, loss.why, loss.proved] for address, loss in self.lost.items()], "broken": self.why,
            "leaving": self.leaving, "ended": self.ended,
            "hears": [list(peer.member.address) for peer in self._newcomers()],
            "life": self._life, "noted": self.noted, "calls": self._facts is not None and self.outcome is None,
            "member": asdict(self.me), "knows": [list(address) for address in self.peers] if self.view is None else [],
        }  # fmt: skip

    def repeat(self) -> None:
        """Send the proposal again to those who have not acknowledged it."""
        if self._proposal:
            for member in self._proposal.members:
                if member.address not in self._acked:
                    self.send(member.address, self._propose_message())

    def hear(self, address: Address, message: Message, reply: Send) -> None:
        """Take a message that came from ``address``; ``reply`` answers over the connection that it came by."""
        kind, number = message["t"], message["from"]
        if self.view is None:
            self.lost.pop(address, None)
            if kind == "noted":
                self._on_noted([Member(**member) for member in message["members"]])
        elif kind == "stand" and number == NEWCOMER:
            self._greet(address, message, reply)
        elif kind == "stand" and message["epoch"] < self._epoch:
            self._put_right(number, reply)
        peer = self.peers.get(address)
        if kind == "remove":
            self.leaving = True
        elif kind == "leftout":
            self._on_left_out(message)
        if peer is None or peer.member.number not in (NEWCOMER, number):
            return
        if kind == "stand":
            self._on_stand(peer, message)
        elif kind == "propose":
            self._on_propose(address, message)
        elif kind in ("ack", "nack"):
            self._on_answer(address, message)
        elif kind == "commit":
            self._on_commit(message["epoch"])
        elif kind == "bye":
            self.lose(address, LEFT, proved=True)
        elif kind == "fatal" and self.view and self.view.at(address):
            self.fatal = message["text"]
            self.break_view(self.fatal)

    def _on_stand(self, peer: OtherMember, message: Message) -> None:
        peer.said, peer.life = message, message["life"]
        loss = self.lost.get(peer.member.address)
        if (
            loss
            and (loss.why == STOPPED or not loss.proved)
            and (peer.wants or not loss.why.startswith(ABSENT))
        ):
            # here it is again, before the others have gone on
            self.lost.pop(peer.member.address)
        if self.view is None:
            return
        for host, port, why, proved in message["lost"]:
            known = (host, port) != self.me.address and self.view.at((host, port))
            # a stop may end; who found it says so as long as it lasts
            if known and proved and why != STOPPED:
                self.lose((host, port), why, proved, witnessed=True)
        if message["epoch"] == self._epoch and message["broken"]:
            self.break_view(message["broken"])

    def _greet(self, address: Address, message: Message, reply: Send) -> None:
        """Answer a newcomer: tell it that it is let in already, or whom else it has to ask."""
        assert self.view is not None
        if self.view.at(address):
            # it has found out before us that it was left out
            if message["life"] > self.peers[address].life:
                self.lose(address, LEFT, proved=True)
            else:  # it does not know yet that it is let in
                reply({"t": "commit", "epoch": self._epoch})
            return
        if address not in self.peers:
            self.lost.pop(address, None)
            self.peers[address] = OtherMember(Member(**message["member"]))
        members = [asdict(member) for member in self.view.members]
        if not message["noted"] or message["knows"] != [
            [member.host, member.port] for member in self.view.members
        ]:
            reply({"t": "noted", "members": members})

    def _on_noted(self, members: list[Member]) -> None:
        """This newcomer learns who the members are, all of which it then asks."""
        self.noted = True
        self.peers = {
            m.address: self.peers.get(m.address, OtherMember(m))
            for m in members
            if m.address != self.me.address
        }
        for member in members:
            if member.address in self.peers:
                self.peers[member.address].member = member

    def _put_right(self, number: int, reply: Send) -> None:
        """Tell a member that is still in an older view that the present one is committed, or has left it out."""
        assert self.view is not None
        if self.view.rank(number) is not None:
            reply({"t": "commit", "epoch": self._epoch})
        else:
            reply(
                {
                    "t": "leftout",
                    "epoch": self._epoch,
                    "why": (self.view.reasons or {}).get(number, GONE),
                }
            )

    def _on_left_out(self, message: Message) -> None:
        if (
            self.view
            and message["epoch"] > self._epoch
            and not isinstance(self.outcome, LeftOut)
        ):
            asked = message["why"] == LEFT
            text = (
                "it was asked to leave"
                if asked
                else f"they found that it {message['why']}"
            )
            rank = self.view.rank(self.me.number)
            self.outcome = LeftOut(
                f"the others have gone on without rank {rank}: {text}", asked
            )
            self.break_view(str(self.outcome))

    # Who can go on.

    @property
    def _epoch(self) -> int:
        return self.view.epoch if self.view else 0

    def _others(self) -> list[OtherMember]:
        """The other members of the present view."""
        members = self.view.members if self.view else ()
        return [
            self.peers[member.address]
            for member in members
            if member.address != self.me.address
        ]

    def _newcomers(self) -> list[OtherMember]:
        """Who wants to be let in, and is heard here."""
        return [
            peer
            for peer in self.peers.values()
            if self.view and not self.view.at(peer.member.address) and peer.wants
        ]

    def _kept(self) -> list[Member]:
        """The members of the present view that can go on together, as far as this one knows."""
        if self.view is None:
            return []
        number = {member.address: member.number for member in self.view.members}
        quarrels = [
            (self.me.number, number[address])
            for address in self.lost
            if address in number
        ]
        for peer in self._others():
            if peer.member.address not in self.lost:
                accused = [
                    number.get((host, port))
                    for host, port, _, _ in peer.said.get("lost", ())
                ]
                quarrels += [
                    (peer.member.number, other)
                    for other in accused
                    if other is not None
                ]
        out = (
            self._excused()
            | self._stopped()
            | ({self.me.address} if self.leaving else set())
        )
        kept = rules.without_quarrels(
            [m.number for m in self.view.members if m.address not in out], quarrels
        )
        return [member for member in self.view.members if member.number in kept]

    def _joiners(self, kept: Collection[Member]) -> list[OtherMember]:
        """The newcomers that all of ``kept`` hear, and that hear them."""
        others = [
            self.peers[member.address]
            for member in kept
            if member.address != self.me.address
        ]
        places = {member.address for member in kept}

        def fits(peer: OtherMember) -> bool:
            heard = all(
                list(peer.member.address) in other.said.get("hears", ())
                for other in others
            )
            misses = places.intersection(
                (host, port) for host, port, _, _ in peer.said["lost"]
            )
            return heard and not misses and not peer.said["leaving"]

        return [peer for peer in self._newcomers() if fits(peer)]

    def _excused(self) -> set[Address]:
        """Who certainly takes part in no other view: members proved to be gone, and those that want to leave."""
        gone = {
            address
            for address, loss in self.lost.items()
            if loss.proved and loss.why != STOPPED
        }
        return gone | {
            peer.member.address for peer in self._others() if peer.said.get("leaving")
        }

    def _stopped(self) -> set[Address]:
        """Whose process is stopped (SIGSTOP), as this member sees, or one that it has not lost."""
        seen = [
            (*address, loss.why, loss.proved) for address, loss in self.lost.items()
        ]
        for peer in self._others():
            if peer.member.address not in self.lost:
                seen += peer.said.get("lost", ())
        return {
            (host, port)
            for host, port, why, proved in seen
            if why == STOPPED and proved
        }

    def _has_quorum(
        self, kept: Collection[Address], excused: set[Address], stopped: set[Address]
    ) -> bool:
        """Whether ``kept`` are a quorum of the view committed last and of all that were acknowledged since."""
        views = [self.view, *self._accepted] if self.view else self._accepted
        return all(
            rules.is_quorum(view.members, kept, excused, stopped) for view in views
        )

    # The two phases.

    def step(self) -> None:
        """This member's next move, if it is its turn."""
        now = self._clock()
        if self._facts is None or self.outcome is not None:
            return
        if self.fatal:
            self.outcome = Fatal(self.fatal)
        elif now > self._deadline:
            self.outcome = TooFew(self._missing())
        elif self.view is not None:
            self._lose_absent(now)
            self._lead(now)

    def _lose_absent(self, now: float) -> None:
        """In a broken view, count members as lost that are alive, but have not asked for the next one in time."""
        if self.why and now - self._since > self._patience:
            for peer in self._others():
                if not peer.wants and peer.member.address not in self.lost:
                    why = f"{ABSENT} for {now - self._since:.0f} s"
                    self.lose(peer.member.address, why, proved=False)

    def _lead(self, now: float) -> None:
        assert self.view is not None
        kept = self._kept()
        if not kept and self.leaving:
            self.outcome = LeftOut("all members leave", asked=True)
        if not kept or kept[0].address != self.me.address:
            self._proposal = None
            return
        joiners = self._joiners(kept)
        ready = [self.peers[member.address] for member in kept[1:]] + joiners
        basis = (
            [(peer.member.address, peer.said.get("call")) for peer in ready],
            self._call,
        )
        if self._basis != basis:
            self._proposal, self._basis = None, basis
        at = [0 if peer in joiners else self._epoch for peer in ready]
        if any(
            not peer.wants or peer.said["epoch"] != epoch
            for peer, epoch in zip(ready, at, strict=True)
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
        """Propose a view of ``kept`` and ``joiners``; ``ready``: all of these but this member itself."""
        assert self.view is not None and self._facts is not None
        numbers = max(view.numbers for view in [self.view, *self._accepted])
        members = kept + [
            replace(peer.member, number=numbers + i) for i, peer in enumerate(joiners)
        ]
        reasons = {
            m.number: self._reason(m.address)
            for m in self.view.members
            if m not in kept
        }
        epoch = max([self._promised, *(peer.said["promised"] for peer in ready)]) + 1
        facts = (self._facts, *(peer.said["facts"] for peer in ready))
        view = replace(
            self.view, epoch=epoch, members=tuple(members), facts=facts, lost=(), numbers=numbers + len(joiners),
            reasons={**(self.view.reasons or {}), **reasons},
        )  # fmt: skip
        # as the others will see it
        view = View.of(json.loads(json.dumps(view.message())), self.seen)
        if not self._refusal(view, self._call, self._excused(), self._stopped()):
            self._proposal, self._acked = view, {self.me.address}
            self._accept(view)
            self.repeat()

    def _reason(self, address: Address) -> str:
        """Why that member is not in the next view, as this member or any other says."""
        accused = [
            (tuple(place), why)
            for peer in self._others()
            for *place, why, _ in peer.said.get("lost", ())
        ]
        said = [why for place, why in accused if place == address]
        return (
            self.lost[address].why
            if address in self.lost
            else said[0]
            if said
            else LEFT
        )

    def _propose_message(self) -> Message:
        assert self._proposal is not None
        calls = {address: peer.said.get("call") for address, peer in self.peers.items()}
        return {
            "t": "propose",
            "view": self._proposal.message(),
            "calls": [calls.get(member.address) for member in self._proposal.members],
            "excused": [*self._excused()],
            "stopped": [*self._stopped()],
        }

    def _on_propose(self, leader: Address, message: Message) -> None:
        view = View.of(message["view"], self.seen)
        own = next(
            (
                rank
                for rank, member in enumerate(view.members)
                if member.address == self.me.address
            ),
            None,
        )
        if own is None:
            return
        if view not in self._accepted:
            excused = {
                (host, port) for host, port in message["excused"]
            } | self._excused()
            stopped = {
                (host, port) for host, port in message["stopped"]
            } | self._stopped()
            if refusal := self._refusal(view, message["calls"][own], excused, stopped):
                self.send(
                    leader,
                    {
                        "t": "nack",
                        "epoch": view.epoch,
                        "promised": self._promised,
                        "why": refusal,
                    },
                )
                return
            self._accept(view)
        self.send(leader, {"t": "ack", "epoch": view.epoch})

    def _refusal(
        self, view: View, call: int, excused: set[Address], stopped: set[Address]
    ) -> str:
        """Why this member does not acknowledge this proposal; "" if it does."""
        if self._facts is None or call != self._call or self.outcome is not None:
            return "is not at this call"
        if view.epoch <= max(self._promised, self._epoch):
            return "has acknowledged a later one"
        if self.leaving:
            return "leaves"
        if any(member.address in self.lost for member in view.members):
            return "has lost a member of it"
        return (
            ""
            if self._has_quorum([m.address for m in view.members], excused, stopped)
            else "is no quorum"
        )

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
            self._proposal, self._hold = (
                None,
                self._clock() + self._random.uniform(*HOLD_S),
            )

    def _on_commit(self, epoch: int) -> None:
        view = next((view for view in self._accepted if view.epoch == epoch), None)
        if view is not None and epoch > self._epoch:
            waits = self._facts is not None and self.outcome is None
            self._adopt(view)
            if waits:
                self.outcome = view
            else:  # it has acknowledged two, and is told of both
                self.break_view("an agreement has come too late for this rank")

    def _adopt(self, view: View) -> None:
        """Make ``view`` the present one, and forget what belonged to the one before."""
        old, self.view = self.view, view
        me = view.at(self.me.address)
        assert me is not None
        self.me = me
        self._accepted = [one for one in self._accepted if one.epoch > view.epoch]
        self._promised = max(self._promised, view.epoch)
        self.lost, self._proposal, self.why = {}, None, ""
        for address, peer in list(self.peers.items()):
            if not view.at(address) and (
                peer.member.number != NEWCOMER or not peer.said
            ):
                if old and old.at(address):
                    self._put_right(peer.member.number, partial(self.send, address))
                self.peers.pop(address)
        for member in view.members:
            if member.address != self.me.address:
                peer = self.peers.setdefault(member.address, OtherMember(member))
                peer.member = member
                peer.said = (
                    peer.said if peer.said.get("epoch", -1) >= view.epoch else {}
                )
        for peer in self._others():
            # what it found out before this member knew that the view is committed
            if peer.said:
                self._on_stand(peer, peer.said)

    def _missing(self) -> str:
        """Whom the agreement waited for in vain."""
        limit = self._deadline - self._since
        if self.view is None:
            return f"no member of the run has let this process in within {limit:g} s"
        parts = []
        for peer in self._others():
            loss = self.lost.get(peer.member.address)
            if loss or not peer.wants:
                why = loss.why if loss else "has not come to agree"
                parts.append(f"rank {self.view.rank(peer.member.number)} {why}")
        count = f"{len(self._kept())} of {len(self.view.members)} ranks cannot go on by themselves"
        return f"{count}, and no others have come back within {limit:g} s: {'; '.join(parts) or 'none is missing'}"
