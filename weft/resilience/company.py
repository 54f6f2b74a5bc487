"""Islands that come and go: the threads that live by what :class:`Attendance` decides.

A new view is agreed on as soon as a rank is lost or joins, by a thread of each rank and whatever its main thread does
meanwhile. A rank publishes that it has received all it needs for an exchange, and goes on with the result when it sees
this from all that take part. At the beginning of a round one of the islands that are present hands its state to those
that join.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from weft.checkpoint.state import Progress
from weft.errors import WeftError
from weft.resilience.attendance import Attendance, Changes, Facts
from weft.resilience.members import GONE, Address, LeftOut, View
from weft.resilience.membership import Membership
from weft.run.failure import report_failure
from weft.run.ranks import LEFT_OUT
from weft.sync.presence import Draw, Presence, Work
from weft.sync.streams import IslandLost, Streams

R = TypeVar("R")

#: How often an exchange is tried before the run ends, as what fails so often is not the loss of islands.
ATTEMPTS = 8
#: Seconds between two looks at the others; after which a rank is left out that is alive, but does not agree on the next
#: view; and for which the others are waited for at the end of the run.
LOOK_S, ABSENT_S, END_S = 0.05, 15.0, 60.0
#: In multiples of ``resilience.detect``: how long it may take until the loss of an island is known by membership, after
#: its messages have ended.
KNOWN = 4


class IslandLeftOut(WeftError):
    """The others go on without this island."""

    exit_code = LEFT_OUT


class Company(Presence):
    """The islands that are present, by what this rank's ``attendance`` decides.

    ``events``: records (kind, values) of what has changed, for :meth:`take_events`. ``addresses``: for each island, of
    the endpoint of its rank with this rank's place.
    """

    def __init__(
        self,
        membership: Membership,
        attendance: Attendance,
        streams: Streams,
        detect: float,
    ) -> None:
        super().__init__(streams)
        self.membership, self.attendance = membership, attendance
        self.island, self.detect = attendance.start[0], detect
        # guards all that follows, and the attendance
        self.changed = membership.news
        self.view: View | None = None
        self.addresses: dict[int, Address] = {}
        self.changing, self.closing, self.ended = False, False, False
        self.fatal: Exception | None = None
        self.progress = Progress()
        self.folder = ""  # of the run's first island
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._since, self._group = 0.0, list[int]()
        self._told: set[tuple[int, int, int]] = set()

    # --- views ---

    def begin_with(self, view: View, facts: Sequence[Facts]) -> None:
        """Start with the run's first ``view``, in which all islands take part from the beginning."""
        with self.changed:
            self.attendance.begin({int(one["island"]): one["life"] for one in facts})
            own = self.attendance.facts()
            begun = {key: own[key] for key in ("stays", "begun", "got", "committed")}
            self._adopt(view, [one | begun for one in facts])
        self._follow_on()

    def come(self, contacts: Sequence[tuple[str, int]], limit: float) -> None:
        """Ask the others to be let in."""
        self.membership.publish(waits=True)
        self.membership.join(contacts, limit)
        self._take_view(limit)
        self._follow_on()

    def _follow_on(self) -> None:
        threading.Thread(target=self._follow, name="weft-company", daemon=True).start()

    def _follow(self) -> None:
        """Life of the thread that agrees with the others."""
        limit = self.streams.limit
        while not self.closing:
            with self.changed:
                self.changed.wait(LOOK_S)
                due = bool(self.membership.why) or self.membership.called
                alone = self.attendance.got is None and self._all_ended()
            if self.closing or (self.ended and self._all_ended()):
                return
            try:
                if alone:
                    raise IslandLeftOut(
                        f"the run has ended before island {self.island} could take part again"
                    )
                if due:
                    self._take_view(limit)
            except Exception as error:
                if not self.ended:
                    self.give_up(error)
                return

    def _take_view(self, limit: float) -> None:
        with self.changed:
            self.changing, self._since = True, time.time()
            facts = self.attendance.facts()
        self.streams.break_off(self.membership.why)
        view = self.membership.next(facts, limit, max(ABSENT_S, KNOWN * self.detect))
        with self.changed:
            self._adopt(view, view.facts)
            self.changing = False
            self.changed.notify_all()

    def _adopt(self, view: View, facts: Sequence[Facts]) -> None:
        """Enter a view: start the epoch of its streams, and say what has changed."""
        attendance, self.view = self.attendance, view
        changes = attendance.adopt(view.members, facts)
        mates = {member.number: member.address for member in view.members}
        self.addresses = {
            island: mates[at[attendance.place]]
            for island, at in attendance.members.items()
        }
        self.streams.begin(view.epoch)
        self._say(changes, {one.member.number: one.why for one in view.lost})
        if changes.unable:
            self.give_up(IslandLeftOut(changes.unable))

    def _say(self, changes: Changes, lost: dict[int, str]) -> None:
        """Report islands that went or came, as text and in ``events``; ``lost``: why members are lost, by number."""
        assert self.view is not None
        now, gone, attendance = time.time(), [], self.attendance
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
            self.tell(
                f"island {island} is back: it takes island {attendance.giver}'s state at the end of the next round"
            )
        if gone or changes.joined:
            here = sorted(stay.island for stay in attendance.present)
            self.events.append(("islands", {
                "epoch": self.view.epoch, "here": here, "lost": gone, "joined": changes.joined, "noticed": self._since,
                "agreed": now,
            }))  # fmt: skip

    def way_back(self, island: int) -> str:
        """The command that starts an island again."""
        return f"weft ranks add {self.folder or 'RUN'}{f'/island-{island}' if island else ''}"

    def tell(self, text: str) -> None:
        """Show a line of text: where the run's first island is away, the first present one prints it."""
        self._news.append(text)
        first = min((stay.island for stay in self.attendance.present), default=0)
        if first == self.island and self.island and not self.attendance.place:
            print(f"weft: {text}", flush=True)

    # --- exchanges ---

    def _steady(self) -> View:
        """The present view; waits while the next one is being agreed on. To be called with the lock."""
        while self.changing and self.fatal is None:
            self.changed.wait()
        if self.fatal is not None:
            raise self.fatal
        assert self.view is not None
        return self.view

    def begin(self, number: int) -> None:
        with self.changed:
            self._steady()
            self.attendance.begun = max(self.attendance.begun, number)

    def exchange(self, number: int, draw: Draw, work: Work[R]) -> R:
        error: Exception | None = None
        for _ in range(ATTEMPTS):
            with self.changed:
                epoch = self._steady().epoch
                group = self.attendance.partners(number, draw)
            begun = time.monotonic()
            try:
                found = work(group, str(number))
            except IslandLost as lost:
                error = lost
                if time.monotonic() - begun > self.streams.limit:
                    break
                self._await_change(epoch, str(lost))
                continue
            if self._all_done(number, draw, epoch, group):
                self._note(number, group)
                return found
        raise error or IslandLost(
            f"exchange {number} between islands has failed {ATTEMPTS} times"
        )

    def _await_change(self, epoch: int, why: str) -> None:
        """Wait for the view after ``epoch``, as an exchange has failed for the reason ``why``.

        If no member is found to be lost, this rank asks for that view: all repeat the exchange over new connections.
        """
        with self.changed:
            changed = self.changed.wait_for(
                lambda: (
                    self.changing
                    or self.fatal
                    or (self.view and self.view.epoch != epoch)
                ),
                KNOWN * self.detect,
            )
            if not changed:
                self.membership.report(why)
                self.changed.wait_for(
                    lambda: self.changing or self.fatal, self.streams.limit
                )

    def _all_done(
        self, number: int, draw: Draw, epoch: int, group: Sequence[int]
    ) -> bool:
        """Publish that this rank has all it needs for exchange ``number``, and wait until all others have.

        Returns whether the exchange is over; else it is to be repeated.
        """
        with self.changed:
            if self._steady().epoch != epoch:
                return False
            self.attendance.pending = (number, draw)
            self.membership.publish(done=number, epoch=epoch)
            me = self.membership.me.number
            others = [
                one
                for island in group
                for one in self.attendance.members[island].values()
                if one != me
            ]

            def all_say_so() -> bool:
                said = (self.membership.published.get(one, {}) for one in others)
                return all(
                    one.get("epoch") == epoch and one.get("done", -1) >= number
                    for one in said
                )

            def is_over() -> bool:
                assert self.view is not None
                return (
                    self.changing
                    or self.fatal is not None
                    or self.view.epoch != epoch
                    or all_say_so()
                )

            while not is_over():
                self.changed.wait()
            if self._steady().epoch == epoch and all_say_so():
                self.attendance.committed = number
            self.attendance.pending = None
            return self.attendance.committed >= number

    def _note(self, number: int, group: list[int]) -> None:
        with self.changed:
            if group != self._group:
                self.events.append(
                    ("agreed", {"number": number, "members": group, "at": time.time()})
                )
            self._group = group

    # --- coming ---

    def newcomers(self, number: int) -> Sequence[int]:
        with self.changed:
            self._steady()
            return self.attendance.newcomers(number)

    @property
    def tokens(self) -> int:
        return self.progress.tokens

    def come_in(
        self, take: Callable[[int, int], list[int]], all_say: Callable[[Any], list[Any]]
    ) -> tuple[int, int]:
        """Receive the state from another island at the end of a round; returns the round's number, and its tokens.

        ``take(island, round)`` receives it. ``all_say(value)`` gathers a value from every rank of this island.
        """
        attendance, fragments = self.attendance, self.attendance.how.fragments
        while True:
            with self.changed:
                while not self._steady() or (stay := attendance.own_stay) is None:
                    self.changed.wait()
                epoch, giver = self._steady().epoch, attendance.giver
                after = stay.after
            tokens, done = 0, False
            try:
                tokens, *rest = take(giver, after // fragments)
                self.counts, self.streams.order = (rest[:fragments], rest[fragments:])
                done = True
            except IslandLost as error:
                self._await_change(epoch, str(error))
            with self.changed:
                done = done and self._steady().epoch == epoch
                if done:
                    attendance.got = attendance.begun = attendance.committed = after
            if all(said == (True, after) for said in all_say((done, after))):
                self.membership.publish(waits=False)
                return after // fragments, tokens

    # --- wishes, and the end ---

    def wish(self, number: int) -> None:
        self.membership.publish(stop=number)
        with self.changed:
            self.membership.published[self.membership.me.number] = {"stop": number}

    def wished(self) -> int | None:
        with self.changed:
            self._steady()
            said = [
                self.membership.published.get(one, {})
                for at in self.attendance.members.values()
                for one in at.values()
            ]
        return min((int(one["stop"]) for one in said if "stop" in one), default=None)

    def note_odd(self, odd: Sequence[int], step: int) -> None:
        place = self.attendance.place
        self._note_odd(odd, step, place)
        if place:
            self.membership.publish(odd=[[island, step, place] for island in odd])

    def _note_odd(self, odd: Sequence[int], step: int, place: int) -> None:
        new = [island for island in odd if (island, step, place) not in self._told]
        self._told |= {(island, step, place) for island in new}
        super().note_odd(new, step)

    def take_news(self) -> list[str]:
        with self.changed:
            mates = self.attendance.members.get(self.island, {})
            said = [
                self.membership.published.get(one, {}).get("odd", [])
                for one in mates.values()
            ]
        for island, step, place in (one for odd in said for one in odd):
            self._note_odd([island], step, place)
        return super().take_news()

    def take_events(self) -> list[tuple[str, dict[str, Any]]]:
        with self.changed:
            found, self.events = self.events, []
        return found

    def _all_ended(self) -> bool:
        """Whether all others have come to the end of the run, are lost, or only wait to take part."""
        with self.changed:
            if self.view is None:
                return False
            gone, me = self.membership.lost, self.membership.me.number
            others = [
                one.number
                for one in self.view.members
                if one.number != me and one.number not in gone
            ]
            said = (self.membership.published.get(number, {}) for number in others)
            return all(one.get("ended") or one.get("waits") for one in said)

    def end(self) -> None:
        """This rank has come to the end of the run; returns when all others have, or in :data:`END_S`."""
        deadline = time.monotonic() + END_S
        self.ended = True
        self.membership.publish(ended=True)
        with self.changed:
            self.changed.wait_for(
                self._all_ended, max(0.0, deadline - time.monotonic())
            )

    @property
    def first(self) -> bool:
        """Whether this island is the first of those that are present."""
        with self.changed:
            return self.island == min(stay.island for stay in self.attendance.present)

    def close(self) -> None:
        self.closing = True
        self.membership.close()

    def on_break(self, why: str) -> None:
        """Called in the agent's thread: a member of the view is lost."""
        with self.changed:
            if self.membership.why:  # else the next one is there already
                self.streams.break_off(why)
        mates = self.attendance.members.get(self.island, {})
        if self.view is not None and not self.ended:
            gone = {
                place: number
                for place, number in mates.items()
                if number in self.membership.lost
            }
            if gone:
                self.give_up(
                    IslandLeftOut(
                        f"island {self.island} ends, as its {why}; the other islands go on"
                    )
                )

    def give_up(self, error: Exception) -> None:
        """End this process with ``error``: the main thread raises it if it looks here in time."""
        if isinstance(error, LeftOut):
            back = self.way_back(self.island)
            error = IslandLeftOut(
                f"the other islands have gone on without island {self.island}: start it again with {back}"
            )
        with self.changed:
            if self.fatal is not None or self.closing:
                return
            self.fatal = error
            self.changed.notify_all()
        self.streams.break_off(str(error))
        threading.Thread(
            target=self._end_process,
            args=(error,),
            name="weft-company-end",
            daemon=True,
        ).start()

    def _end_process(self, error: Exception) -> None:
        with suppress(Exception):
            self.close()
        if "WEFT_LAUNCHED" in os.environ and not self.attendance.place:
            print(f"weft: {error}", flush=True)
        os._exit(report_failure(error))
