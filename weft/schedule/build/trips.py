"""Times of microbatches on their way through the stages, and memory by the banker's rule."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import starmap
from math import inf

from weft.schedule.actions import PASSES, Action, Value
from weft.schedule.simulate import Costs

#: Sums of memory shares such as 1/3 may miss the limit by rounding.
EPS = 1e-9

#: Memory that a microbatch needs on each rank to reach its end beyond what it holds there, and what it holds.
Claim = tuple[Mapping[int, float], Mapping[int, float]]


@dataclass
class Trips:
    """Paths, times and memory of all microbatches, by which the list scheduler decides which actions may run.

    Three terms are used in the methods. Position ``i`` of a path is the ``i``-th stage that a microbatch passes.
    ``where`` lists the rank of every position, or of the first positions. ``step`` counts the forwards and backwards of
    a microbatch that have started.

    Attributes:
        ``paths[m]``: stages of microbatch ``m`` in the order of its forward.
        ``costs``: times of actions and transfers, and sizes of values.
        ``limits[r]``: memory of rank ``r``, in units of ``costs.size``.
        ``split``: whether backward is split into input gradient (I) and weight gradient (W).
        ``claims``, ``rounds``: results of :meth:`claim` and :meth:`rounds_ahead` that are kept for later calls.
    """

    paths: Sequence[Sequence[int]]
    costs: Costs
    limits: Sequence[float]
    split: bool
    claims: dict[tuple[int, ...], Claim] = field(default_factory=dict)
    rounds: dict[tuple[int, ...], float] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return PASSES[self.split]

    @property
    def backward(self) -> str:
        """The kind of action that computes the gradient of the input: "I" if backward is split, else "B"."""
        return self.kinds[1]

    def time(self, rank: int, m: int, i: int, kind: str) -> float:
        """Return the time of an action of ``kind`` on ``rank``, for microbatch ``m`` at position ``i`` of its path."""
        return self.costs.compute(Action(rank, kind, self.paths[m][i], m))

    def work(self, rank: int, m: int, i: int) -> float:
        """Return the time of forward and backward on ``rank``, for microbatch ``m`` at position ``i`` of its path."""
        return sum(self.time(rank, m, i, kind) for kind in self.kinds)

    def rounds_ahead(self, m: int, i: int, where: Sequence[int]) -> float:
        """Return how many times a rank can run a forward and a backward while microbatch ``m`` makes a round trip.

        The round trip begins with the forward of ``m`` at the ``i``-th stage of its path, on the rank of that stage. It
        leads to the end of the path, and ends when the gradient is back at that rank. The number is a float. It is
        infinite if a forward and a backward take no time. ``where``: the rank of every stage on the path.
        """
        key = (m, i, *where)
        if key not in self.rounds:
            path, back = self.paths[m], self.backward
            trip = own = self.time(where[i], m, i, "F")
            own += self.time(where[i], m, i, back)
            for j in range(i + 1, len(path)):
                here, before = where[j], where[j - 1]
                trip += self.time(here, m, j, "F") + self.time(here, m, j, back)
                if here != before:
                    trip += self.costs.move(Value("act", path[j - 1], m), before, here)
                    trip += self.costs.move(Value("grad", path[j], m), here, before)
            self.rounds[key] = trip / own if own else inf
        return self.rounds[key]

    def change(self, m: int, i: int, kind: str) -> float:
        """Return the change of memory in use on a rank when it runs one action; negative if memory is freed.

        The action is of kind ``kind``, and works on microbatch ``m`` at the ``i``-th stage of its path. Memory is in
        units of ``costs.size``.
        """
        stage = self.paths[m][i]
        saved = self.costs.size(Value("saved", stage, m))
        tape = self.costs.size(Value("tape", stage, m))
        return {"F": saved, "B": -saved, "I": tape - saved, "W": -tape}[kind]

    def claim(self, m: int, where: Sequence[int], step: int) -> Claim:
        """Return two dicts by rank: the memory that microbatch ``m`` still needs to finish, and the memory that it
        holds now.

        ``where``: the rank of every stage on its path, in order; ``step``: how many of its forwards and backwards
        have started. Memory is in units of ``costs.size``.

        The input of a postponed weight gradient (tape) counts only at the moment when it is stored. Later a rank can
        free this memory at any time, by running the weight gradient.
        """
        key = (m, step, *where)
        if key not in self.claims:
            length, level = len(where), dict.fromkeys(where, 0.0)
            saved = [self.change(m, i, "F") for i in range(length)]
            after = [self.change(m, i, self.backward) for i in range(length)]
            for i in range(min(step, 2 * length - step)):
                level[where[i]] += saved[i]
            held, peak = dict(level), dict(level)
            for k in range(step, 2 * length):
                i = min(k, 2 * length - 1 - k)
                r, forward = where[i], k < length
                peak[r] = max(peak[r], level[r] + (saved[i] if forward else after[i]))
                level[r] += saved[i] if forward else -saved[i]
            self.claims[key] = {r: peak[r] - held[r] for r in peak}, held
        return self.claims[key]

    def alone(self, m: int, where: Sequence[int]) -> bool:
        """Return whether microbatch ``m`` fits in memory if no other runs; ``where``: the rank of every stage on its
        path.
        """
        needs, _ = self.claim(m, where, 0)
        return self._fits(needs, self.limits)

    def _fits(self, needs: Mapping[int, float], free: Sequence[float]) -> bool:
        return all(need <= free[r] + EPS for r, need in needs.items())

    def safe(self, state: Iterable[tuple[int, Sequence[int], int]]) -> bool:
        """Return whether the ranks' memory lets the microbatches in ``state`` finish one after the other.

        Any order in which they can finish suffices; this is the test of the banker's algorithm. ``state``: for each
        microbatch that has begun, its number, the rank of every stage on its path, and how many of its forwards and
        backwards have started.
        """
        if min(self.limits) == inf:
            return True
        claims = list(starmap(self.claim, state))
        free = list(self.limits)
        for _, held in claims:
            for r, size in held.items():
                free[r] -= size
        while claims:
            able = next((c for c in claims if self._fits(c[0], free)), None)
            if able is None:
                return False
            claims.remove(able)
            for r, size in able[1].items():
                free[r] += size
        return True
