"""How members agree on the next view: one member's side of it, as messages in and messages out.

The *leader* is the member with the lowest number among those that can go on together. It waits until all of them want
the next view, proposes it under a higher epoch than any that they have acknowledged, and commits it when all have
acknowledged. Nobody acknowledges twice under one epoch, nor what is no quorum of every view that it may be in. So a
leader that comes late is refused, and whoever is leader next just starts over. What members say of themselves is said
again with every heartbeat, and all that is said can be heard twice: no message needs to arrive.
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
    """Another process, and what it said last of where it stands; nothing yet of this view: {}."""

    member: Member
    said: Message = field(default_factory=dict)
    life: int = 0  # how often it had wanted to be let in when it was heard last

    @property
    def wants(self) -> bool:
        return self.said.get("facts") is not None


class Agreement:
    """One member's part. ``send(address, message)`` may lose messages; :meth:`step` makes the next move."""

    def __init__(
        self, me: Member, send: Callable[[Address, Message], None], clock: Callable[[], float] = time.monotonic
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
        self._accepted: list[View] = []  # acknowledged since the view was committed; any may be committed somewhere
        self._proposal: View | None = None
        self._basis: Any = None  # what the proposal was made from; once that has changed, it is void
        self._acked: set[Address] = set()
        self._hold = 0.0  # no proposal before this time
        self._call = 0  # counts what the process wants; an acknowledgement is for one of these
        self._facts: Message | None = None
        self._since = self._deadline = self._patience = 0.0
        self._life = 0
        self._random = random.Random(str(me.address))

    # What this member's own process and agent say.

    def begin(self, view: View) -> None:
        self._adopt(view)
        self.seen = view

    def start_over(self, contacts: Collection[Address]) -> None:
        """From now on this is a process that wants to be let in."""
        self._life += 1
        self.me, self.view, self.seen, self._accepted, self._promised = (
            replace(self.me, number=NEWCOMER),
            None,
            None,
            [],
            0,
        )
        self.lost, self.why, self.noted, self.leaving, self.outcome = {}, "", False, False, None
        places = {*contacts} - {self.me.address}
        self.peers = {(host, port): OtherMember(Member(NEWCOMER, host, port, "", 0, 0.0)) for host, port in places}

    def want(self, facts: Message, limit: float, patience: float | None = None) -> None:
        """The process wants the next view; it then finds it, or why there is none, in ``outcome``.

        A view that can do no further step is left without those who are there, but have not come to agree within
        ``patience`` seconds (default: half of ``limit``).
        """
        self._call += 1
        self._facts = json.loads(json.dumps(facts))  # as others will see them
        self._since = self._clock()
        self._deadline = self._since + limit
        self._patience = limit / 2 if patience is None else patience
        if not isinstance(self.outcome, LeftOut):
            self.outcome = None

    def take(self) -> View | Exception | None:
        outcome, self.outcome, self._facts = self.outcome, None, None
        if isinstance(outcome, View):
            self.seen = outcome
        return outcome

    def break_view(self, why: str) -> None:
        if not self.why:
            self.why = why
            self.breaks.append(why)

    def lose(self, address: Address, why: str, proved: bool, witnessed: bool = False) -> None:
        """That member is lost, as this one found, or another that was with it to the last (``witnessed``).

        A proof counts from who was: a member that was silent before, or took this one for lost, may have gone on
        with others and died after that.
        """
        peer, known = self.peers[address], self.lost.get(address)
        if known and (known.proved or not witnessed):
            return
        accuses = any((host, port) == self.me.address for host, port, _, _ in peer.said.get("lost", ()))
        self.lost[address] = MemberLoss(why, proved and (witnessed or not accuses))
        if self.view is None:
            return
        if self.view.at(address) is None:
            self.peers.pop(address)  # it comes back when it is heard of again
        elif not known and not (self.leaving and (why == LEFT or peer.said.get("leaving"))):  # else all go home
            self.break_view(f"rank {self.view.rank(peer.member.number)} {why}")

    @property
    def held(self) -> bool:
        """Whether :meth:`step` is to be called again soon."""
        return self._hold > self._clock()

    def wishes(self) -> bool:
        kept = self._kept()
        leaving = self.leaving or any(peer.said.get("leaving") for peer in self._others())
        return self.view is not None and (leaving or bool(self._joiners(kept)))

    @property
    def called(self) -> bool:
        """Whether it is time to want the next view, as others do, or somebody joins or leaves."""
        return self.wishes() or any(peer.said.get("calls") for peer in self._others())

    @property
    def all_ended(self) -> bool:
        """Whether nobody of this view is in the run's last steps any more: all have ended, are lost, or broken off."""
        return all(peer.said.get("ended") or peer.wants or peer.member.address in self.lost for peer in self._others())

    # What it says to others, and hears.

    def stand(self) -> Message:
        """Where this member stands."""
        return {
            "t": "stand", "epoch": self._epoch, "promised": self._promised, "call": self._call, "facts": self._facts,
            "lost": [[*address, loss.why, loss.proved] for address, loss in self.lost.items()], "broken": self.why,
            "leaving": self.leaving, "ended": self.ended,
            "hears": [list(peer.member.address) for peer in self._newcomers()],
            "life": self._life, "noted": self.noted, "calls": self._facts is not None and self.outcome is None,
            "member": asdict(self.me), "knows": [list(address) for address in self.peers] if self.view is None else [],
        }  # fmt: skip

    def repeat(self) -> None:
        """Say again what may not have arrived."""
        if self._proposal:
            for member in self._proposal.members:
                if member.address not in self._acked:
                    self.send(member.address, self._propose_message())

    def hear(self, address: Address, message: Message, reply: Send) -> None:
        """A message from there; ``reply`` answers a process that is not connected with this one."""
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
        if loss and (loss.why == STOPPED or not loss.proved) and (peer.wants or not loss.why.startswith(ABSENT)):
            self.lost.pop(peer.member.address)  # here it is again, before the others have gone on
        if self.view is None:
            return
        for host, port, why, proved in message["lost"]:
            known = (host, port) != self.me.address and self.view.at((host, port))
            if known and proved and why != STOPPED:  # a stop may end; who found it says so as long as it lasts
                self.lose((host, port), why, proved, witnessed=True)
        if message["epoch"] == self._epoch and message["broken"]:
            self.break_view(message["broken"])

    def _greet(self, address: Address, message: Message, reply: Send) -> None:
        """Somebody wants to be let in."""
        assert self.view is not None
        if self.view.at(address):
            if message["life"] > self.peers[address].life:  # it has found out before us that it was left out
                self.lose(address, LEFT, proved=True)
            else:  # it does not know yet that it is let in
                reply({"t": "commit", "epoch": self._epoch})
            return
        if address not in self.peers:
            self.lost.pop(address, None)
            self.peers[address] = OtherMember(Member(**message["member"]))
        members = [asdict(member) for member in self.view.members]
        if not message["noted"] or message["knows"] != [[member.host, member.port] for member in self.view.members]:
            reply({"t": "noted", "members": members})

    def _on_noted(self, members: list[Member]) -> None:
        """A newcomer hears whom to ask."""
        self.noted = True
        self.peers = {
            m.address: self.peers.get(m.address, OtherMember(m)) for m in members if m.address != self.me.address
        }
        for member in members:
            if member.address in self.peers:
                self.peers[member.address].member = member

    def _put_right(self, number: int, reply: Send) -> None:
        """Tell a member of an older view of this one: that it is committed, or that it is left out."""
        assert self.view is not None
        if self.view.rank(number) is not None:
            reply({"t": "commit", "epoch": self._epoch})
        else:
            reply({"t": "leftout", "epoch": self._epoch, "why": (self.view.reasons or {}).get(number, GONE)})

    def _on_left_out(self, message: Message) -> None:
        if self.view and message["epoch"] > self._epoch and not isinstance(self.outcome, LeftOut):
            asked = message["why"] == LEFT
            text = "it was asked to leave" if asked else f"they found that it {message['why']}"
            rank = self.view.rank(self.me.number)
            self.outcome = LeftOut(f"the others have gone on without rank {rank}: {text}", asked)
            self.break_view(str(self.outcome))

    # Who can go on.

    @property
    def _epoch(self) -> int:
        return self.view.epoch if self.view else 0

    def _others(self) -> list[OtherMember]:
        """The other members of the present view."""
        members = self.view.members if self.view else ()
        return [self.peers[member.address] for member in members if member.address != self.me.address]

    def _newcomers(self) -> list[OtherMember]:
        """Who wants to be let in, and is heard here."""
        return [
            peer for peer in self.peers.values() if self.view and not self.view.at(peer.member.address) and peer.wants
        ]

    def _kept(self) -> list[Member]:
        """The members that can go on together, as far as is known here."""
        if self.view is None:
            return []
        number = {member.address: member.number for member in self.view.members}
        quarrels = [(self.me.number, number[address]) for address in self.lost if address in number]
        for peer in self._others():
            if peer.member.address not in self.lost:
                accused = [number.get((host, port)) for host, port, _, _ in peer.said.get("lost", ())]
                quarrels += [(peer.member.number, other) for other in accused if other is not None]
        out = self._excused() | self._stopped() | ({self.me.address} if self.leaving else set())
        kept = rules.without_quarrels([m.number for m in self.view.members if m.address not in out], quarrels)
        return [member for member in self.view.members if member.number in kept]

    def _joiners(self, kept: Collection[Member]) -> list[OtherMember]:
        """The newcomers that all of ``kept`` hear, and that hear them."""
        others = [self.peers[member.address] for member in kept if member.address != self.me.address]
        places = {member.address for member in kept}

        def fits(peer: OtherMember) -> bool:
            heard = all(list(peer.member.address) in other.said.get("hears", ()) for other in others)
            misses = places.intersection((host, port) for host, port, _, _ in peer.said["lost"])
            return heard and not misses and not peer.said["leaving"]

        return [peer for peer in self._newcomers() if fits(peer)]

    def _excused(self) -> set[Address]:
        """Who goes on nowhere: proved to be gone, or about to leave by its own word."""
        gone = {address for address, loss in self.lost.items() if loss.proved and loss.why != STOPPED}
        return gone | {peer.member.address for peer in self._others() if peer.said.get("leaving")}

    def _stopped(self) -> set[Address]:
        """Who is stopped, as this member or one that is with it sees at present."""
        seen = [(*address, loss.why, loss.proved) for address, loss in self.lost.items()]
        for peer in self._others():
            if peer.member.address not in self.lost:
                seen += peer.said.get("lost", ())
        return {(host, port) for host, port, why, proved in seen if why == STOPPED and proved}

    def _has_quorum(self, kept: Collection[Address], excused: set[Address], stopped: set[Address]) -> bool:
        """Of the view committed last and of all acknowledged since."""
        views = [self.view, *self._accepted] if self.view else self._accepted
        return all(rules.is_quorum(view.members, kept, excused, stopped) for view in views)

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
        """Who is there but does not come to agree, although the view is broken, is not waited for until the limit."""
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
        basis = [(peer.member.address, peer.said.get("call")) for peer in ready], self._call
        if self._basis != basis:
            self._proposal, self._basis = None, basis
        at = [0 if peer in joiners else self._epoch for peer in ready]
        if any(not peer.wants or peer.said["epoch"] != epoch for peer, epoch in zip(ready, at, strict=True)):
            self._proposal = None
        elif self._proposal is None and now >= self._hold:
            self._propose(kept, ready, joiners)
        if self._proposal and len(self._acked) == len(self._proposal.members):
            proposal = self._proposal
            for member in proposal.members:
                self.send(member.address, {"t": "commit", "epoch": proposal.epoch})
            self._on_commit(proposal.epoch)

    def _propose(self, kept: list[Member], ready: list[OtherMember], joiners: list[OtherMember]) -> None:
        assert self.view is not None and self._facts is not None
        numbers = max(view.numbers for view in [self.view, *self._accepted])
        members = kept + [replace(peer.member, number=numbers + i) for i, peer in enumerate(joiners)]
        reasons = {m.number: self._reason(m.address) for m in self.view.members if m not in kept}
        epoch = max([self._promised, *(peer.said["promised"] for peer in ready)]) + 1
        facts = (self._facts, *(peer.said["facts"] for peer in ready))
        view = replace(
            self.view, epoch=epoch, members=tuple(members), facts=facts, lost=(), numbers=numbers + len(joiners),
            reasons={**(self.view.reasons or {}), **reasons},
        )  # fmt: skip
        view = View.of(json.loads(json.dumps(view.message())), self.seen)  # as the others will see it
        if not self._refusal(view, self._call, self._excused(), self._stopped()):
            self._proposal, self._acked = view, {self.me.address}
            self._accept(view)
            self.repeat()

    def _reason(self, address: Address) -> str:
        accused = [(tuple(place), why) for peer in self._others() for *place, why, _ in peer.said.get("lost", ())]
        said = [why for place, why in accused if place == address]
        return self.lost[address].why if address in self.lost else said[0] if said else LEFT

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
        own = next((rank for rank, member in enumerate(view.members) if member.address == self.me.address), None)
        if own is None:
            return
        if view not in self._accepted:
            excused = {(host, port) for host, port in message["excused"]} | self._excused()
            stopped = {(host, port) for host, port in message["stopped"]} | self._stopped()
            if refusal := self._refusal(view, message["calls"][own], excused, stopped):
                self.send(leader, {"t": "nack", "epoch": view.epoch, "promised": self._promised, "why": refusal})
                return
            self._accept(view)
        self.send(leader, {"t": "ack", "epoch": view.epoch})

    def _refusal(self, view: View, call: int, excused: set[Address], stopped: set[Address]) -> str:
        """Why this member does not acknowledge this proposal; "" if it does."""
        if self._facts is None or call != self._call or self.outcome is not None:
            return "is not at this call"
        if view.epoch <= max(self._promised, self._epoch):
            return "has acknowledged a later one"
        if self.leaving:
            return "leaves"
        if any(member.address in self.lost for member in view.members):
            return "has lost a member of it"
        return "" if self._has_quorum([m.address for m in view.members], excused, stopped) else "is no quorum"

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
            self._proposal, self._hold = None, self._clock() + self._random.uniform(*HOLD_S)

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
        """From now on this is the view."""
        old, self.view = self.view, view
        me = view.at(self.me.address)
        assert me is not None
        self.me = me
        self._accepted = [one for one in self._accepted if one.epoch > view.epoch]
        self._promised = max(self._promised, view.epoch)
        self.lost, self._proposal, self.why = {}, None, ""
        for address, peer in list(self.peers.items()):
            if not view.at(address) and (peer.member.number != NEWCOMER or not peer.said):
                if old and old.at(address):
                    self._put_right(peer.member.number, partial(self.send, address))
                self.peers.pop(address)
        for member in view.members:
            if member.address != self.me.address:
                peer = self.peers.setdefault(member.address, OtherMember(member))
                peer.member = member
                peer.said = peer.said if peer.said.get("epoch", -1) >= view.epoch else {}
        for peer in self._others():
            if peer.said:  # what it found out before this member knew that the view is committed
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
