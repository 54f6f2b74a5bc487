"""Which islands take part in which exchange: one rank's side of the protocol, without sockets and threads.

All ranks of all islands are members of one view. An island with a missing rank counts as absent. Exchanges are
numbered. An exchange is over for a rank once all participating ranks have said that they received what they need. If a
rank is lost before that, the facts of the next view decide: if any rank has gone on, all have received what they need
and go on too; otherwise they repeat the exchange without the lost island. A rank's facts do not change until the next
view begins, so all ranks decide alike. Islands join in the first round that no rank has begun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft.recipe import Sync
from weft.resilience.views import Member
from weft.sync.presence import Draw

Facts = dict[str, Any]
#: One start of an island: its number, and a random word (its *life*), as an island that is started again has another.
Start = tuple[int, str]


class Stay(NamedTuple):
    """Period in which an island (a group of ranks that trains by itself) takes part in exchanges with other islands.

    In an exchange, islands combine what they have trained. Exchanges are numbered.

    Attributes:
        ``island``: number of the island.
        ``life``: random word that tells this start of the island from earlier starts.
        ``after``: number of the last exchange before the period.
        ``until``: number of the last exchange in the period; None while the island is present.
    """

    island: int
    life: str
    after: int
    until: int | None

    @property
    def start(self) -> Start:
        return self.island, self.life

    def covers(self, number: int) -> bool:
        return self.after < number and (self.until is None or number <= self.until)


class Changes(NamedTuple):
    """Islands that a run has lost or gained with a new view (set of the run's members).

    ``went``: the lost islands, each as the period in which it took part in exchanges; ``joined``: numbers of the
    islands that begin to take part; ``unable``: why this rank cannot go on, or "" if it can.
    """

    went: list[Stay]
    joined: list[int]
    unable: str


@dataclass
class Attendance:
    """What one rank knows about the islands of a run and their exchanges.

    An island is a group of ranks that trains by itself. In an exchange, islands combine what they have trained;
    exchanges are numbered. A stay is a period in which an island takes part in exchanges.

    Attributes:
        ``start``: number of this rank's island, and the random word that identifies this start of the island.
        ``place``: number of this rank within its island.
        ``ranks``: number of ranks per island.
        ``how``: the recipe's section ``[sync]``.
        ``stays``: stays of all islands, present and past.
        ``members``: the member's number of each rank, by island and by place in the island.
        ``known``: what each member has told about itself (the result of :meth:`facts`), by the member's number.
        ``waiting``: future stays of islands that have no model state yet.
        ``giver``: number of the island that hands its state to the waiting islands.
        ``begun``: number of the last exchange that this rank has begun.
        ``committed``: number of the last exchange that is over.
        ``pending``: the number of an exchange for which this rank has received everything, and the function that draws
            its partners; None if there is no such exchange.
        ``got``: number of the exchange after which this rank received its model state; None before that.
    """

    start: Start
    place: int
    ranks: int
    how: Sync
    stays: list[Stay] = field(default_factory=list)
    members: dict[int, dict[int, int]] = field(default_factory=dict)
    known: dict[int, Facts] = field(default_factory=dict)
    waiting: list[Stay] = field(default_factory=list)
    giver: int = 0
    begun: int = -1
    committed: int = -1
    pending: tuple[int, Draw] | None = None
    got: int | None = None

    @property
    def present(self) -> list[Stay]:
        """The stays of the islands that take part now. A stay is a period in which an island takes part in
        exchanges.
        """
        return [stay for stay in self.stays if stay.until is None]

    @property
    def own_stay(self) -> Stay | None:
        """Future stay of this rank's island, while the island waits for the state of another; else None.

        A stay is a period of taking part in exchanges.
        """
        return next((stay for stay in self.waiting if stay.start == self.start), None)

    def begin(self, lives: Mapping[int, str]) -> None:
        """Start with the run's first view (set of members), in which all islands take part.

        ``lives``: for each island, by number, the random word that identifies its start.
        """
        self.stays = [
            Stay(island, life, -1, None) for island, life in sorted(lives.items())
        ]
        self.got = -1

    def facts(self) -> Facts:
        """Return the JSON values that this rank tells the other ranks when they agree on the next view.

        A view is the set of members of the run. In an exchange, islands combine what they have trained; exchanges
        are numbered. The result has the rank's island (``island``, ``life``), its place there, the stays of all
        islands (periods in which they take part), and three numbers of exchanges. ``begun`` is the last exchange
        that this rank has begun, ``committed`` the last one that is over. ``got`` is the exchange after which this
        rank received its model state.
        """
        island, life = self.start
        return {
            "island": island, "life": life, "place": self.place, "stays": [list(stay) for stay in self.stays],
            "begun": self.begun, "got": self.got, "committed": self.committed,
        }  # fmt: skip

    def population(self, number: int) -> list[int]:
        """Return the numbers of the islands among which the partners of an exchange are drawn.

        These are all islands that take part in the exchange, even if some of them have been lost since. ``number``:
        number of the exchange.
        """
        return sorted({stay.island for stay in self.stays if stay.covers(number)})

    def partners(self, number: int, draw: Draw) -> list[int]:
        """Return the numbers of the islands with which this rank's island exchanges updates in one exchange.

        ``number``: number of the exchange; ``draw(islands)``: chooses the partners among ``islands``, the numbers that
        :meth:`population` returns. Partners that are lost by now are left out.
        """
        here = {stay.island for stay in self.present if stay.covers(number)}
        return [island for island in draw(self.population(number)) if island in here]

    def newcomers(self, number: int) -> list[int]:
        """Return the numbers of the islands that join after one exchange and get their state from this rank's island.

        ``number``: number of the exchange. The list is empty if another island hands over its state.
        """
        count = self.how.fragments
        if self.giver != self.start[0]:
            return []
        return [
            stay.island
            for stay in self.waiting
            if stay.after // count == number // count
        ]

    def adopt(self, members: Sequence[Member], facts: Sequence[Facts]) -> Changes:
        """Work out which islands are present in a new view (set of the run's members). Returns the changes.

        ``members``: members of the view; ``facts``: for each of these members, in the same order, what it said in the
        agreement (:meth:`facts`). The result is the same on all ranks.
        """
        started: dict[Start, dict[int, Facts]] = {}  # by place
        numbers: dict[Start, dict[int, int]] = {}
        for member, fact in zip(members, facts, strict=True):
            self.known[member.number] = fact
            start = (int(fact["island"]), str(fact["life"]))
            started.setdefault(start, {})[int(fact["place"])] = fact
            numbers.setdefault(start, {})[int(fact["place"])] = member.number
        whole = {
            start: places
            for start, places in sorted(started.items())
            if len(places) == self.ranks
        }
        stays = next(
            [Stay(*stay) for stay in fact["stays"]] for fact in facts if fact["stays"]
        )
        begun = max(int(fact["begun"]) for fact in facts)
        self.stays = stays
        self._commit_with(facts)
        before = self.present
        went = [stay for stay in before if stay.start not in whole]
        lacks = [
            stay for stay in before
            if stay not in went and any(fact["got"] != stay.after for fact in whole[stay.start].values())
        ]  # fmt: skip
        stays = [
            stay._replace(until=begun) if stay in went else stay
            for stay in stays
            if stay not in lacks
        ]
        here = {stay.island for stay in stays if stay.until is None}
        came = {island: life for island, life in whole if island not in here}
        self.waiting = [
            Stay(island, life, self._end_of_round(begun), None)
            for island, life in came.items()
        ]
        self.giver = min(here, default=0)
        self.stays = stays + self.waiting
        self.members = {stay.island: numbers[stay.start] for stay in self.present}
        lacked = {stay.island for stay in lacks}
        joined = [stay.island for stay in self.waiting if stay.island not in lacked]
        return Changes(went, joined, self._why_unable(whole, started))

    def _commit_with(self, facts: Sequence[Facts]) -> None:
        """End a pending exchange if any rank that took part in it has ended it."""
        if self.pending is None:
            return
        number, draw = self.pending
        with_whom = draw(self.population(number))
        if any(
            int(fact["island"]) in with_whom and int(fact["committed"]) >= number
            for fact in facts
        ):
            self.committed = number

    def _why_unable(
        self,
        whole: Mapping[Start, Mapping[int, Facts]],
        started: Mapping[Start, Mapping[int, Facts]],
    ) -> str:
        if self.start in whole:
            return ""
        island = self.start[0]
        same = sum(
            len(places) for start, places in started.items() if start[0] == island
        )
        # an island that comes is not whole until its last rank is there
        if self.got is None and same < self.ranks:
            return ""
        return f"island {island} cannot go on without all of its ranks"

    def _end_of_round(self, begun: int) -> int:
        """Return the last exchange before the round that follows the round of exchange ``begun``."""
        count, every = self.how.fragments, self.how.every
        return (
            count * (begun // count + 1)
            + sum(every * f // count == 0 for f in range(count))
            - 1
        )
