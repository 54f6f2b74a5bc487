"""DualPipe (DeepSeek-AI 2024): microbatches enter the pipeline at both ends, and every stage is on two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.registry import register
from weft.schedule.builder import Number, ScheduleBuilder, filled

if TYPE_CHECKING:
    from weft.schedule.actions import Entry, Order
    from weft.schedule.times import Times


@register(
    "schedule",
    "dualpipe",
    title="DualPipe",
    paper="DeepSeek-AI 2024",
    recipe="dualpipe.toml",
    proof="tests/parallel/test_pipeline.py, tests/schedule/test_build.py",
    figure="bubble P/2-1 at unit cost, peak P+1",
)
class DualPipe(ScheduleBuilder):
    """Runs a pipeline in both directions: there are as many stages as ranks, and each stage is on two ranks
    (DeepSeek-AI 2024).

    The first half of the microbatches enters at the first rank, the second half at the last. A rank holds the
    activations of at most ``ranks + 1`` microbatches. The order of the paper is for at least ``2 * ranks``
    microbatches, in pairs. If there are fewer, this order is used with the missing microbatches left out.
    """

    about = "two flows from both ends, parameters twice"
    paper = "2412.19437"
    splits = True
    twice = True
    place = 7

    def orders(
        self, ranks: int, microbatches: int, chunks: int, times: Times
    ) -> Sequence[Order]:
        from weft.schedule.build.two_flows import two_flows

        first = -(-microbatches // 2)
        counts = (first, microbatches - first)
        orders: list[Order] = []
        for r in range(ranks):
            direction = (0, 1) if r < ranks // 2 else (1, 0)  # of flows 0 and 1
            stage = (r, ranks - 1 - r)  # of directions 0 and 1
            order: list[Entry] = []
            steps = two_flows(ranks // 2, min(r, ranks - 1 - r), max(first, ranks))
            for kind, flow, m in steps:
                d = direction[flow]
                if m < counts[d]:
                    order.append((kind, stage[d], m + d * first))
            orders.append(order)
        return orders

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        return (ranks / 2 - 1) * filled(times)

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        return ranks + 1

    def offers(self, ranks: int, microbatches: int, layers: int) -> Sequence[int]:
        return (1,) if ranks % 2 == 0 and microbatches >= 2 * ranks else ()
