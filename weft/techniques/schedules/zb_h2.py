"""ZB-H2 (Qi et al. 2023): forwards also fill the bubble before the first backward."""

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
    "zb-h2",
    title="Zero bubble H2",
    paper="Qi et al. 2023",
    recipe="zero-bubble.toml",
    proof="tests/parallel/test_pipeline.py, tests/schedule/test_build.py",
    figure="published bubbles to 4 decimals",
)
class ZeroBubbleH2(ScheduleBuilder):
    """Fills the bubble at the start of a step with more forwards than 1F1B makes there (Qi et al. 2023).

    A rank holds the activations of at most ``2 * ranks - 1`` microbatches.
    """

    about = "no bubble if F=B=W, peak 2P-1"
    paper = "2401.10241"
    splits = True
    falls = 2

    def orders(
        self, ranks: int, microbatches: int, chunks: int, times: Times
    ) -> Sequence[Order]:
        from weft.schedule.build.turns import split

        return [
            split(r, 2 * (ranks - r) - 1, 2 * r, microbatches) for r in range(ranks)
        ]

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        return held_back(ranks, microbatches, 2 * ranks - 1, times)

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        return 2 * ranks - 1
