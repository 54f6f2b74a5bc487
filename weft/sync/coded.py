"""Gradients computed redundantly, so that the sum of all is known before the slowest ranks are done.

A *job* is a gradient that is wanted, the sum of the gradients of its *parts*, each of some samples. Time is divided
into *rounds*: job ``r`` is worked on from round ``r`` on, and must be known by round ``r + delay``. A code says which
parts of which jobs a rank adds up in a round, with which coefficients (:meth:`Code.tasks`), and how a job is decoded
from the results that came in time (:meth:`Code.decoding`). Both follow from whose results came in time in earlier
rounds, and from nothing else. Nothing here computes gradients or sends them; :mod:`weft.sync.arrivals` does.

Ranks are those of ``dp``. Sources: Tandon et al. 2017 (gradient coding), Krishnan et al. 2023 (the sequential codes).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import combinations, islice
from math import ceil
from typing import NamedTuple

import numpy as np

from weft.recipe import Resilience

#: For each round so far, the ranks whose results came in time.
Arrived = Sequence[Collection[int]]

#: Random coefficients are drawn so many times, and those are kept whose weights are smallest on so many sets of
#: arrivals: bad ones multiply rounding errors by thousands.
DRAWS, SETS = 100, 60
#: Largest error of a decoded sum's coefficients.
EXACT = 1e-8


class CodedTask(NamedTuple):
    """What a rank computes for a job in a round: the sum of some parts' gradients, each times a coefficient."""

    job: int
    parts: tuple[int, ...]
    coefficients: tuple[float, ...]


class Result(NamedTuple):
    """A result of a job, by who has sent it in which round."""

    rank: int
    round: int


@dataclass(frozen=True)
class Code(ABC):
    """A code for so many ``ranks``, of which ``stragglers`` may be late, and so many ``jobs`` in a step."""

    ranks: int
    stragglers: int
    jobs: int = 1

    @property
    @abstractmethod
    def parts(self) -> int:
        """The number of parts of a job."""

    @property
    @abstractmethod
    def delay(self) -> int:
        """Rounds after its first by which a job is known."""

    @abstractmethod
    def parts_of(self, rank: int) -> tuple[int, ...]:
        """All parts of a job that this rank may have to compute."""

    @abstractmethod
    def tasks(self, rank: int, number: int, arrived: Arrived) -> list[CodedTask]:
        """A rank's tasks in round ``number``, at most one for each job. ``arrived``: of the rounds before."""

    @abstractmethod
    def decoding(self, job: int, arrived: Arrived) -> dict[Result, float] | None:
        """The weights of the results whose sum is the job's gradient; None as long as too few have come."""


@dataclass(frozen=True)
class GradientCode(Code):
    """Gradient coding: a job per round, known as soon as all but ``stragglers`` ranks have sent their one sum."""

    @property
    def delay(self) -> int:
        return 0

    @property
    def parts(self) -> int:
        return self.ranks

    @cached_property
    def matrix(self) -> np.ndarray:
        """``[ranks, parts]``: the coefficients of what each rank sends."""
        return coefficients(self.ranks, self.stragglers)

    def parts_of(self, rank: int) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self.matrix[rank]).tolist())

    def task(self, rank: int, job: int) -> CodedTask:
        parts = self.parts_of(rank)
        return CodedTask(job, parts, tuple(self.matrix[rank, list(parts)].tolist()))

    def tasks(self, rank: int, number: int, arrived: Arrived) -> list[CodedTask]:
        return [self.task(rank, number)] if number < self.jobs else []

    def decoding(self, job: int, arrived: Arrived) -> dict[Result, float] | None:
        return self._decoded(
            Result(rank, job) for rank in (arrived[job] if job < len(arrived) else ())
        )

    def _decoded(self, results: Iterable[Result]) -> dict[Result, float] | None:
        """The weights of these results, at most one of each rank; None if they are too few."""
        found = sorted(results)
        weights = decoded(
            self.ranks, self.stragglers, tuple(result.rank for result in found)
        )
        return None if weights is None else dict(zip(found, weights, strict=True))


@dataclass(frozen=True)
class SelectiveRepetition(GradientCode):
    """SR-SGC: a weaker gradient code, whose missing results some ranks send ``burst`` rounds later, in place of others.

    Made for at most ``ranks_late`` different ranks that are late in any ``window`` rounds, each for at most ``burst``
    of them; ``stragglers`` follows from these.
    """

    burst: int = 1
    window: int = 2
    ranks_late: int = 1

    @property
    def delay(self) -> int:
        return self.burst

    def first(self, job: int, arrived: Arrived) -> list[Result]:
        """The results of a job that have come in its first round."""
        late = self.repeating_ranks(job, arrived)
        return [Result(rank, job) for rank in arrived[job] if rank not in late]

    def repeating_ranks(self, number: int, arrived: Arrived) -> list[int]:
        """The ranks that repeat, in round ``number``, what they owe the job of ``burst`` rounds before."""
        return self._repeating_ranks(number, tuple(map(frozenset, arrived[:number])))

    @lru_cache(4096)  # noqa: B019 - codes are few
    def _repeating_ranks(self, number: int, arrived: Arrived) -> list[int]:
        job = number - self.burst
        if not 0 <= job < self.jobs:
            return []
        have = self.first(job, arrived)
        last = arrived[number - 1]
        # Those that were in time last should be now.
        owing = sorted(
            set(range(self.ranks)) - {r.rank for r in have},
            key=lambda rank: (rank not in last, rank),
        )
        for count in range(len(owing) + 1):
            if (
                self._decoded(
                    [*have, *(Result(rank, number) for rank in owing[:count])]
                )
                is not None
            ):
                return owing[:count]
        return owing

    def tasks(self, rank: int, number: int, arrived: Arrived) -> list[CodedTask]:
        if rank in self.repeating_ranks(number, arrived):
            return [self.task(rank, number - self.burst)]
        return super().tasks(rank, number, arrived)

    def decoding(self, job: int, arrived: Arrived) -> dict[Result, float] | None:
        if job >= len(arrived):
            return None
        have, later = self.first(job, arrived), job + self.burst
        if later < len(arrived):
            have += [
                Result(rank, later)
                for rank in self.repeating_ranks(later, arrived)
                if rank in arrived[later]
            ]
        return self._decoded(have)


@dataclass(frozen=True)
class Multiplexed(Code):
    """M-SGC: most parts are one rank's own and in no code, and only what is worked on last is coded.

    A rank works on ``window - 1 + burst`` jobs in a round, a small task of each. Of a job the first ``window - 1`` are
    its own parts. Then it repeats what was late of these, and if there is no such thing, sends its sum of the next of
    ``burst`` groups of parts, each in a gradient code of its own.
    """

    burst: int = 1
    window: int = 2

    @property
    def delay(self) -> int:
        return self.window - 2 + self.burst

    @property
    def own(self) -> int:
        """Parts of a rank's own task: as many as in one of its coded sums."""
        return self.stragglers + 1

    @property
    def parts(self) -> int:
        return self.ranks * ((self.window - 1) * self.own + self.burst)

    @cached_property
    def code(self) -> GradientCode:
        """The code of a group of parts."""
        return GradientCode(self.ranks, self.stragglers)

    def own_task(self, rank: int, job: int, which: int) -> CodedTask:
        first = (rank * (self.window - 1) + which) * self.own
        return CodedTask(job, tuple(range(first, first + self.own)), (1.0,) * self.own)

    def coded_task(self, rank: int, job: int, group: int) -> CodedTask:
        before = self.ranks * ((self.window - 1) * self.own + group)
        _, parts, weights = self.code.task(rank, job)
        return CodedTask(job, tuple(before + part for part in parts), weights)

    def parts_of(self, rank: int) -> tuple[int, ...]:
        tasks = [self.own_task(rank, 0, which) for which in range(self.window - 1)]
        tasks += [self.coded_task(rank, 0, group) for group in range(self.burst)]
        return tuple(part for task in tasks for part in task.parts)

    def slots(self, rank: int, job: int, arrived: Arrived) -> list[int | None]:
        """For each of a job's rounds, which of the rank's own tasks it does there; None: the round's coded task."""
        found: list[int | None] = list(range(self.window - 1))
        done = {
            which
            for which in range(self.window - 1)
            if in_time(rank, job + which, arrived)
        }
        for slot in range(self.window - 1, self.delay + 1):
            owed = [which for which in range(self.window - 1) if which not in done]
            found.append(owed[0] if owed else None)
            if owed and in_time(rank, job + slot, arrived):
                done.add(owed[0])
        return found

    def tasks(self, rank: int, number: int, arrived: Arrived) -> list[CodedTask]:
        found = []
        for slot in range(self.delay + 1):
            if 0 <= (job := number - slot) < self.jobs:
                which = self.slots(rank, job, arrived)[slot]
                coded = (
                    self.coded_task(rank, job, slot - self.window + 1)
                    if which is None
                    else None
                )
                found.append(coded or self.own_task(rank, job, which or 0))
        return found

    def decoding(self, job: int, arrived: Arrived) -> dict[Result, float] | None:
        found: dict[Result, float] = {}
        groups: list[list[Result]] = [[] for _ in range(self.burst)]
        for rank in range(self.ranks):
            done = set()
            for slot, which in enumerate(self.slots(rank, job, arrived)):
                result = Result(rank, job + slot)
                if not in_time(rank, job + slot, arrived):
                    continue
                if which is None:
                    groups[slot - self.window + 1].append(result)
                elif which not in done:
                    done.add(which)
                    found[result] = 1.0
            if len(done) < self.window - 1:
                return None
        for group in groups:
            weights = self.code._decoded(group)
            if weights is None:
                return None
            found |= weights
        return found


def in_time(rank: int, number: int, arrived: Arrived) -> bool:
    return number < len(arrived) and rank in arrived[number]


@cache
def coefficients(ranks: int, late: int) -> np.ndarray:
    """Coefficients ``[ranks, parts]`` by which any ``ranks - late`` rows can be added up to a row of ones.

    Where ``late + 1`` divides the ranks, groups of so many ranks compute the same parts, as they are. Else a rank's
    parts are its own and the ``late`` that follow, and rows are orthogonal to ``late`` random ones that add up to 0.
    """
    width = late + 1
    if ranks % width == 0:
        return np.kron(np.eye(ranks // width), np.ones((width, width)))
    sets = list(islice(combinations(range(ranks), ranks - late), SETS))
    best, least = np.zeros(0), np.inf
    for seed in range(DRAWS):
        matrix = _cyclic(ranks, late, seed)
        weights = [solved(matrix, some) for some in sets]
        worst = (
            max(np.inf if one is None else float(np.abs(one).sum()) for one in weights)
            * np.abs(matrix).max()
        )
        if worst < least:
            best, least = matrix, worst
    return best


def _cyclic(ranks: int, late: int, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal((late, ranks))
    noise[:, -1] = -noise[:, :-1].sum(1)
    found = np.zeros((ranks, ranks))
    for rank in range(ranks):
        rest = [(rank + i) % ranks for i in range(1, late + 1)]
        found[rank, rank] = 1
        found[rank, rest] = -np.linalg.solve(noise[:, rest], noise[:, rank])
    return found


def solved(matrix: np.ndarray, rows: Sequence[int]) -> list[float] | None:
    """The numbers by which these rows add up to a row of ones; None if they cannot."""
    ones = np.ones(matrix.shape[1])
    found = np.linalg.lstsq(matrix[list(rows)].T, ones, rcond=None)[0]
    error = np.abs(found @ matrix[list(rows)] - ones).max()
    weights: list[float] = found.tolist()
    return weights if error < EXACT else None


@lru_cache(4096)
def decoded(ranks: int, late: int, rows: tuple[int, ...]) -> list[float] | None:
    """:func:`solved` of :func:`coefficients`."""
    return solved(coefficients(ranks, late), rows)


def code_of(words: Resilience, ranks: int) -> Code | None:
    """The code that a recipe asks for, over so many ranks; None if it asks for none, or if there is one rank."""
    late, burst, window, jobs = words.stragglers, words.burst, words.window, words.jobs
    if not words.code or ranks == 1:
        return None
    if words.code == "gradient":
        return GradientCode(ranks, late, jobs)
    if words.code == "m-sgc":
        return Multiplexed(ranks, late, jobs, burst, window)
    return SelectiveRepetition(
        ranks, ceil(burst * late / (window - 1 + burst)), jobs, burst, window, late
    )
