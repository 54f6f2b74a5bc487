"""ZB-H1 (Qi et al. 2023): 1F1B's order and memory, with weight gradients delayed to fill the bubble at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.registry import register
from weft.schedule.builder import Number, ScheduleBuilder, held_back

if TYPE_CHECKING:
    from weft.schedule.actions import Order
    from weft.schedule.times import Times


@register(
    "schedule",
    "zb-h1",
    title="Zero bubble H1",
    paper="Qi et al. 2023",
    recipe="zero-bubble.toml --layout pp=4,schedule=zb-h1",
    proof="tests/parallel/test_pipeline.py, tests/schedule/test_build.py",
    figure="published bubbles to 4 decimals",
)
class ZeroBubbleH1(ScheduleBuilder):
    """1F1B that delays the weight gradients of ``r`` microbatches on rank ``r`` of the pipeline, so that they fill the
    bubble at the end (Qi et al. 2023).
    """

    about = "1F1B with weight gradients kept back, peak P"
    paper = "2401.10241"
    splits = True
    falls = 1
    place = 2

    def orders(
        self, ranks: int, microbatches: int, chunks: int, times: Times
    ) -> Sequence[Order]:
        from weft.schedule.build.turns import split

        return [split(r, ranks - r, r, microbatches) for r in range(ranks)]

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        return held_back(ranks, microbatches, ranks, times)

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        return ranks

    def offers(self, ranks: int, microbatches: int, layers: int) -> Sequence[int]:
        return (1,)
