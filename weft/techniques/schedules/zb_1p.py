"""ZB-1p (Qi et al. 2023, section 3.1): ordered by the passes' measured times, in the memory of 1F1B."""

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
    "zb-1p",
    title="Zero bubble from measured times in the memory of 1F1B (ZB-1p)",
    paper="Qi et al. 2023",
    recipe="zero-bubble.toml --layout pp=4,schedule=zb-1p",
    proof="tests/schedule/test_greedy.py",
    figure="within 0.0014 of the published bubbles, four of six below",
)
class ZeroBubble1P(ScheduleBuilder):
    """Fills a rank's idle times with the computation of weight gradients, in an order that is computed from the given
    times of the passes (Qi et al. 2023). A rank holds the activations of at most ``ranks`` microbatches, as in 1F1B.
    """

    about = "list-scheduled by the times, peak P"
    paper = "2401.10241"
    splits = True

    def orders(
        self, ranks: int, microbatches: int, chunks: int, times: Times
    ) -> Sequence[Order]:
        from weft.schedule.build.greedy import zero_bubble

        return zero_bubble("zb-1p", ranks, microbatches, times, ranks, tape=1.0)

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        return held_back(ranks, microbatches, ranks, times)

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        return ranks
