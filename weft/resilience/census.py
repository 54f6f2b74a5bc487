"""What one member knows of all others, and which members can go on together, without sending messages or
making views.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from weft.resilience.views import (
    GONE,
    LEFT,
    NEWCOMER,
    STOPPED,
    Address,
    Member,
    MemberLoss,
    View,
    reach_each_other,
)

#: Why a member is lost that is there, but does not come to agree.
ABSENT = "has not come back from its step"

Message = dict[str, Any]


@dataclass
class OtherMember:
    """Another process that is a member of the run or wants to be one.

    ``member``: address and number of the process. ``said``: the last message by which the process told its state
    (:meth:`.Agreement.stand`); {} if none has come while the present view (set of members) lasts. ``life``: how many
    times the process has begun again as a newcomer, according to that message.
    """

    member: Member
    said: Message = field(default_factory=dict)
    life: int = 0  # how often it had wanted to be let in when it was heard last

    @property
    def wants(self) -> bool:
        """Whether this member has asked for the next view."""
        return self.said.get("facts") is not None

    @property
    def accused(self) -> list[tuple[Address, str, bool]]:
        """Members that this member considers lost, each as ``(address, reason, proved)``; the address is ``(host,
        port)``.

        ``proved``: whether the lost member is certainly gone, and not just silent.
        """
        return [
            ((host, port), why, proved)
            for host, port, why, proved in self.said.get("lost", ())
        ]


class Census:
    """What one member knows of the other processes: which are lost, and whether the present view still works.

    A view is the set of members that take part in the run.

    Attributes:
        ``me``: this member.
        ``view``: last committed view; None for a newcomer.
        ``peers``: the other processes, by address.
        ``lost``: members of the present view that are lost: for each, by address, the reason of the loss.
        ``leaving``: whether this member is about to leave the run.
        ``why``: reason why the present view can do no further step; "" while it can.
        ``breaks``: reasons why a view could do no further step, oldest first. The agent's thread removes a reason when
            it passes the reason on to the training thread.
    """

    def __init__(self, me: Member) -> None:
        self.me = me
        self.view: View | None = None
        self.peers: dict[Address, OtherMember] = {}
        self.lost: dict[Address, MemberLoss] = {}
        self.leaving = False
        self.why = ""
        self.breaks: list[str] = []  # every ``why``, for the agent to take away

    @property
    def epoch(self) -> int:
        """Number of the present view; 0 for a newcomer."""
        return self.view.epoch if self.view else 0

    def start_over(self, contacts: Collection[Address]) -> None:
        """Forget all members, and become a newcomer that knows only the addresses ``contacts``."""
        self.view, self.why, self.leaving, self.lost = None, "", False, {}
        self.peers = {
            (host, port): OtherMember(Member(NEWCOMER, host, port, "", 0, 0.0))
            for host, port in {*contacts} - {self.me.address}
        }

    def know(self, members: Collection[Member]) -> None:
        """Record ``members``, all members of the run, in place of the addresses that this newcomer knew before.

        A member of the run has sent the newcomer this list.
        """
        others = [member for member in members if member.address != self.me.address]
        self.peers = {
            other.address: self.peers.get(other.address, OtherMember(other))
            for other in others
        }
        for other in others:
            self.peers[other.address].member = other
        # nobody withdraws what it knew of other newcomers, as newcomers do not hear each other
        self.lost = {
            address: loss
            for address, loss in self.lost.items()
            if address in self.peers
        }

    def adopt(self, view: View) -> list[Member]:
        """Make ``view`` the present view, and forget the members that are not in it.

        Returns the members of the previous view that ``view`` leaves out.
        """
        before, self.view = self.view, view
        me = view.at(self.me.address)
        assert me is not None
        self.me, self.lost, self.why = me, {}, ""
        left_out = []
        for address, peer in list(self.peers.items()):
            if not view.at(address) and (
                peer.member.number != NEWCOMER or not peer.said
            ):
                if before and before.at(address):
                    left_out.append(peer.member)
                self.peers.pop(address)
        for member in view.members:
            if member.address != self.me.address:
                peer = self.peers.setdefault(member.address, OtherMember(member))
                peer.member = member
                peer.said = (
                    peer.said if peer.said.get("epoch", -1) >= view.epoch else {}
                )
        for peer in self.others():
            # what it found out before this member knew that the view is committed
            if peer.said:
                self.hear(peer, peer.said)
        return left_out

    def break_view(self, why: str) -> None:
        """Record that the present view can do no further step, for the reason ``why``. Only the first reason counts."""
        if not self.why:
            self.why = why
            self.breaks.append(why)

    def lose(
        self, address: Address, why: str, proved: bool, witnessed: bool = False
    ) -> None:
        """Record that the member at ``address`` is lost, for the reason ``why``.

        ``proved``: whether it is certain that the member is gone, and not just silent. ``witnessed``: whether another
        member, which had contact to the lost member up to its end, reports the loss.

        A proof without a witness does not count in two cases: if the member had been recorded as lost before, or if it
        had itself considered this member lost. In both cases it may have gone on in another view and died only later.
        """
        peer, known = self.peers[address], self.lost.get(address)
        if known and (known.proved or not witnessed):
            return
        accuses = any(other == self.me.address for other, _, _ in peer.accused)
        self.lost[address] = MemberLoss(why, proved and (witnessed or not accuses))
        if self.view is None:
            return
        if self.view.at(address) is None:
            self.peers.pop(address)  # it comes back when it is heard of again
        elif not known and not (
            self.leaving and (why == LEFT or peer.said.get("leaving"))
        ):  # else all go home
            self.break_view(f"rank {self.view.rank(peer.member.number)} {why}")

    def lose_absent(self, seconds: float) -> None:
        """Record as lost every member that is alive but has let ``seconds`` pass without asking for the next view."""
        for peer in self.others():
            if not peer.wants and peer.member.address not in self.lost:
                self.lose(
                    peer.member.address, f"{ABSENT} for {seconds:.0f} s", proved=False
                )

    def hear(self, peer: OtherMember, message: Message) -> None:
        """Record the message by which a member tells its state: that it is alive, and whom it considers lost.

        ``peer``: the member; ``message``: its message (:meth:`.Agreement.stand`).
        """
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
        for address, why, proved in peer.accused:
            # a stop may end; who found it says so as long as it lasts
            if (
                address != self.me.address
                and self.view.at(address)
                and proved
                and why != STOPPED
            ):
                self.lose(address, why, proved, witnessed=True)
        if message["epoch"] == self.epoch and message["broken"]:
            self.break_view(message["broken"])

    # Who can go on.

    def others(self) -> list[OtherMember]:
        """Return all members of the present view except this one; lost members are included."""
        members = self.view.members if self.view else ()
        return [
            self.peers[member.address]
            for member in members
            if member.address != self.me.address
        ]

    def trusted(self) -> list[OtherMember]:
        """Return the other members of the present view that this member does not consider lost."""
        return [peer for peer in self.others() if peer.member.address not in self.lost]

    def newcomers(self) -> list[OtherMember]:
        """Return the processes outside the present set of members that ask this member to be let in."""
        view = self.view
        return [
            peer
            for peer in self.peers.values()
            if view and not view.at(peer.member.address) and peer.wants
        ]

    def kept(self) -> list[Member]:
        """Return the members of the present view that can go on to the next, as far as this member knows.

        Members that leave, or are gone or stopped, are not among them. Of two members that cannot reach each other, one
        is left out.
        """
        if self.view is None:
            return []
        number = {member.address: member.number for member in self.view.members}
        accusations = [
            (self.me.number, number[address])
            for address in self.lost
            if address in number
        ]
        for peer in self.trusted():
            accusations += [
                (peer.member.number, number[address])
                for address, _, _ in peer.accused
                if address in number
            ]
        out = self.excused() | self.stopped()
        out |= {self.me.address} if self.leaving else set()
        kept = reach_each_other(
            [m.number for m in self.view.members if m.address not in out], accusations
        )
        return [member for member in self.view.members if member.number in kept]

    def joiners(self, kept: Collection[Member]) -> list[OtherMember]:
        """Return the newcomers that can be let into the next view.

        Each of them reaches all members in ``kept`` (those that go on), and is reached by all of them.
        """
        places = {member.address for member in kept}
        hearers = [self.peers[address] for address in places - {self.me.address}]

        def fits(peer: OtherMember) -> bool:
            heard = all(
                list(peer.member.address) in hearer.said.get("hears", ())
                for hearer in hearers
            )
            misses = places.intersection(address for address, _, _ in peer.accused)
            return heard and not misses and not peer.said["leaving"]

        return [peer for peer in self.newcomers() if fits(peer)]

    def excused(self) -> set[Address]:
        """Return the addresses of members that will certainly take part in no other view.

        Such members are proved to be gone, or have announced that they leave.
        """
        gone = {
            address
            for address, loss in self.lost.items()
            if loss.proved and loss.why != STOPPED
        }
        return gone | {
            peer.member.address for peer in self.others() if peer.said.get("leaving")
        }

    def stopped(self) -> set[Address]:
        """Return the addresses of members whose process is stopped (SIGSTOP).

        This member, or a member that it does not consider lost, has observed the stop.
        """
        losses = [
            (address, loss.why, loss.proved) for address, loss in self.lost.items()
        ]
        losses += [accusation for peer in self.trusted() for accusation in peer.accused]
        return {address for address, why, proved in losses if why == STOPPED and proved}

    def reason(self, address: Address) -> str:
        """Return in words why the member at ``address`` is not in the next view.

        It is the reason that this member has recorded or, without one, the reason that another member has reported.
        """
        if address in self.lost:
            return self.lost[address].why
        accusations = [
            accusation for peer in self.others() for accusation in peer.accused
        ]
        return next(
            (why for accused, why, _ in accusations if accused == address), LEFT
        )

    def reason_left_out(self, number: int) -> str:
        """Return in words why the run has left out a member, in this view or an earlier one.

        ``number``: number of the member.
        """
        assert self.view is not None
        return (self.view.reasons or {}).get(number, GONE)

    def wants_change(self) -> bool:
        """Return whether the set of members is to change: a process can be let into the run, or a member asks to
        leave it.
        """
        if self.view is None:
            return False
        leaving = self.leaving or any(
            peer.said.get("leaving") for peer in self.others()
        )
        return leaving or bool(self.joiners(self.kept()))

    @property
    def called(self) -> bool:
        """Whether this member should ask for the next view, too.

        It should if another member has asked for the next view, or if a process wants to join or to leave.
        """
        return self.wants_change() or any(
            peer.said.get("calls") for peer in self.others()
        )

    @property
    def all_ended(self) -> bool:
        """Whether every other member of the present view has ended the run, has asked for the next view, or is lost."""
        return all(peer.said.get("ended") or peer.wants for peer in self.trusted())

    def missing(self, limit: float) -> str:
        """Return an error message that names the members which have prevented an agreement.

        ``limit``: seconds that the agreement has waited for them.
        """
        if self.view is None:
            return f"no member of the run has let this process in within {limit:g} s"
        parts = []
        for peer in self.others():
            loss = self.lost.get(peer.member.address)
            if loss or not peer.wants:
                why = loss.why if loss else "has not come to agree"
                parts.append(f"rank {self.view.rank(peer.member.number)} {why}")
        count = f"{len(self.kept())} of {len(self.view.members)} ranks cannot go on by themselves"
        return f"{count}, and no others have come back within {limit:g} s: {'; '.join(parts) or 'none is missing'}"
