"""Partial pipelines: every microbatch passes a subset of the stages (SkipPipe, Blagoev et al. 2025, 2502.19913).

The paper's rules for paths: the first and last stages are always run, all others get their share of the microbatches,
and neighbouring stages may change places where that avoids a collision or shortens the trip. The list scheduler then
turns paths into a table. The planner here is Weft's own: first quotas, then paths by reservations of ranks and links.
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
# time until which a link is taken; (r, r): rank r itself
Booked = Mapping[tuple[int, int], float]

#: A stage is skipped between these multiples of the mean, so that slow stages are spared and all are trained.
LEAST_SKIPS, MOST_SKIPS = 0.5, 1.5

TINY = 1e-9

#: Candidates for one microbatch; with more subsets than this, a random sample.
CANDIDATES = 60

#: Plans differ in how strictly skips are spread over the step (``spread`` of :meth:`_Planner.paths`).
WEIGHTS = (8.0, 2.0, 1.0, 0.5)


def plan_paths(
    holders: Holders, microbatches: int, ratio: float, costs: Costs, split: bool = True
) -> list[Path]:
    """Plan for each microbatch which stages it passes and in which order, if microbatches may skip stages.

    Every path begins with the first stage and ends with the last. Between them a path may leave out stages, and may
    exchange two neighbouring ones. Several plans are made and simulated. The one with the shortest time of a step is
    returned, as a list of stage numbers for each microbatch.

    ``ratio``: share of all visits of microbatches to stages that are skipped; ``holders[s]``: ranks that may run stage
    ``s``; ``costs``: times of actions and transfers; ``split``: whether backward is split into input gradient and
    weight gradient. Raises :class:`UsageError` if ``ratio`` is larger than these rules allow.
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
        policy = Policy(ahead=1.5)
        table = list_schedule(
            "skip", holders, paths, costs, ranks=ranks, split=split, priority=policy
        )
        plans.setdefault(simulate(table, costs).makespan, paths)
    return plans[min(plans)]


def stage_lengths(stages: int, ratio: float) -> list[float]:
    """Return how many layers each of ``stages`` stages should have, relative to the mean of all stages.

    The mean of the result is 1. The first and the last stage run for every microbatch. The others are skipped by some
    microbatches, so they get more layers. With these lengths every stage computes equally much in a step on average.
    With equally long stages the first and the last would compute as much as without skipping, and the pipeline would be
    no faster.

    ``ratio``: share of all visits of microbatches to stages that are skipped.
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
        share = middle / MOST_SKIPS / stages
        most = f"skip at most {share:.0%}" if middle else "use more stages"
        raise UsageError(
            f"skipping {ratio:.0%} of {stages} stages leaves too little of the {middle} that may be skipped (the first "
            f"and the last are always run); {most}"
        )


@dataclass(frozen=True)
class _Planner:
    """The input of all plans; for the fields see :func:`plan_paths`."""

    holders: Holders
    costs: Costs
    split: bool

    def paths(
        self, microbatches: int, total: int, spread: float, random: Random
    ) -> list[Path]:
        """Choose for one microbatch after the other the path that ends first beside the paths chosen before.

        ``total``: stages that all microbatches skip together; ``spread``: weight, in units of a stage's time, of a
        stage's lag behind its share of skips.
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
        """Return the time of a rank on a stage, forward and backward."""
        actions = (Action(rank, kind, stage, 0) for kind in PASSES[self.split])
        return sum(map(self.costs.compute, actions)) or TINY

    def orders(self, path: Path) -> Iterator[Path]:
        """Generate the path, and then every path in which one pair of neighbours is exchanged."""
        yield path
        for i in range(1, len(path) - 2):
            yield (*path[:i], path[i + 1], path[i], *path[i + 2 :])

    def reserve(self, path: Path, booked: Booked) -> tuple[float, Booked]:
        """Return when a forward along this path ends, and the bookings of ranks and links after it.

        A visit books the time of the backward as well: in the steady state a rank runs one of each.
        """
        taken, time, at, value = dict(booked), 0.0, -1, Value("act", path[0], 0)
        for s in path:
            options = []
            for r in self.holders[s]:
                there = time
                if at not in (-1, r):
                    if self.costs.exclusive:
                        there = max(time, taken.get((at, r), 0.0))
                    there += self.costs.move(value, at, r)
                end = max(there, taken.get((r, r), 0.0)) + self.work(r, s)
                options.append((end, r, there))
            end, rank, there = min(options)
            taken[at, rank], taken[rank, rank] = there, end
            time = end - self.work(rank, s)
            time += self.costs.compute(Action(rank, "F", s, 0))
            at, value = rank, Value("act", s, 0)
        return time, taken


def _quotas(times: Sequence[float], total: int, microbatches: int) -> list[int]:
    """Return how often to skip each stage, such that the slowest computes as little as the bounds allow."""
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
    most_behind = sorted(range(len(times)), key=lambda s: quotas[s] - exact[s])
    for s in most_behind[: total - sum(quotas)]:
        quotas[s] += 1
    return quotas


def _subsets(able: list[int], count: int, random: Random) -> Iterable[tuple[int, ...]]:
    if comb(len(able), count) <= CANDIDATES:
        return combinations(able, count)
    return [tuple(sorted(random.sample(able, count))) for _ in range(CANDIDATES)]
