"""LoopedBFS (Lamy-Poirier 2022): GPipe over several chunks of layers per rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from weft.registry import register
from weft.schedule.builder import Number, ScheduleBuilder, ramp

if TYPE_CHECKING:
    from weft.schedule.actions import Order
    from weft.schedule.times import Times


@register(
    "schedule",
    "breadth-first",
    title="Breadth-first loops",
    paper="Lamy-Poirier 2022",
    recipe="breadth-first.toml",
    proof="tests/parallel/test_pipeline.py",
    figure="one gather per chunk and direction",
)
class BreadthFirst(ScheduleBuilder):
    """Runs all microbatches through a rank's first stage before any of them enters its next stage (breadth first;
    Lamy-Poirier 2022).
    """

    about = "GPipe over v chunks per rank"
    paper = "2211.05953"
    chunks = 2
    free = True

    def orders(
        self, ranks: int, microbatches: int, chunks: int, times: Times
    ) -> Sequence[Order]:
        every = range(chunks)
        return [
            [("F", c * ranks + r, m) for c in every for m in range(microbatches)]
            + [
                ("B", c * ranks + r, m)
                for c in reversed(every)
                for m in range(microbatches)
            ]
            for r in range(ranks)
        ]

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        return ramp(ranks, times) / chunks

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        return inf
