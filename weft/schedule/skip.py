"""Partial pipelines: every microbatch passes a subset of the stages (SkipPipe, Blagoev et al. 2025, 2502.19913).

What the paper asks of the paths: the first and last stages are always run, all others get their share of the
microbatches, and neighbouring stages may change places where that avoids a collision or shortens the trip. The list
scheduler then turns paths into a table. The planner here is our own: quotas first, paths against a reservation second.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from random import Random

from weft.errors import UsageError
from weft.schedule.actions import PASSES, Action, Value
from weft.schedule.build.greedy import list_schedule
from weft.schedule.build.listing import Policy
from weft.schedule.simulate import Costs, simulate

Path = tuple[int, ...]
Holders = Sequence[Sequence[int]]
# until when a link is taken; (r, r): rank r itself
Booked = Mapping[tuple[int, int], float]

#: A stage is skipped between these multiples of the mean, so that slow stages are spared and all are trained.
LEAST_SKIPS, MOST_SKIPS = 0.5, 1.5

TINY = 1e-9

#: Candidates for one microbatch; with more subsets than this, a random sample.
CANDIDATES = 60

#: Plans differ in how strictly skips are spread over the step (see :meth:`_Trip.paths`).
WEIGHTS = (8.0, 2.0, 1.0, 0.5)


def plan_paths(
    holders: Holders, microbatches: int, ratio: float, costs: Costs, split: bool = True
) -> list[Path]:
    """A path for every microbatch that skips the share ``ratio`` of all stages on average.

    ``holders[s]``: ranks that may run stage ``s``. The first and the last stage are always run and never moved; of the
    others a path may exchange one pair of neighbours. The best of a few plans by the simulated makespan. ``ratio`` 0
    gives the full pipeline. Raises :class:`UsageError` if too few stages may be skipped.
    """
    stages = len(holders)
    total = round(ratio * stages * microbatches)
    if not total:
        return [tuple(range(stages))] * microbatches
    _check(stages, ratio)
    ranks = 1 + max(r for able in holders for r in able)
    planner = _Planner(holders, costs, split)
    plans: dict[float, list[Path]] = {}  # by makespan
    for spread in WEIGHTS:
        paths = planner.paths(microbatches, total, spread, Random(0))
        table = list_schedule(
            "skip",
            holders,
            paths,
            costs,
            ranks=ranks,
            split=split,
            priority=Policy(ahead=1.5),
        )
        plans.setdefault(simulate(table, costs).makespan, paths)
    return plans[min(plans)]


def stage_lengths(stages: int, ratio: float) -> list[float]:
    """Length of every stage (mean 1) such that all compute the same on average.

    Stages that are always run must be shorter: with stages of equal length they would compute as much as without
    skipping, and the pipeline would be no faster than them.
    """
    _check(stages, ratio)
    middle = stages - 2
    # share of the microbatches that a middle stage sees
    run = 1 - ratio * stages / middle
    length = stages / (2 * run + middle)
    return [length * run, *[length] * middle, length * run]


def _check(stages: int, ratio: float) -> None:
    middle = max(0, stages - 2)
    if not 0 <= ratio * stages <= middle / MOST_SKIPS:
        most = (
            f"skip at most {middle / MOST_SKIPS / stages:.0%}"
            if middle
            else "use more stages"
        )
        raise UsageError(
            f"skipping {ratio:.0%} of {stages} stages leaves too little of the {middle} that may be skipped (the first "
            f"and the last are always run); {most}"
        )


@dataclass(frozen=True)
class _Planner:
    """What all plans have in common; for the fields see :func:`plan_paths`."""

    holders: Holders
    costs: Costs
    split: bool

    def paths(
        self, microbatches: int, total: int, spread: float, random: Random
    ) -> list[Path]:
        """Microbatch by microbatch, the path that ends first on ranks and links reserved by those before it.

        ``total``: stages to be skipped by all together; ``spread``: how much being behind its share of skips speaks
        for skipping a stage now, in units of a stage's time.
        """
        stages = range(len(self.holders))
        middle = stages[1:-1]
        times = [1 / sum(1 / self.work(r, s) for r in self.holders[s]) for s in middle]
        # skips to come, by stage
        left = dict(zip(middle, _quotas(times, total, microbatches), strict=True))
        unit = spread * sum(times) / len(times)
        booked: Booked = {}
        paths = []
        for m in range(microbatches):
            rest = microbatches - m
            forced = [s for s in middle if left[s] == rest]
            able = [s for s in middle if 0 < left[s] < rest]
            count = (
                total * (m + 1) // microbatches
                - total * m // microbatches
                - len(forced)
            )
            best: tuple[float, Path, Booked] | None = None
            for chosen in _subsets(able, count, random):
                path = tuple(s for s in stages if s not in chosen and s not in forced)
                due = sum(left[s] for s in chosen) / rest
                for order in self.orders(path):
                    end, then = self.reserve(order, booked)
                    if best is None or end - unit * due < best[0] - TINY:
                        best = end - unit * due, order, then
            assert best is not None
            _, path, booked = best
            paths.append(path)
            for s in middle:
                left[s] -= s not in path
        return paths

    def work(self, rank: int, stage: int) -> float:
        """Time of a rank on a stage, forward and backward."""
        return (
            sum(
                self.costs.compute(Action(rank, kind, stage, 0))
                for kind in PASSES[self.split]
            )
            or TINY
        )

    def orders(self, path: Path) -> Iterator[Path]:
        """The path, then all with one pair of neighbours exchanged that may move."""
        yield path
        for i in range(1, len(path) - 2):
            yield (*path[:i], path[i + 1], path[i], *path[i + 2 :])

    def reserve(self, path: Path, booked: Booked) -> tuple[float, Booked]:
        """When a forward along this path ends, and what is then booked of ranks and links.

        A visit books the time of the backward as well: in the steady state a rank does one of each.
        """
        taken, time, at, value = dict(booked), 0.0, -1, Value("act", path[0], 0)
        for s in path:
            options = []
            for r in self.holders[s]:
                there = time
                if at not in (-1, r):
                    there = (
                        max(time, taken.get((at, r), 0.0))
                        if self.costs.exclusive
                        else time
                    )
                    there += self.costs.move(value, at, r)
                options.append(
                    (max(there, taken.get((r, r), 0.0)) + self.work(r, s), r, there)
                )
            end, rank, there = min(options)
            taken[(at, rank)], taken[(rank, rank)] = there, end
            time = (
                end - self.work(rank, s) + self.costs.compute(Action(rank, "F", s, 0))
            )
            at, value = rank, Value("act", s, 0)
        return time, taken


def _quotas(times: Sequence[float], total: int, microbatches: int) -> list[int]:
    """How often to skip each stage such that the slowest computes as little as the bounds allow."""
    mean = total / microbatches / len(times)
    low, high = LEAST_SKIPS * mean, min(1.0, MOST_SKIPS * mean)

    def shares(target: float) -> list[float]:
        return [min(high, max(low, 1 - target / t)) for t in times]

    a, b = 0.0, max(times)
    for _ in range(60):
        target = (a + b) / 2
        a, b = (target, b) if sum(shares(target)) > mean * len(times) else (a, target)
    exact = [microbatches * x for x in shares(b)]
    quotas = [int(x + 1e-6) for x in exact]
    for s in sorted(range(len(times)), key=lambda s: (quotas[s] - exact[s], s))[
        : total - sum(quotas)
    ]:
        quotas[s] += 1
    return quotas


def _subsets(able: list[int], count: int, random: Random) -> Iterable[tuple[int, ...]]:
    if comb(len(able), count) <= CANDIDATES:
        return combinations(able, count)
    return [tuple(sorted(random.sample(able, count))) for _ in range(CANDIDATES)]
