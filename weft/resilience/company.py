"""Exchanges between islands that come and go.

A rank publishes that it has received everything it needs for an exchange, and continues with the result when all
participants have published the same. At the beginning of a round one of the present islands hands its state to those
that join.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from weft.checkpoint.run_state import Progress
from weft.resilience.island_party import KNOWN, IslandParty
from weft.sync.presence import Draw, Presence, StopRequest, Work
from weft.sync.streams import IslandLost

R = TypeVar("R")

#: How often an exchange is tried before the run ends, as what fails so often is not the loss of islands.
ATTEMPTS = 8


class Handover(NamedTuple):
    """Moment of the training at which an island has received its model state from another island.

    ``round``: number of the round of training after which the state was taken; ``tokens``: number of tokens on which
    the run had trained by then.
    """

    round: int
    tokens: int


class Company(Presence):
    """Decides which islands take part in each exchange, in a run whose islands come and go.

    ``party``: this rank's part in the agreement on the run's members, which knows the islands that are present.
    """

    def __init__(self, party: IslandParty) -> None:
        super().__init__(party.streams)
        self.party, self.attendance, self.membership = (
            party,
            party.attendance,
            party.membership,
        )
        self.changed, self._news = party.changed, party.news.lines
        self.progress = Progress()
        self._noted: set[tuple[int, int, int]] = (
            set()
        )  # island, step, place of a rank with another state

    # --- exchanges ---

    def begin(self, number: int) -> None:
        with self.changed:
            self.party.steady()
            self.attendance.begun = max(self.attendance.begun, number)

    def exchange(self, number: int, draw: Draw, work: Work[R]) -> R:
        error: Exception | None = None
        for _ in range(ATTEMPTS):
            with self.changed:
                epoch = self.party.steady().epoch
                group = self.attendance.partners(number, draw)
            begun = time.monotonic()
            try:
                result = work(group, str(number))
            except IslandLost as lost:
                error = lost
                if time.monotonic() - begun > self.streams.limit:
                    break
                self._await_change(epoch, str(lost))
                continue
            if self._all_done(number, draw, epoch, group):
                with self.changed:
                    self.party.news.note_exchange(number, group)
                return result
        raise error or IslandLost(
            f"exchange {number} between islands has failed {ATTEMPTS} times"
        )

    def _await_change(self, epoch: int, why: str) -> None:
        """Wait for the view after ``epoch``, because an exchange has failed for the reason ``why``.

        If no member turns out to be lost, this rank asks for the next view itself. All ranks then repeat the exchange
        over new connections.
        """
        party = self.party
        with self.changed:
            if not self.changed.wait_for(
                lambda: self._is_over(epoch), KNOWN * party.detect
            ):
                self.membership.report(why)
                self.changed.wait_for(
                    lambda: party.changing or party.fatal, self.streams.limit
                )

    def _is_over(self, epoch: int) -> bool:
        """Return whether the view of ``epoch`` has ended, or is about to end."""
        party = self.party
        return (
            party.changing
            or party.fatal is not None
            or (party.view is not None and party.view.epoch != epoch)
        )

    def _all_done(
        self, number: int, draw: Draw, epoch: int, group: Sequence[int]
    ) -> bool:
        """Publish that this rank has all it needs for exchange ``number``, and wait until all others have.

        Returns whether the exchange is over; if not, it must be repeated.
        """
        attendance, membership = self.attendance, self.membership
        with self.changed:
            if self.party.steady().epoch != epoch:
                return False
            attendance.pending = (number, draw)
            membership.publish(done=number, epoch=epoch)
            others = {
                rank for island in group for rank in attendance.members[island].values()
            }
            others -= {membership.me.number}

            def all_say_so() -> bool:
                said = [membership.published.get(rank, {}) for rank in others]
                return all(
                    facts.get("epoch") == epoch and facts.get("done", -1) >= number
                    for facts in said
                )

            self.changed.wait_for(lambda: self._is_over(epoch) or all_say_so())
            if self.party.steady().epoch == epoch and all_say_so():
                attendance.committed = number
            attendance.pending = None
            return attendance.committed >= number

    # --- coming ---

    def newcomers(self, number: int) -> Sequence[int]:
        with self.changed:
            self.party.steady()
            return self.attendance.newcomers(number)

    @property
    def tokens(self) -> int:
        return self.progress.tokens

    def come_in(
        self, take: Callable[[int, int], list[int]], all_say: Callable[[Any], list[Any]]
    ) -> Handover:
        """Receive the model's state from another island at the end of a round of training.

        Returns the number of that round, and the tokens that the run had counted by then. If the other island is lost
        meanwhile, the state is received from the next one.

        ``take(island, round)``: receives the state of ``island`` after ``round``. It returns one list of integers: the
        number of tokens; then, for each fragment of the model, the number of islands over which it was last averaged;
        then the numbers of the islands in the order in which they form a ring; then the bytes of a JSON text, the
        wishes with which the run ends now, or null. ``all_say(value)``: returns the values that all ranks of this
        island pass to it.
        """
        attendance, fragments = self.attendance, self.attendance.how.fragments
        while True:
            with self.changed:
                while not self.party.steady() or (stay := attendance.own_stay) is None:
                    self.changed.wait()
                epoch, giver = self.party.steady().epoch, attendance.giver
                after = stay.after
            tokens, done = 0, False
            try:
                tokens, *rest = take(giver, after // fragments)
                self.counts, rest = rest[:fragments], rest[fragments:]
                islands = self.streams.islands
                self.streams.order = rest[:islands]
                wishes = json.loads(bytes(rest[islands:]))
                ended = (
                    None if wishes is None else StopRequest(after // fragments, wishes)
                )
                self.ends = ended
                done = True
            except IslandLost as error:
                self._await_change(epoch, str(error))
            with self.changed:
                done = done and self.party.steady().epoch == epoch
                if done:
                    attendance.got = attendance.begun = attendance.committed = after
            if all(said == (True, after) for said in all_say((done, after))):
                self.membership.publish(waits=False)
                return Handover(after // fragments, tokens)

    # --- wishes and reports ---

    def request_stop(self, number: int) -> None:
        facts = {"stop": json.loads(json.dumps([number, self.wishes()]))}
        self.membership.publish(**facts)
        with self.changed:
            self.membership.published[self.membership.me.number] = facts

    def stop_request(self) -> StopRequest | None:
        with self.changed:
            self.party.steady()
            numbers = [
                rank
                for ranks in self.attendance.members.values()
                for rank in ranks.values()
            ]
            # who exchanges with some only may have waited for an island until it had ended
            if self.attendance.how.partnership != "all":
                numbers = [*self.membership.published]
            said = [self.membership.published.get(rank, {}) for rank in numbers]
        first = min((facts["stop"] for facts in said if "stop" in facts), default=None)
        return first and StopRequest(*first)

    def note_differing(self, odd: Sequence[int], step: int) -> None:
        place = self.attendance.place
        self._note_differing(odd, step, place)
        if place:
            self.membership.publish(odd=[[island, step, place] for island in odd])

    def _note_differing(self, odd: Sequence[int], step: int, place: int) -> None:
        new = [island for island in odd if (island, step, place) not in self._noted]
        self._noted |= {(island, step, place) for island in new}
        super().note_differing(new, step)

    def take_news(self) -> list[str]:
        with self.changed:
            mates = self.attendance.members.get(self.party.island, {}).values()
            said = [
                self.membership.published.get(rank, {}).get("odd", []) for rank in mates
            ]
        for island, step, place in (entry for odd in said for entry in odd):
            self._note_differing([island], step, place)
        return super().take_news()

    @property
    def first(self) -> bool:
        """Whether this rank's island has the lowest number of the islands that are present."""
        with self.changed:
            return self.party.island == min(
                stay.island for stay in self.attendance.present
            )
