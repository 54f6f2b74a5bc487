"""Gradient codes: gradients computed redundantly, so that their sum is known before the slowest ranks are done.

A *job* is a gradient that is wanted, the sum of the gradients of its *parts*, each of some samples. Time is divided
into *rounds*: job ``r`` is worked on from round ``r`` on, and must be known by round ``r + delay``. A code says which
parts of which jobs a rank adds up in a round, with which coefficients (:meth:`Code.tasks`), and how a job is decoded
from the results that came in time (:meth:`Code.decoding`). Both depend only on which ranks' results came in time in
earlier rounds. This module neither computes nor sends gradients; :mod:`weft.sync.arrivals` does.

Ranks are those along ``dp``. Sources: Tandon et al. 2017 (gradient coding), Krishnan et al. 2023 (the sequential
codes).
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
    """Task of a rank in a round of gradient coding: to compute a weighted sum of gradients.

    ``job``: number of the gradient that is to be computed. ``parts``: the groups of samples, within the job, whose
    gradients are summed. ``coefficients``: the weight of each of ``parts``.
    """

    job: int
    parts: tuple[int, ...]
    coefficients: tuple[float, ...]


class Result(NamedTuple):
    """Identifies one rank's result for a job: the rank that sent the result, and the round in which it was sent."""

    rank: int
    round: int


@dataclass(frozen=True)
class Code(ABC):
    """Gradient code for the ranks along ``dp``: which gradients each rank computes, and how their sum is decoded.

    ``ranks``: the number of ranks; ``stragglers``: how many of them may be late; ``jobs``: the number of jobs per step.
    A job is one gradient that is to be computed; the step's gradient is the sum over its jobs.
    """

    ranks: int
    stragglers: int
    jobs: int = 1

    @property
    @abstractmethod
    def parts(self) -> int:
        """Number of parts into which the samples of a job (one gradient that is to be computed) are divided."""

    @property
    @abstractmethod
    def delay(self) -> int:
        """Largest number of rounds after the round in which a job begins until the gradient of the job is decoded."""

    @abstractmethod
    def parts_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of all parts of a job (one gradient that is to be computed) that ``rank`` may have to
        compute.
        """

    @abstractmethod
    def tasks(self, rank: int, number: int, arrived: Arrived) -> list[CodedTask]:
        """Return the tasks of ``rank`` in round ``number``, at most one per job.

        ``arrived``: for each earlier round, the ranks whose results came in time.
        """

    @abstractmethod
    def decoding(self, job: int, arrived: Arrived) -> dict[Result, float] | None:
        """Return the weight of each result in the gradient of ``job``; None while too few results have come.

        ``arrived``: for each round so far, the ranks whose results came in time.
        """


@dataclass(frozen=True)
class GradientCode(Code):
    """Gradient coding: one job (a gradient that is wanted) per round.

    A job is known as soon as all but ``stragglers`` ranks have sent their sum.
    """

    @property
    def delay(self) -> int:
        return 0

    @property
    def parts(self) -> int:
        return self.ranks

    @cached_property
    def matrix(self) -> np.ndarray:
        """Coefficients ``[ranks, parts]`` with which each rank sums the gradients of the parts; see
        :func:`coefficients`.
        """
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
        """Return the weights of these results, at most one per rank, or None if they are too few."""
        ordered = sorted(results)
        weights = code_weights(
            self.ranks, self.stragglers, tuple(result.rank for result in ordered)
        )
        return None if weights is None else dict(zip(ordered, weights, strict=True))


@cache
def coefficients(ranks: int, late: int) -> np.ndarray:
    """Return coefficients ``[ranks, parts]`` of a gradient code that tolerates ``late`` late ranks.

    Row ``r`` has the weights with which rank ``r`` sums the gradients of the parts; a part is a group of samples. Any
    ``ranks - late`` rows can be combined into a row of ones, so that the results of as many ranks give the sum over all
    parts (Tandon et al. 2017). If ``late + 1`` divides the number of ranks, groups of ``late + 1`` ranks compute the
    same parts with coefficients of 1. Otherwise each rank computes the part with its own number and the next ``late``
    parts, and all rows are orthogonal to ``late`` random rows. Each of these random rows adds up to 0.
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
    """Return the factors with which the given ``rows`` of ``matrix`` add up to a row of ones; None if no factors do.

    ``matrix``: the coefficients ``[ranks, parts]`` of a code; ``rows``: the ranks whose results have come.
    """
    import numpy as np

    ones = np.ones(matrix.shape[1])
    solution = np.linalg.lstsq(matrix[list(rows)].T, ones, rcond=None)[0]
    error = np.abs(solution @ matrix[list(rows)] - ones).max()
    weights: list[float] = solution.tolist()
    return weights if error < EXACT else None


@lru_cache(4096)
def code_weights(ranks: int, late: int, rows: tuple[int, ...]) -> list[float] | None:
    """Return the factors with which the results of some ranks add up to the sum of the gradients of all parts.

    ``ranks``: number of ranks of the code (:func:`coefficients`); ``late``: how many of them may be late; ``rows``: the
    ranks whose results have come. Returns one factor for each of ``rows``; None if these are too few.
    """
    return solved(coefficients(ranks, late), rows)


def code_of(words: Resilience, ranks: int) -> Code | None:
    """Return the gradient code that the setting ``resilience.code`` names, for ``ranks`` ranks.

    ``words``: the recipe's section ``[resilience]``. Returns None if it names no code, or if there is only one rank.
    """
    if not words.code or ranks == 1:
        return None
    code: Code = find("code", words.code).implementation(words, ranks)
    return code


class SequentialSettings(Section):
    """Settings of sequential gradient codes (Krishnan et al. 2023). With these a gradient may be decoded only in a
    later round than the one in which its computation began.
    """

    burst: PositiveInt = Field(
        1,
        description=(
            "Largest number of jobs, among any 'window' consecutive ones, in which the same rank may be late. A "
            "job is a part of a step (see resilience.jobs)."
        ),
    )
    window: int = Field(
        2,
        ge=2,
        description=(
            "Number of consecutive jobs in which at most resilience.stragglers ranks may be late, each in at "
            "most 'burst' of them. A job is a part of a step (see resilience.jobs)."
        ),
    )
