"""Multiplexed sequential gradient coding (M-SGC, Krishnan et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from weft.refusal import Rule
from weft.registry import register
from weft.sync.coded import (
    Arrived,
    Code,
    CodedTask,
    GradientCode,
    Result,
    SequentialSettings,
)

if TYPE_CHECKING:
    from weft.recipe import Resilience


#: A window must be longer than a burst.
SHORT_BURSTS = Rule(
    "bursts beyond the window",
    "resilience",
    lambda a: a.resilience.burst >= a.resilience.window,
    "resilience.burst = {0.resilience.burst} does not go with window = {0.resilience.window}",
    "make window - 1 a multiple of burst",
)


@dataclass(frozen=True)
class Multiplexed(Code):
    """M-SGC: each rank computes most parts of a job alone (uncoded), and only the last parts in a gradient code.

    A job is the gradient of some samples, computed in parts. A task is the parts that a rank computes in one round for
    one job. A job takes ``window - 1 + burst`` rounds, with one task of each rank in every round. A new job begins in
    every round, so that a rank works on several jobs in the same round.

    In the first ``window - 1`` rounds of a job a rank computes parts that no other rank computes. In the last ``burst``
    rounds it repeats those of its tasks whose results arrived late. If none is left to repeat, it computes a coded task
    instead: parts that several ranks compute, of which it sends a weighted sum.

    ``burst``, ``window``: a rank may be late in at most ``burst`` of any ``window`` successive rounds.
    """

    burst: int = 1
    window: int = 2

    @property
    def delay(self) -> int:
        return self.window - 2 + self.burst

    @property
    def own(self) -> int:
        """Number of parts in a task: the parts that a rank computes in one round for a job."""
        return self.stragglers + 1

    @property
    def parts(self) -> int:
        return self.ranks * ((self.window - 1) * self.own + self.burst)

    @cached_property
    def code(self) -> GradientCode:
        """The gradient code of the coded tasks of a job. The results of all ranks but ``stragglers`` suffice to decode
        the sum of the gradients of these tasks' parts.
        """
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
        """Return the tasks of ``rank`` in the rounds of the job number ``job``, in their order. An entry is the index
        of an uncoded task, or None for a coded one.

        The job begins in the round of the same number. ``arrived``: for each round of the run, the ranks whose results
        arrived in time.
        """
        jobs: list[int | None] = list(range(self.window - 1))
        done = {
            which
            for which in range(self.window - 1)
            if in_time(rank, job + which, arrived)
        }
        for slot in range(self.window - 1, self.delay + 1):
            owed = [which for which in range(self.window - 1) if which not in done]
            jobs.append(owed[0] if owed else None)
            if owed and in_time(rank, job + slot, arrived):
                done.add(owed[0])
        return jobs

    def tasks(self, rank: int, number: int, arrived: Arrived) -> list[CodedTask]:
        tasks = []
        for slot in range(self.delay + 1):
            if 0 <= (job := number - slot) < self.jobs:
                which = self.slots(rank, job, arrived)[slot]
                coded = (
                    self.coded_task(rank, job, slot - self.window + 1)
                    if which is None
                    else None
                )
                tasks.append(coded or self.own_task(rank, job, which or 0))
        return tasks

    def decoding(self, job: int, arrived: Arrived) -> dict[Result, float] | None:
        weighted: dict[Result, float] = {}
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
                    weighted[result] = 1.0
            if len(done) < self.window - 1:
                return None
        for group in groups:
            weights = self.code._decoded(group)
            if weights is None:
                return None
            weighted |= weights
        return weighted


def in_time(rank: int, number: int, arrived: Arrived) -> bool:
    return number < len(arrived) and rank in arrived[number]


@register(
    "code",
    "m-sgc",
    settings=SequentialSettings,
    rules=(SHORT_BURSTS,),
    title="Multiplexed sequential gradient coding (M-SGC)",
    paper="Krishnan et al. 2023",
    recipe="coded.toml --set resilience.code=m-sgc --set resilience.jobs=4",
    proof="tests/sync/test_coded.py",
    figure=(
        "exact from every pattern that it is made for; the load of the paper (0.085 "
        "where plain coding has 0.31); on 8 ranks that sleep 1.26x plain coding where"
        " ranks become slow one by one, 1.86x where hosts of two do "
        "(`bench/coded.py`)"
    ),
)
def multiplexed(settings: Resilience, ranks: int) -> Multiplexed:
    """Return the code M-SGC for ``ranks`` data parallel ranks, with the settings of section ``[resilience]`` (Krishnan
    et al. 2023).
    """
    own = settings.own(SequentialSettings)
    return Multiplexed(ranks, settings.stragglers, settings.jobs, own.burst, own.window)
