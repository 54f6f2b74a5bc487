"""Sequential gradient coding by selective repetition (SR-SGC, Krishnan et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING

from weft.refusal import Rule
from weft.registry import register
from weft.sync.coded import Arrived, CodedTask, GradientCode, Result, SequentialSettings

if TYPE_CHECKING:
    from weft.recipe import Resilience


#: Repetitions must fit whole into what is left of a window.
WHOLE_BURSTS = Rule(
    "bursts that do not fit the window",
    "resilience",
    lambda a: (
        a.resilience.burst >= a.resilience.window
        or (a.resilience.window - 1) % a.resilience.burst > 0
    ),
    "resilience.burst = {0.resilience.burst} does not go with window = {0.resilience.window}",
    "make window - 1 a multiple of burst",
)


@dataclass(frozen=True)
class SelectiveRepetition(GradientCode):
    """SR-SGC: a gradient code whose ranks compute missing results again later, so that a weaker code suffices. A job is
    the gradient of some samples, and a new job begins in each round. A result is a weighted sum of gradients that a
    rank computes for a job. When too few results of a job have arrived in time, some ranks compute a missing one
    ``burst`` rounds after the job began. In that round they compute none for the new job. ``burst``, ``window``,
    ``ranks_late``: in any ``window`` successive rounds at most ``ranks_late`` different ranks may be late, each in
    at most ``burst`` rounds. From these numbers follows ``stragglers``, the number of late ranks that the code
    tolerates in a round.
    """

    burst: int = 1
    window: int = 2
    ranks_late: int = 1

    @property
    def delay(self) -> int:
        return self.burst

    def first(self, job: int, arrived: Arrived) -> list[Result]:
        """Return the results of the job number ``job`` that arrived in the round of the same number, in which the job
        begins.

        Ranks that repeated an earlier job in that round have no such result. ``arrived``: for each round, the ranks
        whose results arrived in time.
        """
        late = self.repeating_ranks(job, arrived)
        return [Result(rank, job) for rank in arrived[job] if rank not in late]

    def repeating_ranks(self, number: int, arrived: Arrived) -> list[int]:
        """Return the ranks that compute an old job in round ``number`` in place of the new job of this round.

        The old job is the one that began ``burst`` rounds earlier. ``arrived``: for each round, the ranks whose results
        arrived in time.
        """
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


@register(
    "code",
    "sr-sgc",
    settings=SequentialSettings,
    rules=(WHOLE_BURSTS,),
    title="Sequential gradient coding by selective repetition (SR-SGC)",
    paper="Krishnan et al. 2023",
    recipe="coded.toml --set resilience.code=sr-sgc --set resilience.jobs=4",
    proof="tests/sync/test_coded.py",
    figure=(
        "exact from every pattern that it is made for; the load of the paper; as fast"
        " as plain coding on ranks that sleep (`bench/coded.py`)"
    ),
)
def selective_repetition(settings: Resilience, ranks: int) -> SelectiveRepetition:
    """Return the SR-SGC code for ``ranks`` data parallel ranks (Krishnan et al. 2023). It has the least redundancy that
    tolerates as many late ranks as ``settings``, the section ``[resilience]`` of the recipe, allows for.
    """
    own, late = settings.own(SequentialSettings), settings.stragglers
    weaker = ceil(own.burst * late / (own.window - 1 + own.burst))
    return SelectiveRepetition(
        ranks, weaker, settings.jobs, own.burst, own.window, late
    )
