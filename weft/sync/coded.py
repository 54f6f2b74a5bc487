"""Gradients computed redundantly, so that the sum of all is known before the slowest ranks are done.

A *job* is a gradient that is wanted, the sum of the gradients of its *parts*, each of some samples. Time is divided
into *rounds*: job ``r`` is worked on from round ``r`` on, and must be known by round ``r + delay``. A code says which
parts of which jobs a rank adds up in a round, with which coefficients (:meth:`Code.tasks`), and how a job is decoded
from the results that came in time (:meth:`Code.decoding`). Both follow from whose results came in time in earlier
rounds, and from nothing else. Nothing here computes gradients or sends them; :mod:`weft.sync.arrivals` does.

Ranks are those of ``dp``. Sources: Tandon et al. 2017 (gradient coding), Krishnan et al. 2023 (the sequential codes).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import combinations, islice
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field, PositiveInt

from weft.registry import find
from weft.section import Section

if TYPE_CHECKING:
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
        """Return all parts of a job that this rank may have to compute."""

    @abstractmethod
    def tasks(self, rank: int, number: int, arrived: Arrived) -> list[CodedTask]:
        """Return a rank's tasks in round ``number``, at most one for each job. ``arrived``: of the rounds before."""

    @abstractmethod
    def decoding(self, job: int, arrived: Arrived) -> dict[Result, float] | None:
        """Return the weights of the results whose sum is the job's gradient; None as long as too few have come."""


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
        return tuple(self.matrix[rank].nonzero()[0].tolist())

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
        """Return the weights of these results, at most one of each rank; None if they are too few."""
        ordered = sorted(results)
        weights = code_weights(
            self.ranks, self.stragglers, tuple(result.rank for result in ordered)
        )
        return None if weights is None else dict(zip(ordered, weights, strict=True))


@cache
def coefficients(ranks: int, late: int) -> np.ndarray:
    """Coefficients ``[ranks, parts]`` by which any ``ranks - late`` rows can be added up to a row of ones.

    Where ``late + 1`` divides the ranks, groups of so many ranks compute the same parts, as they are. Else a rank's
    parts are its own and the ``late`` that follow, and rows are orthogonal to ``late`` random ones that add up to 0.
    """
    import numpy as np

    width = late + 1
    if ranks % width == 0:
        return np.kron(np.eye(ranks // width), np.ones((width, width)))
    sets = list(islice(combinations(range(ranks), ranks - late), SETS))
    best, least = np.zeros(0), np.inf
    for seed in range(DRAWS):
        matrix = _cyclic(ranks, late, seed)
        weights = [solved(matrix, some) for some in sets]
        worst = (
            max(np.inf if row is None else float(np.abs(row).sum()) for row in weights)
            * np.abs(matrix).max()
        )
        if worst < least:
            best, least = matrix, worst
    return best


def _cyclic(ranks: int, late: int, seed: int) -> np.ndarray:
    import numpy as np

    noise = np.random.default_rng(seed).standard_normal((late, ranks))
    noise[:, -1] = -noise[:, :-1].sum(1)
    matrix = np.zeros((ranks, ranks))
    for rank in range(ranks):
        rest = [(rank + i) % ranks for i in range(1, late + 1)]
        matrix[rank, rank] = 1
        matrix[rank, rest] = -np.linalg.solve(noise[:, rest], noise[:, rank])
    return matrix


def solved(matrix: np.ndarray, rows: Sequence[int]) -> list[float] | None:
    """Return the numbers by which these rows add up to a row of ones; None if they cannot."""
    import numpy as np

    ones = np.ones(matrix.shape[1])
    solution = np.linalg.lstsq(matrix[list(rows)].T, ones, rcond=None)[0]
    error = np.abs(solution @ matrix[list(rows)] - ones).max()
    weights: list[float] = solution.tolist()
    return weights if error < EXACT else None


@lru_cache(4096)
def code_weights(ranks: int, late: int, rows: tuple[int, ...]) -> list[float] | None:
    """:func:`solved` of :func:`coefficients`."""
    return solved(coefficients(ranks, late), rows)


def code_of(words: Resilience, ranks: int) -> Code | None:
    """Return the code that a recipe asks for, over so many ranks; None if it asks for none, or if there is one rank."""
    if not words.code or ranks == 1:
        return None
    code: Code = find("code", words.code).implementation(words, ranks)
    return code


class SequentialSettings(Section):
    """What sequential codes are set by."""

    burst: PositiveInt = Field(
        1,
        description="Most consecutive jobs (see 'jobs') in which the same rank may be late.",
    )
    window: int = Field(
        2,
        ge=2,
        description="Number of consecutive jobs in which at most 'stragglers' ranks may be late.",
    )
