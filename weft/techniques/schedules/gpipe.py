"""GPipe (Huang et al. 2019): all forwards, then all backwards."""

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
    "gpipe",
    title="GPipe",
    paper="Huang et al. 2019",
    recipe="gpipe.toml",
    proof="tests/parallel/test_pipeline.py",
    figure="bubble (P-1)(F+B+W), peak M",
)
class GPipe(ScheduleBuilder):
    """Runs all forwards, then all backwards (Huang et al. 2019). At its peak a rank holds the activations of every
    microbatch.
    """

    about = "all forwards, then all backwards"
    paper = "1811.06965"

    def orders(
        self, ranks: int, microbatches: int, chunks: int, times: Times
    ) -> Sequence[Order]:
        return [
            [(kind, r, m) for kind in "FB" for m in range(microbatches)]
            for r in range(ranks)
        ]

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        return ramp(ranks, times)

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        return inf
