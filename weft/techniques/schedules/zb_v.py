"""ZB-V (Qi et al. 2023, section 6): a microbatch passes the ranks from first to last, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.registry import register
from weft.schedule.builder import Number, ScheduleBuilder, larger

if TYPE_CHECKING:
    from weft.schedule.actions import Order
    from weft.schedule.times import Times


@register(
    "schedule",
    "zb-v",
    title="ZB-V",
    paper="Qi et al. 2023",
    recipe="zb-v.toml",
    proof="tests/parallel/test_pipeline.py, tests/schedule/test_build.py",
    figure="peak P",
)
class ZeroBubbleV(ScheduleBuilder):
    """A zero-bubble schedule with two stages per rank, the second in reverse order of ranks (Qi et al. 2023).

    It has no bubble if forward, input gradients and weight gradients take equal time. The peak is the activations of
    ``ranks`` microbatches, as in 1F1B.
    """

    about = "no bubble if F=B=W, peak P, two chunks per rank"
    paper = "2401.10241"
    chunks = 2
    splits = True
    place = 3

    def orders(
        self, ranks: int, microbatches: int, chunks: int, times: Times
    ) -> Sequence[Order]:
        from weft.schedule.build.v_shape import Pattern, repeat

        pattern = Pattern((3, 3, 3, 3), (1, 1, 1), 2 * ranks)
        return repeat(pattern, ranks, microbatches, times)

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        return (ranks - 1) * larger(times.backward_input - times.backward_weight, 0)

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        return ranks

    def offers(self, ranks: int, microbatches: int, layers: int) -> Sequence[int]:
        # two stages per rank; the ends of the model may fill one
        return (1,) if layers >= 2 * ranks - 2 else ()
