"""Members and views: who takes part in a run, and the rules by which one view may follow another.

Nothing here communicates. :mod:`weft.resilience.membership` does, and asks these functions for decisions.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weft.errors import WeftError
from weft.net.process import machine_id, started_at
from weft.run.rank_processes import LEFT_OUT

Address = tuple[str, int]

#: The number of a process that is no member yet.
NEWCOMER = -1
#: Why a member is lost, where that is beyond doubt: it said so itself, or the kernel that it ran on.
GONE, LEFT, STOPPED = "is gone", "left", "is stopped"


class LeftOut(WeftError):
    """Error of a rank that the run has left out: the other members have gone on without it, or without its island.

    ``asked``: whether this rank was asked to leave.
    """

    exit_code = LEFT_OUT

    def __init__(self, text: str, asked: bool = False) -> None:
        super().__init__(text)
        self.asked = asked


class TooFew(WeftError):
    """Error of a member that could not agree on a next view in time. The message names the missing members."""


class Fatal(WeftError):
    """Error at every member after one of them has said that the run must end. The message says why."""

    secondary = True


@dataclass(frozen=True)
class Member:
    """Process that is a member of a run, or wants to be one.

    Attributes:
        ``number``: number of the member, which is never given to another process. The member's rank is another number,
            the member's position in the present view.
        ``host``: address at which the member's agent listens.
        ``port``: port at which the member's agent listens.
        ``machine``: identity of the machine on which the process runs. Members on the same machine can see by ``pid``
            and ``started`` whether the process is gone, stopped or just slow.
        ``pid``: process id.
        ``started``: time at which the process started.
    """

    number: int
    host: str
    port: int
    machine: str
    pid: int
    started: float

    @property
    def address(self) -> Address:
        return self.host, self.port


@dataclass(frozen=True)
class MemberLoss:
    """Loss of a member of a view.

    ``why``: the reason in words; ``proved``: whether the member is certainly gone, and not just silent.
    """

    why: str
    proved: bool


@dataclass(frozen=True)
class Lost:
    """Member of the previous view (set of members) that is not in the new view.

    ``member``: the member; ``rank``: its rank in the previous view; ``why``: the reason in words.
    """

    member: Member
    rank: int
    why: str


@dataclass(frozen=True)
class View:
    """Set of the members that take part in a run, until the members agree on the next such set.

    Attributes:
        ``epoch``: number of the view, from 1.
        ``members``: the members in the order of their ranks: first those of the previous view in their order, then
            newcomers.
        ``facts``: the JSON values that each member passed to the agreement on this view, in the order of ranks; ``{}``
            for each in the first view.
        ``lost``: members that are missing in this view, but were in the view of which this process was last a member.
        ``about``: what newcomers are told about the run; it is set with the first view.
        ``numbers``: how many member numbers have been given in this run.
        ``reasons``: for each member that the run has ever lost, the reason, by the member's number.
    """

    epoch: int
    # those of the view before in their order, then newcomers
    members: tuple[Member, ...]
    # what each of them said when this view was agreed on; {} in the first one
    facts: tuple[dict[str, Any], ...]
    lost: tuple[Lost, ...]  # since the view that this process was in before
    # what the run hands to newcomers, as it was given with the first view
    about: dict[str, Any]
    numbers: int = 0  # how many numbers have been given in this run
    # why each member that the run has ever lost was lost
    reasons: Mapping[int, str] | None = None

    @property
    def first(self) -> bool:
        """Whether this is the first view of the run."""
        return self.epoch == 1

    def rank(self, number: int) -> int | None:
        return next(
            (
                rank
                for rank, member in enumerate(self.members)
                if member.number == number
            ),
            None,
        )

    def at(self, address: Address) -> Member | None:
        return next(
            (member for member in self.members if member.address == address), None
        )

    def message(self) -> dict[str, Any]:
        """Return the view as JSON. ``lost`` is left out, because it differs between receivers."""
        return asdict(self) | {"lost": []}

    @classmethod
    def of(cls, message: dict[str, Any], before: View | None) -> View:
        """Build a view from ``message``, the result of :meth:`message` at another member.

        ``before``: this process's previous view, or None. Its members that are not in the new view become ``lost``.
        """
        reasons = {int(number): why for number, why in message["reasons"].items()}
        members = tuple(Member(**member) for member in message["members"])
        numbers = {member.number for member in members}
        lost = tuple(
            Lost(member, rank, reasons.get(member.number, GONE))
            for rank, member in enumerate(before.members if before else ())
            if member.number not in numbers
        )
        facts = tuple(message["facts"])
        return cls(
            message["epoch"],
            members,
            facts,
            lost,
            message["about"],
            message["numbers"],
            reasons,
        )


def this_process(number: int, address: Address) -> Member:
    """Return a description of this process as a member of a run.

    ``number``: its number as a member; ``address``: host and port at which its agent listens.
    """
    return Member(
        number, *address, machine_id("pid", "net"), os.getpid(), started_at(os.getpid())
    )


def reach_each_other(
    numbers: Iterable[int], accusations: Iterable[tuple[int, int]]
) -> list[int]:
    """Return the numbers of members that can go on together, sorted: all of them can reach each other.

    ``numbers``: the members to choose from; ``accusations``: pairs ``(a, b)`` of members' numbers, which say that ``a``
    does not reach ``b``. Members are removed until no pair is left. The next to be removed is always the member in most
    of the pairs that are left. If several are in equally many, it is the newest of them, which has the highest number.
    """
    kept = set(numbers)
    pairs = {frozenset(pair) for pair in accusations if kept.issuperset(pair)}
    while pairs:
        counts = Counter(number for pair in pairs for number in pair)
        goes = max(counts, key=lambda number: (counts[number], number))
        kept.remove(goes)
        pairs = {pair for pair in pairs if goes not in pair}
    return sorted(kept)


def is_quorum(
    view: Collection[Member],
    kept: Collection[Address],
    excused: Collection[Address],
    stopped: Collection[Address] = (),
) -> bool:
    """Return whether the members ``kept`` may go on from ``view`` with no risk that others of its members do so, too.

    ``view``: members of the view; ``kept``: addresses of those that would go on; ``excused``: addresses of members that
    are known not to go on anywhere; ``stopped``: addresses of members whose process is stopped (SIGSTOP).

    Excused members do not count. Of the others, more than half must be kept. Exactly half suffices if the member with
    the lowest number is among them. Stopped members are excused, too, but only if every member is kept, excused or
    stopped. In all other cases a stopped member might be continued, and go on together with members that are not kept.
    """
    gone = {member.address for member in view}.intersection(excused)
    if all(
        member.address in gone or member.address in kept or member.address in stopped
        for member in view
    ):
        gone |= {*stopped} - {*kept}
    voters = [member for member in view if member.address not in gone]
    count = sum(member.address in kept for member in voters)
    lowest = min(voters, key=lambda member: member.number, default=None)
    return 2 * count > len(voters) or (
        2 * count == len(voters) and lowest is not None and lowest.address in kept
    )
