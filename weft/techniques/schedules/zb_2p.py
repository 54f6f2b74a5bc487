"""ZB-2p (Qi et al. 2023, section 3.1): ordered by the passes' measured times, in twice the memory of 1F1B."""

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
    "zb-2p",
    title="Zero bubble from measured times in twice that memory (ZB-2p)",
    paper="Qi et al. 2023",
    recipe="zero-bubble.toml --layout pp=4,schedule=zb-2p",
    proof="tests/schedule/test_greedy.py",
    figure="within 0.0014 of the published bubbles, four of six below",
)
class ZeroBubble2P(ScheduleBuilder):
    """Fills a rank's idle times with the computation of weight gradients, in an order that is computed from the given
    times of the passes (Qi et al. 2023). It needs twice the activation memory of 1F1B, and leaves almost no bubble.
    """

    about = "the same in the memory of 2P"
    paper = "2401.10241"
    splits = True
    falls = 2

    def orders(
        self, ranks: int, microbatches: int, chunks: int, times: Times
    ) -> Sequence[Order]:
        from weft.schedule.build.greedy import TAPE, zero_bubble

        return zero_bubble("zb-2p", ranks, microbatches, times, 2 * ranks, tape=TAPE)

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        return held_back(ranks, microbatches, 2 * ranks - 1, times)

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        return 2 * ranks
