"""V-Min (Qi et al. 2024): a third of 1F1B's activation memory, and two thirds of its bubble."""

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
    "v-min",
    title="V-Min",
    paper="Qi et al. 2024",
    recipe="v-half.toml --layout pp=4,schedule=v-min",
    proof="tests/parallel/test_pipeline.py, tests/schedule/test_build.py",
    figure="peak at most (P+4)/3",
)
class VMin(ScheduleBuilder):
    """A schedule with two stages per rank, which needs about a third of 1F1B's memory for activations (Qi et al. 2024).
    A rank holds the activations of at most ``(ranks + 4) / 3`` microbatches.
    """

    about = "a third of 1F1B's peak, two thirds of its bubble"
    paper = "2405.15362"
    chunks = 2
    splits = True
    place = 5

    def orders(
        self, ranks: int, microbatches: int, chunks: int, times: Times
    ) -> Sequence[Order]:
        from weft.schedule.build.v_shape import Pattern, repeat

        turns = (1, 1, 1) if ranks % 3 else (3, 1, 3)
        pattern = Pattern((1, 1, 1, 1), turns, -(-2 * ranks // 3) + 2, pull=False)
        return repeat(pattern, ranks, microbatches, times)

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        # Blocks of six equal slots are repeated: whatever is shorter than a slot waits in every microbatch.
        slot = larger(
            larger(times.forward, times.backward_input), times.backward_weight
        )
        work = times.forward + times.backward
        return (2 * (ranks - 1) / 3 - 1 / 6) * work + microbatches * (3 * slot - work)

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        return (ranks + 4) / 3

    def offers(self, ranks: int, microbatches: int, layers: int) -> Sequence[int]:
        # two stages per rank; the ends of the model may fill one
        return (1,) if layers >= 2 * ranks - 2 else ()
