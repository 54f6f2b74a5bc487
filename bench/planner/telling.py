"""Which published jobs can tell their layouts apart. Only rows are compared with rows; no prediction is looked at.

A job is one model on one cluster with one batch, run in several layouts. The rows of a layout count as one, with their
median. What rows cannot tell is known from rows as well:

``noise``  nine tenths of the pairs of rows of one layout, published apart, differ by less; half a unit of the third
           digit where a source repeats nothing. A job tells if its median layout is slower than its best by more.
``odd``    where layouts of several jobs differ in the same settings (say, microbatches of two sequences in place of
           one), their times differ by about the same ratio. A layout is odd if most of its ratios are further from the
           median ratio of the source than three standard deviations, by median deviations and by repeats alike. That is
           the limit beyond which ``correction.py`` calls a run gone wrong. An odd layout is left out of its job.

Times that are sums of pieces (``evaluate.composed``) tell nothing of steps, and are left out as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, fields
from itertools import combinations
from math import exp, log
from statistics import median
from typing import NamedTuple

import numpy as np
from evaluate import composed
from numpy.typing import NDArray

from weft.planner.cost import Plan
from weft.planner.fit import Measurement

Array = NDArray[np.float64]
#: Share of repeats that differ by less than the noise; noise of a source without repeats.
REPEATS, DIGITS = 0.9, 0.005
#: Pairs that must differ in the same settings for one of them to be odd, and how many median deviations away it is.
PAIRS, ODD = 5, 3 * 1.48
#: Layouts of a job that :func:`evaluate.regrets` asks for.
LEAST = 4

#: Of a job, the numbers of the rows of each layout.
Layouts = dict[Plan, list[int]]


class Job(NamedTuple):
    """A job of at least :data:`LEAST` layouts.

    ``layouts``: rows by layout; ``odd``: its odd layouts; ``gap``: by how much its median layout is slower than its
    best, odd ones left out; ``noise``: of its source; ``ran``: whether the source's times are those of steps.
    """

    layouts: Layouts
    odd: list[Plan]
    gap: float
    noise: float
    ran: bool

    @property
    def kept(self) -> Layouts:
        """The layouts that are not odd."""
        return {plan: i for plan, i in self.layouts.items() if plan not in self.odd}

    @property
    def tells(self) -> bool:
        return self.ran and self.gap > self.noise and wide(self.kept)


class Choice(NamedTuple):
    """The layout of a job that is predicted fastest, and how much slower it is than the best, in percent.

    ``among_all``: the same where odd layouts may be chosen.
    """

    layout: Plan
    regret: float
    among_all: float


def layouts_of(rows: Sequence[Measurement]) -> list[Layouts]:
    """Group the rows of a source by job and layout."""
    found: dict[tuple[object, ...], Layouts] = {}
    for i, row in enumerate(rows):
        key = (row.form, row.device, row.bits, row.plan.world, row.plan.batch)
        found.setdefault(key, {}).setdefault(row.plan, []).append(i)
    return list(found.values())


def wide(layouts: Layouts) -> bool:
    """Return whether a job has enough layouts, as :func:`evaluate.regrets` counts them."""
    kinds = {(p.tp, p.pp, p.micro_batch, p.virtual, p.schedule) for p in layouts}
    return len(kinds) >= LEAST


def seconds(rows: Sequence[Measurement], at: Sequence[int]) -> float:
    return median(float(rows[i].seconds or 0) for i in at)


def repeats(rows: Sequence[Measurement]) -> list[float]:
    """Return the differences of repeated runs, as logarithms. A time that is published twice is one run."""
    differences = []
    for layouts in layouts_of(rows):
        for at in layouts.values():
            times = sorted({float(rows[i].seconds or 0) for i in at})
            differences += [log(b / a) for a, b in combinations(times, 2)]
    return differences


def changed(a: Plan, b: Plan) -> tuple[tuple[str, float, float], ...]:
    """Return the settings in which two layouts differ, with both values."""
    pairs = ((f.name, getattr(a, f.name), getattr(b, f.name)) for f in fields(Plan))
    return tuple(each for each in pairs if each[1] != each[2])


def odd_layouts(rows: Sequence[Measurement]) -> set[tuple[int, Plan]]:
    """Return the odd layouts of a source, each with the number of its job in :func:`layouts_of`."""
    pairs = defaultdict(list)
    for number, layouts in enumerate(layouts_of(rows)):
        times = {plan: seconds(rows, at) for plan, at in layouts.items()}
        for a, b in combinations(sorted(times, key=astuple), 2):
            pairs[changed(a, b)].append((number, a, b, log(times[b] / times[a])))
    least = ODD * median(repeats(rows) or [DIGITS])
    votes = defaultdict[tuple[int, Plan], list[bool]](list)
    for alike in pairs.values():
        if len(alike) < PAIRS:
            continue
        middle = median(ratio for *_, ratio in alike)
        usual = median(abs(ratio - middle) for *_, ratio in alike)
        for number, a, b, ratio in alike:
            away = abs(ratio - middle) > max(ODD * usual, least)
            votes[number, a].append(away)
            votes[number, b].append(away)
    return {layout for layout, each in votes.items() if sum(each) > len(each) / 2}


def jobs(rows: Sequence[Measurement]) -> list[Job]:
    """Return the jobs of a source with enough layouts, with what their rows can tell."""
    noise, ran = DIGITS, not composed(rows)
    if differences := repeats(rows):
        noise = exp(float(np.quantile(differences, REPEATS))) - 1
    odd, found = odd_layouts(rows), []
    for number, layouts in enumerate(layouts_of(rows)):
        if not wide(layouts):
            continue
        strange = [plan for plan in layouts if (number, plan) in odd]
        times = [seconds(rows, at) for p, at in layouts.items() if p not in strange]
        gap = median(times) / min(times) - 1 if times else 0.0
        found.append(Job(layouts, strange, gap, noise, ran))
    return found


def choice(rows: Sequence[Measurement], job: Job, predicted: Array) -> Choice:
    """Return what a prediction of every row chooses in a job."""

    def first(layouts: Layouts) -> tuple[Plan, float]:
        plan = min(layouts, key=lambda p: float(np.mean(predicted[layouts[p]])))
        times = {p: seconds(rows, at) for p, at in layouts.items()}
        return plan, 100 * (times[plan] / min(times.values()) - 1)

    plan, regret = first(job.kept or job.layouts)
    return Choice(plan, regret, first(job.layouts)[1])
