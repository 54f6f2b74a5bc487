"""1F1B (Narayanan et al. 2019, 2021): each rank alternates one forward and one backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.registry import register
from weft.schedule.builder import Number, ScheduleBuilder, ramp

if TYPE_CHECKING:
    from weft.schedule.actions import Order
    from weft.schedule.times import Times


@register(
    "schedule",
    "1f1b",
    title="1F1B",
    paper="Narayanan et al. 2019, 2021",
    recipe="pipeline.toml",
    proof="tests/parallel/test_pipeline.py, tests/schedule/test_build.py",
    figure="published bubbles to 4 decimals",
)
class OneForwardOneBackward(ScheduleBuilder):
    """Alternates forward and backward (Narayanan et al. 2019, 2021). Rank ``r`` of ``P`` holds the activations of at
    most ``P - r`` microbatches.
    """

    about = "forward and backward in turn, peak P"
    paper = "2104.04473"
    falls = 1
    place = 0

    def orders(
        self, ranks: int, microbatches: int, chunks: int, times: Times
    ) -> Sequence[Order]:
        from weft.schedule.build.turns import alternate

        return [
            alternate(["F", "B"], r, min(ranks - 1 - r, microbatches), microbatches)
            for r in range(ranks)
        ]

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        return ramp(ranks, times)

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        return ranks - rank

    def offers(self, ranks: int, microbatches: int, layers: int) -> Sequence[int]:
        return (1,)
