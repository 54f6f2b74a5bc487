"""One rank's part in the views of a run of islands, as :class:`Attendance` decides.

A new view is agreed on as soon as a rank is lost or joins, by a thread of each rank and whatever its main thread does
meanwhile.
"""

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from weft.net.endpoint import Address
from weft.resilience.attendance import Attendance, Facts
from weft.resilience.island_news import IslandNews
from weft.resilience.life import Life, LifeMove, ViewEntry, live
from weft.resilience.membership import Membership
from weft.resilience.views import LeftOut, View
from weft.run.failure import report_failure
from weft.sync.streams import Streams
from weft.train.guard import Regroup

#: Seconds between two looks at the others; after which a rank is left out that is alive, but does not agree on the next
#: view; and for which the others are waited for at the end of the run.
LOOK_S, ABSENT_S, END_S = 0.05, 15.0, 60.0
#: In multiples of ``resilience.detect``: how long it may take until the loss of an island is known by membership, after
#: its messages have ended.
KNOWN = 4


class IslandParty:
    """One rank's part in the views of a run of islands; a thread of its own follows the views (:class:`.life.Party`).

    Attributes:
        ``membership``: agent that agrees on views with the other ranks.
        ``attendance``: what this rank knows about the islands.
        ``streams``: connections to other islands.
        ``detect``: seconds of silence after which a rank counts as lost.
        ``changed``: condition whose lock guards the attendance and the following attributes.
        ``view``: present view; None before the first.
        ``addresses``: for each island, the address of the rank that has this rank's place there.
        ``known``: addresses of members that this rank asks to let it in; empty if it was started with the run.
        ``changing``: whether an agreement on the next view is under way.
        ``fatal``: error that ends this process; None while it goes on.
    """

    step = 0

    def __init__(
        self,
        membership: Membership,
        attendance: Attendance,
        streams: Streams,
        detect: float,
    ) -> None:
        self.membership, self.attendance, self.streams = membership, attendance, streams
        self.island, self.detect = attendance.start[0], detect
        self.news = IslandNews(attendance)
        self.changed = membership.news
        self.view: View | None = None
        self.addresses: dict[int, Address] = {}
        self.known: Sequence[Address] = ()
        self.changing, self.closing, self.ended = False, False, False
        self.fatal: Exception | None = None
        self._noticed = 0.0  # when the next view was seen to be needed

    def begin(self, view: View) -> None:
        """Start with the run's first view ``view``, in which all islands take part from the beginning."""
        with self.changed:
            self.attendance.begin(
                {int(said["island"]): said["life"] for said in view.facts}
            )
            own = self.attendance.facts()
            begun = {key: own[key] for key in ("stays", "begun", "got", "committed")}
            self._adopt(view, [said | begun for said in view.facts])
        self._follow(Life(LifeMove.STAY, of_island=True))

    def come(self) -> None:
        """Ask the members of the run to let this rank in. Return when it has been let in."""
        self._follow(Life(LifeMove.JOIN, of_island=True))
        with self.changed:
            self.changed.wait_for(lambda: self.view or self.fatal)
            self.steady()

    def _follow(self, life: Life) -> None:
        threading.Thread(
            target=self._live, args=(life,), name="weft-islands-views", daemon=True
        ).start()

    def _live(self, life: Life) -> None:
        try:
            live(life, self.membership, self, self.streams.limit)
        except Exception as error:
            back = self.news.way_back(self.island)
            left_out = f"the other islands have gone on without island {self.island}: start it again with {back}"
            if not self.ended:
                self.give_up(LeftOut(left_out) if life.left_out else error)

    def steady(self) -> View:
        """Return the present view. While an agreement on the next view is under way, wait for its end.

        The caller must hold the lock of ``changed``. Raises the error that ends this process, if there is one.
        """
        while self.changing and self.fatal is None:
            self.changed.wait()
        if self.fatal is not None:
            raise self.fatal
        assert self.view is not None
        return self.view

    # --- what its life asks and says ---

    def start_over(self) -> Sequence[Address]:
        self.membership.publish(waits=True)
        return self.known

    def facts(self) -> Facts:
        with self.changed:
            self.changing, self._noticed = True, time.time()
            facts = self.attendance.facts()
        self.streams.break_off(self.membership.why)
        return facts

    def patience(self) -> float:
        return max(ABSENT_S, KNOWN * self.detect)

    def enter(self, view: View) -> ViewEntry:
        with self.changed:
            unable = self._adopt(view, view.facts)
            self.changing = False
            self.changed.notify_all()
        return ViewEntry(unable)

    def stay(self) -> None:
        while not self.closing:
            with self.changed:
                self.changed.wait(LOOK_S)
                due = bool(self.membership.why) or self.membership.called
                alone = self.attendance.got is None and self.all_ended()
            if self.closing or (self.ended and self.all_ended()):
                return
            if alone:
                raise LeftOut(
                    f"the run has ended before island {self.island} could take part again"
                )
            if due:
                raise Regroup

    def part(self, broken: bool) -> None:
        """Do nothing. Connections to other islands are cut by :meth:`facts`, when the next view is asked for.

        ``broken``: whether the view has failed.
        """

    def _adopt(self, view: View, facts: Sequence[Facts]) -> str:
        """Enter a view and start the epoch of its streams; return why this rank cannot go on, or ""."""
        attendance, self.view = self.attendance, view
        changes = attendance.adopt(view.members, facts)
        mates = {member.number: member.address for member in view.members}
        self.addresses = {
            island: mates[numbers[attendance.place]]
            for island, numbers in attendance.members.items()
        }
        self.streams.begin(view.epoch)
        self.news.report(view, changes, self._noticed)
        if changes.unable:
            self.give_up(LeftOut(changes.unable))
        return changes.unable

    # --- the end ---

    def all_ended(self) -> bool:
        """Return whether this rank need wait for no other member: each has finished the run, is lost, or could not take
        part yet.
        """
        with self.changed:
            if self.view is None:
                return False
            absent = {*self.membership.lost, self.membership.me.number}
            numbers = [
                member.number
                for member in self.view.members
                if member.number not in absent
            ]
            said = [self.membership.published.get(number, {}) for number in numbers]
            return all(facts.get("ended") or facts.get("waits") for facts in said)

    def end(self) -> None:
        """Announce that this rank has finished the run, and wait until all other ranks have.

        The wait lasts at most :data:`END_S` seconds.
        """
        deadline = time.monotonic() + END_S
        self.ended = True
        self.membership.publish(ended=True)
        with self.changed:
            self.changed.wait_for(self.all_ended, max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """End the agent and the thread that follows the views."""
        self.closing = True
        self.membership.close()

    def on_break(self, why: str) -> None:
        """Cut the connections to other islands, as a member of the present view is lost. Called in the agent's thread.

        ``why``: the reason in words. If the lost member is of this rank's island, this process ends, too.
        """
        with self.changed:
            if self.membership.why:  # else the next one is there already
                self.streams.break_off(why)
        own = self.attendance.members.get(self.island, {})
        if (
            self.view is not None
            and not self.ended
            and self.membership.lost.intersection(own.values())
        ):
            self.give_up(
                LeftOut(
                    f"island {self.island} ends, as its {why}; the other islands go on"
                )
            )

    def give_up(self, error: Exception) -> None:
        """End this process because of ``error``.

        A thread ends the process after a short while. If the main thread calls :meth:`steady` before that, ``error`` is
        raised there instead.
        """
        with self.changed:
            if self.fatal is not None or self.closing:
                return
            self.fatal = error
            self.changed.notify_all()
        self.streams.break_off(str(error))
        threading.Thread(
            target=self._end_process,
            args=(error,),
            name="weft-islands-end",
            daemon=True,
        ).start()

    def _end_process(self, error: Exception) -> None:
        with suppress(Exception):
            self.close()
        if (
            isinstance(error, LeftOut)
            and "WEFT_LAUNCHED" in os.environ
            and not self.attendance.place
        ):
            print(f"weft: {error}", flush=True)
        os._exit(report_failure(error))
