"""DualPipeV ("cut in half", Sea AI Lab 2025): DualPipe folded in half, with two chunks of layers per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.registry import register
from weft.schedule.builder import Number, ScheduleBuilder, filled

if TYPE_CHECKING:
    from weft.schedule.actions import Order
    from weft.schedule.times import Times


@register(
    "schedule",
    "dualpipe-v",
    title="DualPipeV",
    paper="DeepSeek-AI 2024; Sea AI Lab 2025",
    recipe="dualpipe.toml --layout pp=4,schedule=dualpipe-v",
    proof="tests/parallel/test_pipeline.py, tests/schedule/test_build.py",
    figure="bubble P/2-1 at unit cost, peak P+1",
)
class DualPipeV(ScheduleBuilder):
    """Gives each rank two stages, so that a microbatch passes all ranks from first to last, and then back (DeepSeek-AI
    2024; Sea AI Lab 2025). Rank ``r`` of ``P`` holds the stages ``r`` and ``2 P - 1 - r``.
    """

    about = "DualPipe folded: two chunks per rank"
    paper = "2412.19437"
    chunks = 2
    splits = True
    place = 6

    def orders(
        self, ranks: int, microbatches: int, chunks: int, times: Times
    ) -> Sequence[Order]:
        from weft.schedule.build.two_flows import two_flows

        return [
            [
                (kind, 2 * ranks - 1 - r if flow else r, m)
                for kind, flow, m in two_flows(ranks, r, max(microbatches, 2 * ranks))
                if m < microbatches
            ]
            for r in range(ranks)
        ]

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        return (ranks - 1) / 2 * filled(times)

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        return ranks + 0.5

    def offers(self, ranks: int, microbatches: int, layers: int) -> Sequence[int]:
        # two stages per rank; the ends of the model may fill one
        return (1,) if layers >= 2 * ranks - 2 else ()
