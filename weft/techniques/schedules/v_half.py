"""V-Half (Qi et al. 2024): about half of 1F1B's activation memory, and less than half of its bubble."""

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
    "v-half",
    title="V-Half",
    paper="Qi et al. 2024",
    recipe="v-half.toml",
    proof="tests/parallel/test_pipeline.py, tests/schedule/test_build.py",
    figure="peak P/2+1",
)
class VHalf(ScheduleBuilder):
    """A schedule with two stages per rank (Qi et al. 2024). It needs about half of 1F1B's memory for activations, and
    has less than half of 1F1B's bubble. A rank holds the activations of at most ``ranks / 2 + 1`` microbatches if
    ``ranks`` is even, else ``(ranks + 3) / 2``.
    """

    about = "half of 1F1B's peak and bubble"
    paper = "2405.15362"
    chunks = 2
    splits = True
    place = 4

    def orders(
        self, ranks: int, microbatches: int, chunks: int, times: Times
    ) -> Sequence[Order]:
        from weft.schedule.build.v_shape import Pattern, repeat

        odd = ranks % 2
        turns = (
            (1, 1, 2) if odd else (4, 1, 5)
        )  # other turns put two actions into one slot
        pattern = Pattern((1, 2, 1, 2), turns, ranks + 2 + odd)
        return repeat(pattern, ranks, microbatches, times)

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        lasting = larger(ranks / 2 - 1 - ranks % 2 / 3, 1 / 6)
        uneven = larger(times.backward_input - times.backward_weight, 0)
        return lasting * (times.forward + times.backward) + ranks * uneven

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        return ranks / 2 + 1 + ranks % 2 / 2

    def offers(self, ranks: int, microbatches: int, layers: int) -> Sequence[int]:
        # two stages per rank; the ends of the model may fill one
        return (1,) if layers >= 2 * ranks - 2 else ()
