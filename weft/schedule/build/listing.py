"""The clock of the list scheduler: a free rank takes the best action that is ready.

Weight gradients fill what is left. The banker's rule keeps memory from filling with forwards that could then never see
their backward: a forward starts only if afterwards the microbatches under way can be finished one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import NamedTuple

from weft.schedule.actions import Entry, ScheduleError, Value
from weft.schedule.build.trips import EPS, Trips


@dataclass(frozen=True)
class Policy:
    """Rules by which the list scheduler chooses the next action of an idle rank.

    Attributes:
        ``alternate``: whether a rank that has just run a backward prefers a forward if both are ready. Otherwise it
            always prefers the backward.
        ``patience``: how long a rank stays idle if it could run only a weight gradient, but expects the input of a
            forward or backward soon. It waits if the input arrives within this share of the weight gradient's time.
        ``ahead``: limit of the forwards whose backward has not run yet, on a rank at one stage. It is a multiple of the
            number of forwards and backwards that fit in a round trip: the time in which a microbatch travels from the
            stage to the last one and back. 1 is 1F1B; 2 leaves no idle time; infinity is no limit.
    """

    alternate: bool = False
    patience: float = 0.0
    ahead: float = inf


class _Item(NamedTuple):
    """An action ``kind`` of microbatch ``m`` at place ``i`` of its path; its input is on the rank at ``time``."""

    m: int
    i: int
    kind: str
    time: float = 0.0


class Listing:
    """List scheduler: simulates a step in time, and lets each idle rank start the best action that is ready.

    An instance serves one call of :meth:`orders` or of :meth:`one_by_one`.

    ``name``: the schedule's name in errors; ``holders[s]``: ranks that may run stage ``s``; ``trips``: paths, times and
    memory of the microbatches; ``policy``: rules that say which action is best.

    Two terms are used in the methods. Position ``i`` of a microbatch's path is the ``i``-th stage that the microbatch
    passes. A microbatch is under way from the start of its first forward to the end of its last backward.
    """

    def __init__(
        self, name: str, holders: Sequence[Sequence[int]], trips: Trips, policy: Policy
    ) -> None:
        self.name, self.holders, self.trips, self.policy = name, holders, trips, policy
        self.paths, limits = trips.paths, trips.limits
        self.done: list[list[Entry]] = [[] for _ in limits]
        self.free = [0.0] * len(limits)
        self.level = [0.0] * len(limits)  # saved and tape
        # compute time of what a rank has run or was promised
        self.load = [0.0] * len(limits)
        self.ready: list[list[_Item]] = [[] for _ in limits]  # F and backward
        self.tapes: list[list[_Item]] = [[] for _ in limits]  # W
        self.links: dict[tuple[int, int], float] = {}
        self.where: dict[int, list[int]] = {}  # rank of every place of the path
        self.step: dict[int, int] = {}  # of microbatches under way
        self.waiting = list(range(len(self.paths)))
        # microbatches between forward and backward of a stage
        self.between = [0] * len(holders)
        self.events = [0.0]

    def orders(self) -> list[list[Entry]]:
        """Return each rank's actions in the order in which the list scheduler starts them.

        Raises :class:`ScheduleError` for a microbatch that does not fit in memory even if it runs alone.
        """
        for m in self.waiting:
            self.alone(m)
        while self.events:
            now = heappop(self.events)
            while any(self.turn(rank, now, True) for rank in range(len(self.free))):
                pass
            if not self.events:
                # Paths that visit stages in other orders can wait for each other's caps: one goes beyond its own.
                any(self.turn(rank, now, False) for rank in range(len(self.free)))
        return self.done

    def one_by_one(self) -> list[list[Entry]]:
        """Return each rank's order of actions if every microbatch starts only after the microbatch before has ended."""
        for m, path in enumerate(self.paths):
            where = self.alone(m)
            for i, r in enumerate(where):
                self.done[r].append(("F", path[i], m))
            for i, r in reversed(list(enumerate(where))):
                self.done[r] += [(kind, path[i], m) for kind in self.trips.kinds[1:]]
        return self.done

    def turn(self, rank: int, now: float, capped: bool) -> bool:
        """Start the best action that ``rank`` can run at time ``now``; return whether an action was started.

        None is started if the rank is busy, if no ready action may start (:meth:`admits`), or if the rank waits for a
        value that arrives soon (:class:`Policy`). ``capped``: whether the policy limits how many forwards may run ahead
        of backward.
        """
        if self.free[rank] > now:
            return False
        items = [a for a in self.ready[rank] if a.time <= now]
        entering = (m for m in self.waiting if rank in self.holders[self.paths[m][0]])
        items += [_Item(m, 0, "F") for m in islice(entering, 1)]
        passes = (kind for kind, _, _ in reversed(self.done[rank]) if kind != "W")
        last = next(passes, "F")
        forward = self.policy.alternate and last != "F"
        # The oldest microbatch first, so that its memory comes back first.
        for a in sorted(items, key=lambda a: ((a.kind == "F") != forward, a.m, a.i)):
            if self.admits(rank, a, capped):
                return self.start(rank, a, now)
        if not self.tapes[rank]:
            return False
        tape = self.tapes[rank][0]
        duration = self.trips.time(rank, tape.m, tape.i, tape.kind)
        until = now + self.policy.patience * duration
        soon = (b for b in self.ready[rank] if now < b.time < until)
        if any(self.admits(rank, b, capped) for b in soon):
            return False
        return self.start(rank, tape, now)

    def admits(self, rank: int, a: _Item, capped: bool) -> bool:
        """Return whether ``rank`` may start the action ``a`` without a lack of memory, now or later.

        The rank must have room for the values that the action saves. After a forward, all microbatches that have begun
        must still be able to finish. ``capped``: whether the policy's limit of forwards whose backward has not run
        (:attr:`Policy.ahead`) must hold, too.
        """
        level = self.level[rank] + self.trips.change(a.m, a.i, a.kind)
        if level > self.trips.limits[rank] + EPS:
            return False
        if a.kind != "F":
            return True
        where = self.where.get(a.m) or self.place(a.m, rank)
        if where is None or not self.safe(a.m, where, a.i + 1):
            return False
        ahead = (
            self.policy.ahead * self.trips.rounds_ahead(a.m, a.i, where)
            if capped
            else inf
        )
        return self.between[self.paths[a.m][a.i]] < ahead - EPS

    def safe(self, m: int, where: list[int], step: int) -> bool:
        """Return whether the ranks' memory lets all begun microbatches finish.

        The result is True if they can finish one after the other in some order (banker's rule). ``step``: how many
        passes of microbatch ``m`` are taken as started. A pass is a forward or backward at one stage. ``where``: the
        rank of every stage on the path of ``m``. For all other microbatches the passes that they have really started
        count.
        """
        under_way = {n: (n, self.where[n], k) for n, k in self.step.items()}
        return self.trips.safe((under_way | {m: (m, where, step)}).values())

    def start(self, rank: int, a: _Item, now: float) -> bool:
        """Run the action ``a`` on ``rank`` from time ``now`` on, and make the actions ready that need its result.

        The result is always True, for callers that report whether an action was started.
        """
        m, i, stage = a.m, a.i, self.paths[a.m][a.i]
        self.free[rank] = end = now + self.trips.time(rank, m, i, a.kind)
        heappush(self.events, end)
        self.done[rank].append((a.kind, stage, m))
        self.level[rank] += self.trips.change(m, i, a.kind)
        if a.kind == "W":
            self.tapes[rank].remove(a)
            return True
        if m in self.step:
            self.ready[rank].remove(a)
        else:
            self.waiting.remove(m)
            self.step[m], self.where[m] = 0, self.place(m, rank) or []
            for j, r in enumerate(self.where[m]):
                self.load[r] += self.trips.work(r, m, j)
        self.step[m] += 1
        self.between[stage] += 1 if a.kind == "F" else -1
        if a.kind == "F" and i + 1 < len(self.paths[m]):
            self.rebind(m, i + 1, end)
            self.send("act", m, i, i + 1, "F", end)
        elif a.kind == "F":
            self.ready[rank].append(_Item(m, i, self.trips.backward, end))
        elif i:
            self.send("grad", m, i, i - 1, a.kind, end)
        else:
            del self.step[m]
        if a.kind == "I":
            self.tapes[rank].append(_Item(m, i, "W", end))
        return True

    def send(self, name: str, m: int, i: int, to: int, kind: str, end: float) -> None:
        """Send a value of microbatch ``m`` from the rank of one stage on its path to the rank of another.

        ``name``: name of the value, ``act`` (output) or ``grad`` (gradient); ``i``, ``to``: positions of the two stages
        on the path; ``kind``: kind of the action that becomes ready at ``to`` when the value arrives; ``end``: time at
        which the value has been computed.
        """
        link = source, target = self.where[m][i], self.where[m][to]
        if source != target:
            costs, value = self.trips.costs, Value(name, self.paths[m][i], m)
            begin = max(end, self.links.get(link, 0.0)) if costs.exclusive else end
            end = begin + costs.move(value, source, target)
            self.links[link] = end
            heappush(self.events, end)
        self.ready[target].append(_Item(m, to, kind, end))

    def place(self, m: int, first: int | None = None) -> list[int] | None:
        """Choose a rank for every stage that microbatch ``m`` passes. Returns the ranks in the order of its path.

        Ranks with the least compute time so far are preferred. The microbatch must fit in the memory of the chosen
        ranks while no other microbatch runs. If no choice allows that, the result is None. ``first``: the rank for the
        first stage of the path; None: it is chosen, too.
        """
        path = self.paths[m]

        def extend(where: list[int]) -> list[int] | None:
            if not self.trips.alone(m, where) or len(where) == len(path):
                return where if self.trips.alone(m, where) else None
            able = self.holders[path[len(where)]] if where or first is None else [first]

            def load(r: int) -> tuple[float, int]:
                return self.load[r] + self.trips.work(r, m, len(where)), r

            wholes = (extend([*where, r]) for r in sorted(able, key=load))
            return next(filter(None, wholes), None)

        return extend([])

    def alone(self, m: int) -> list[int]:
        """Return the ranks that :meth:`place` chooses for the path of microbatch ``m``.

        Raises :class:`ScheduleError` if the microbatch does not fit in memory although no other microbatch runs.
        """
        if where := self.place(m):
            return where
        limits = self.trips.limits
        largest = [max(self.holders[s], key=limits.__getitem__) for s in self.paths[m]]
        need, _ = self.trips.claim(m, largest, 0)
        rank = max(need, key=lambda r: need[r] - limits[r])
        raise ScheduleError(
            f"schedule {self.name}: microbatch {m} alone needs {need[rank]:g} of memory on rank {rank}, whose limit is "
            f"{limits[rank]:g}; raise the limit or hold fewer stages there"
        )

    def rebind(self, m: int, i: int, end: float) -> None:
        """Choose anew which rank runs the ``i``-th stage on the path of microbatch ``m``.

        The chosen rank is the one that would end the stage's forward first. A rank is not considered if with it some
        microbatch that has begun could no longer finish, for lack of memory. Nothing changes if only one rank may run
        the stage. ``end``: the time at which the forward of the stage before ends.
        """
        where, before = self.where[m], self.where[m][i - 1]
        value = Value("act", self.paths[m][i - 1], m)

        def ends(r: int) -> float:
            there = (
                end if r == before else end + self.trips.costs.move(value, before, r)
            )
            queued = sum(self.trips.time(r, a.m, a.i, a.kind) for a in self.ready[r])
            return max(there, self.free[r] + queued) + self.trips.time(r, m, i, "F")

        able = self.holders[self.paths[m][i]]
        for rank in sorted(able, key=lambda r: (ends(r), r)) if len(able) > 1 else ():
            other = [*where[:i], rank, *where[i + 1 :]]
            if rank == where[i] or self.safe(m, other, self.step[m]):
                self.load[where[i]] -= self.trips.work(where[i], m, i)
                self.load[rank] += self.trips.work(rank, m, i)
                self.where[m] = other
                return
