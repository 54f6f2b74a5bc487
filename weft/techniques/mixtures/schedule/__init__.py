"""Schedule: weights of the sources that are set for moments of the run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from pydantic import Field

from weft.data.mix_plan import MixFacts, weights_by_name
from weft.errors import UsageError
from weft.registry import register
from weft.section import Section


class MixPoint(Section):
    """An entry of a schedule of weights: the weights of the data sources from a moment of the run on."""

    at: int | float = Field(
        ge=0,
        description=(
            "Moment of the run: a whole number is a step, any other number a share of the run, such as 0.5."
        ),
    )
    weights: tuple[float, ...] | dict[str, float] = Field(
        description=(
            "Weight of each source, in the order of data.sources or by name; a source that is not named has none."
        )
    )


class ScheduleSettings(Section):
    """Settings of a mixture of data sources whose weights follow a schedule."""

    mix_schedule: tuple[MixPoint, ...] = Field(
        (),
        description=(
            "Weights of the sources at moments of the run, such as [{ at = 0, weights = [9, 1] }, { at = 0.8, "
            "weights = [1, 1] }]. 'at' is a step if it is a whole number, otherwise a share of the run; 'weights' "
            "has a number for each source, in their order."
        ),
    )
    mix_between: Literal["linear", "stepped"] = Field(
        "linear",
        description=(
            "Weights between two moments of mix_schedule. 'linear': they change in a straight line; 'stepped': they "
            "stay the same until the next moment."
        ),
    )


@register(
    "mixture",
    "schedule",
    settings=ScheduleSettings,
    draws={
        "mix_schedule": (
            [{"at": 0, "weights": [3, 1]}, {"at": 2, "weights": [1, 2]}],
            [{"at": 0.0, "weights": [1, 0]}, {"at": 0.5, "weights": [1, 1]}],
        ),
        "mix_between": ("linear", "stepped"),
    },
    title="Weights by a schedule",
    paper="curriculum and annealing mixtures, as in OLMo et al. 2025 (2501.00656)",
    recipe="mixture.toml --set data.mix=schedule --set data.mix_schedule=[{at=0,weights=[3,1]},{at=20,weights=[1,3]}]",
    proof="tests/data/test_mixtures.py, tests/train/test_mix_run.py",
    figure="shares to within one sample of their integral at the end of every block; every layout equals one device",
)
class Schedule:
    """Mixture of data sources whose shares are given for some moments of the run. Between two moments they change in a
    straight line or stay.
    """

    @classmethod
    def describe(cls, data: Any, facts: MixFacts) -> dict[str, Any]:
        settings = data.own(ScheduleSettings)
        points = settings.mix_schedule
        if not points:
            raise UsageError(
                "data.mix = 'schedule' has no weights; set data.mix_schedule = [{ at = 0, weights = [...] }, ...]"
            )
        if points[0].at != 0:
            raise UsageError(
                f"data.mix_schedule has a gap: it begins at {points[0].at}, and nothing is set before; set at = 0"
            )
        shared = [p.at for p in points if isinstance(p.at, float)]
        if shared and (max(shared) > 1 or not facts.steps):
            why = f"at = {max(shared)} is a share of the run above 1" * (
                max(shared) > 1
            )
            raise UsageError(
                f"data.mix_schedule: {why or 'shares of a run need its length, train.steps'}; name steps, whole numbers"
            )
        samples = [0, *(facts.sample(p.at) for p in points[1:])]
        for before, after, point in zip(samples, samples[1:], points[1:], strict=False):
            if before >= after and facts.begun == 0:
                raise UsageError(
                    f"data.mix_schedule: at = {point.at} does not come after the moment before it; put them in order"
                )
        shares = []
        for point in points:
            weights = weights_by_name(
                point.weights, facts, f"data.mix_schedule, at = {point.at}"
            )
            shares.append([w / sum(weights) for w in weights])
        return {
            "samples": samples,
            "points": shares,
            "between": settings.mix_between,
            "block": facts.block,
        }

    def __init__(self, about: Mapping[str, Any]) -> None:
        self.samples, self.points = about["samples"], about["points"]
        self.linear = about["between"] == "linear"

    def shares(self, first: int, last: int) -> Sequence[float]:
        edges = [first, *(s for s in self.samples if first < s < last), last]
        summed = [0.0] * len(self.points[0])
        for begin, end in pairwise(edges):
            for i, share in enumerate(self._within(begin, end)):
                summed[i] += share * (end - begin)
        return [share / (last - first) for share in summed]

    def _within(self, begin: int, end: int) -> Sequence[float]:
        """Return the mean shares from sample ``begin`` to ``end``, between which no moment of the schedule lies."""
        at = bisect_right(self.samples, begin) - 1
        here: Sequence[float] = self.points[at]
        if not self.linear or at + 1 == len(self.points):
            return here
        there = self.points[at + 1]
        length = self.samples[at + 1] - self.samples[at]
        moved = ((begin + end) / 2 - self.samples[at]) / length
        return [a + (b - a) * moved for a, b in zip(here, there, strict=True)]
