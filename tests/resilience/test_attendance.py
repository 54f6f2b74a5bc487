"""Which islands take part: thousands of seeded schedules of exchanges, losses and returns, in memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from weft.recipe import Sync
from weft.resilience.attendance import Attendance, Stay
from weft.resilience.views import Member
from weft.sync.presence import Draw

CASES, LAST = 250, 12


def everybody(islands: Sequence[int]) -> Sequence[int]:
    return islands


def pair_of(island: int) -> Draw:
    """Neighbours exchange with each other alone; who has none, with nobody."""

    def draw(islands: Sequence[int]) -> Sequence[int]:
        at = list(islands).index(island) & ~1
        return islands[at : at + 2]

    return draw


@dataclass
class Rank:
    number: int
    attendance: Attendance
    done: tuple[int, int] = (0, -1)  # what it has published: epoch and exchange
    group: list[int] = field(default_factory=list)
    log: dict[int, list[int]] = field(default_factory=dict)  # partners, by exchange

    @property
    def island(self) -> int:
        return self.attendance.start[0]


class World:
    """Ranks that see each other's facts when a view changes, and of each other what has been published before that."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.islands, self.places = self.rng.randint(2, 5), self.rng.randint(1, 2)
        fragments = self.rng.choice([1, 1, 3])
        self.how = Sync(every=6, update="streaming" if fragments > 1 else "average")
        self.how = self.how.model_copy(update={"fragments": fragments})
        self.lives, self.numbers, self.epoch = 0, 0, 0
        self.ranks: list[Rank] = []
        lives = {}
        for island in range(self.islands):
            lives[island] = self.start(island)
        for rank in self.ranks:
            rank.attendance.begin(lives)
        self.view()

    def start(self, island: int) -> str:
        self.lives += 1
        life = f"life {self.lives}"
        for place in range(self.places):
            attendance = Attendance((island, life), place, self.places, self.how)
            self.ranks.append(Rank(self.numbers, attendance))
            self.numbers += 1
        return life

    def view(self) -> None:
        """Let all that live adopt the next view; whoever cannot go on ends, which takes another view."""
        while True:
            self.epoch += 1
            members = [Member(r.number, "", r.number, "", 0, 0.0) for r in self.ranks]
            facts = [rank.attendance.facts() for rank in self.ranks]
            before = {rank.number: rank.attendance.committed for rank in self.ranks}
            pending = {r.number: r.attendance.pending for r in self.ranks}
            unable = []
            for rank in self.ranks:
                attendance = rank.attendance
                changes = attendance.adopt(members, facts)
                unable += [rank] * bool(changes.unable)
                if attendance.committed > before[rank.number]:
                    rank.log[attendance.committed] = rank.group
                attendance.pending = None
            self.agree(pending)
            if not unable:
                return
            self.ranks = [rank for rank in self.ranks if rank not in unable]

    def agree(self, pending: dict[int, Any]) -> None:
        """All know the same, and of an exchange that was under way all that took part are through, or nobody."""
        known = [(a.stays, a.giver, a.waiting, a.members) for a in self.attendances()]
        assert all(one == known[0] for one in known)
        under_way = {p[0] for p in pending.values() if p}
        for number in under_way:
            groups = {
                tuple(rank.group)
                for rank in self.ranks
                if pending[rank.number] and pending[rank.number][0] == number
            }
            for group in groups:
                through = {
                    rank.attendance.committed >= number
                    for rank in self.ranks
                    if rank.island in group
                    and (pending[rank.number] or number in rank.log)
                }
                assert len(through) <= 1, f"exchange {number} of {group}"

    def attendances(self) -> list[Attendance]:
        return [rank.attendance for rank in self.ranks]

    def act(self, rank: Rank) -> None:
        """The next thing that a rank does by itself, if there is one."""
        attendance = rank.attendance
        stay = attendance.own_stay
        # also if it has got a state that another rank of its island has not
        if attendance.got is None or (stay and attendance.got != stay.after):
            giving = [
                other
                for other in self.ranks
                if stay and other.island == attendance.giver
                and other.attendance.place == attendance.place
            ]  # fmt: skip
            if stay and giving and giving[0].attendance.committed >= stay.after:
                attendance.got = attendance.begun = attendance.committed = stay.after
            return
        number = attendance.committed + 1
        if number > LAST:
            return
        draw = pair_of(rank.island) if number % 3 == 2 else everybody
        if attendance.pending is None:
            attendance.begun = max(attendance.begun, number)
            rank.group = attendance.partners(number, draw)
            attendance.pending, rank.done = (number, draw), (self.epoch, number)
        elif self.all_done(rank, number):
            attendance.committed, attendance.pending = number, None
            rank.log[number] = rank.group

    def all_done(self, rank: Rank, number: int) -> bool:
        numbers = [
            one
            for island in rank.group
            for one in rank.attendance.members[island].values()
        ]
        done = {other.number: other.done for other in self.ranks}
        return all(
            one in done and done[one][0] == self.epoch and done[one][1] >= number
            for one in numbers
        )

    def disturb(self) -> None:
        here = sorted({rank.island for rank in self.ranks})
        absent = [i for i in range(self.islands) if i not in here]
        if absent and self.rng.random() < 0.5:
            self.start(self.rng.choice(absent))
        elif len(here) > 1:
            victim = self.rng.choice([r for r in self.ranks if r.island != here[0]])
            self.ranks.remove(victim)
        self.view()

    def run(self, disturbed: float, actions: int) -> None:
        for _ in range(actions * len(self.ranks)):
            if self.rng.random() < disturbed:
                self.disturb()
            self.act(self.rng.choice(self.ranks))


def test_all_know_the_same_and_end_exchanges_alike() -> None:
    returned = 0
    for seed in range(CASES):
        world = World(seed)
        try:
            world.run(disturbed=0.04, actions=20)
            world.run(disturbed=0.0, actions=20 * LAST)
            for rank in world.ranks:  # nobody waits in vain that may still come in
                stay, late = rank.attendance.own_stay, rank.attendance.got is None
                assert rank.attendance.committed == LAST or (
                    late and (stay is None or stay.after > LAST)
                ), rank
            for number in range(LAST + 1):
                of = {
                    island: rank.log[number]
                    for rank in world.ranks
                    if number in rank.log
                    for island in rank.log[number]
                    if island == rank.island
                }
                for island, group in of.items():
                    same = [of[other] for other in group if other in of]
                    assert all(one == group for one in same), (number, island, of)
        except BaseException as error:
            error.add_note(f"case {seed}")
            raise
        returned += any(stay.after > -1 for stay in world.ranks[0].attendance.stays)
    assert returned > CASES // 4


@pytest.mark.parametrize(
    ("fragments", "every", "begun", "after"),
    [(1, 10, -1, 0), (1, 10, 0, 1), (1, 10, 7, 8), (4, 8, 0, 4), (4, 8, 5, 8)],
)
def test_islands_join_from_the_first_round_that_nobody_has_begun(
    fragments: int, every: int, begun: int, after: int
) -> None:
    how = Sync(every=every).model_copy(update={"fragments": fragments})
    attendance = Attendance((0, "a"), 0, 1, how)
    attendance.begin({0: "a"})
    attendance.begun = begun
    new = Attendance((1, "b"), 0, 1, how)
    members = [Member(n, "", n, "", 0, 0.0) for n in range(2)]
    changes = attendance.adopt(members, [attendance.facts(), new.facts()])
    assert changes.joined == [1] and not changes.went
    assert attendance.waiting == [Stay(1, "b", after, None)] and after > begun
