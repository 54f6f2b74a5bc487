"""News about other islands from a rank of an island: lines for the user, and records."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.resilience.attendance import Attendance, Changes
from weft.resilience.views import GONE, View


class IslandEvent(NamedTuple):
    """Record of a change among the islands, for the run's metrics. ``kind``: its kind; ``values``: values by name."""

    kind: str
    values: dict[str, Any]


class IslandNews:
    """News about other islands, collected until the training loop takes them.

    ``attendance``: what this rank knows about the islands. ``lines``: lines of text for the user. ``events``: records
    for the run's metrics. ``folder``: path of the run folder of the run's first island; "" until that folder is open.
    :meth:`way_back` needs it for the shell command by which the user starts a lost island again.
    """

    def __init__(self, attendance: Attendance) -> None:
        self.attendance, self.folder = attendance, ""
        self.lines = deque[str]()
        self.events: list[IslandEvent] = []
        self._partners: list[int] = []

    def take_events(self) -> list[IslandEvent]:
        events, self.events = self.events, []
        return events

    def report(self, view: View, changes: Changes, noticed: float) -> None:
        """Report the islands that the new view ``view`` has lost or gained, as listed in ``changes``.

        ``noticed``: the Unix time in seconds at which this rank noticed that a new view was needed.
        """
        attendance, gone = self.attendance, []
        lost = {member.member.number: member.why for member in view.lost}
        for stay in changes.went:
            ranks = {fact["place"]: why for number, why in lost.items() if (fact := attendance.known[number])
                     and (fact["island"], fact["life"]) == stay.start}  # fmt: skip
            place, why = min(ranks.items(), default=(0, GONE))
            who = f"island {stay.island}" + f" (its rank {place})" * (
                attendance.ranks > 1
            )
            self.tell(
                f"{who} {why}: the others go on without it; to bring it back: {self.way_back(stay.island)}"
            )
            gone.append({"island": stay.island, "why": why})
        for island in changes.joined:
            giver = attendance.giver
            self.tell(
                f"island {island} is back: it takes island {giver}'s state at the end of the next round"
            )
        if gone or changes.joined:
            here = sorted(stay.island for stay in attendance.present)
            self.events.append(IslandEvent("islands", {
                "epoch": view.epoch, "here": here, "lost": gone, "joined": changes.joined, "noticed": noticed,
                "agreed": time.time(),
            }))  # fmt: skip

    def note_exchange(self, number: int, partners: Sequence[int]) -> None:
        """Record a change of the islands with which this island exchanges; called at exchange number ``number``.

        ``partners``: numbers of these islands. They are compared with those of the previous call.
        """
        if list(partners) != self._partners:
            self.events.append(
                IslandEvent(
                    "agreed",
                    {"number": number, "members": [*partners], "at": time.time()},
                )
            )
        self._partners = [*partners]

    def way_back(self, island: int) -> str:
        """Return the shell command that starts the island with the number ``island`` again."""
        return f"weft ranks add {self.folder or 'RUN'}{f'/island-{island}' if island else ''}"

    def tell(self, text: str) -> None:
        """Add a line of text for the user.

        Usually the run's first island prints the lines. If that island is absent, the present island with the lowest
        number prints this line at once.
        """
        self.lines.append(text)
        first = min((stay.island for stay in self.attendance.present), default=0)
        island, _ = self.attendance.start
        if first == island and island and not self.attendance.place:
            print(f"weft: {text}", flush=True)
