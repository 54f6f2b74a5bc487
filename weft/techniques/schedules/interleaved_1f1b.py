"""Interleaved 1F1B (Narayanan et al. 2021): 1F1B over several chunks of layers per rank, depth first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.registry import register
from weft.schedule.builder import Number, ScheduleBuilder, ramp

if TYPE_CHECKING:
    from weft.schedule.actions import Order
    from weft.schedule.times import Times


@register(
    "schedule",
    "interleaved-1f1b",
    title="Interleaved 1F1B",
    paper="Narayanan et al. 2021 (Megatron-LM)",
    recipe="interleaved.toml",
    proof="tests/parallel/test_pipeline.py, tests/schedule/test_build.py",
    figure="published bubbles to 4 decimals",
)
class Interleaved(ScheduleBuilder):
    """1F1B with several stages (chunks) per rank (Megatron-LM, Narayanan et al. 2021): rank ``r`` of ``P`` holds stages
    ``r``, ``r + P``, ``r + 2P``, ...

    A microbatch passes all ranks once for each chunk, and microbatches go in groups of ``P``. The last group may be
    smaller than ``P``, which Megatron does not allow: its missing microbatches are left out of the order.

    With ``v`` chunks, a step waits for messages between ranks ``2 v P - 2`` times. If messages take time, one backward
    is delayed to a moment at which a rank would otherwise wait. This saves ``P`` of these waits, and the rank holds the
    activations of one more chunk.
    """

    about = "1F1B over v chunks per rank, depth first"
    paper = "2104.04473"
    chunks = 2
    free = True
    falls = 1
    place = 1

    def orders(
        self, ranks: int, microbatches: int, chunks: int, times: Times
    ) -> Sequence[Order]:
        groups = -(-microbatches // ranks)
        rounds = [
            (g, c, m)
            for g in range(groups)
            for c in range(chunks)
            for m in range(g * ranks, (g + 1) * ranks)
        ]
        total, back = len(rounds), list(rounds)
        hide = times.move > 0 and groups > 1
        if hide:
            last_before = (groups - 1) * chunks * ranks - 1
            back.insert(last_before + ranks, back.pop(last_before))
        orders: list[Order] = []
        for r in range(ranks):
            forward = [("F", c * ranks + r, m) for _, c, m in rounds]
            backward = [("B", (chunks - 1 - c) * ranks + r, m) for _, c, m in back]
            ahead = min(2 * (ranks - 1 - r) + (chunks - 1) * ranks + hide, total)
            turns = [
                a for pair in zip(forward[ahead:], backward, strict=False) for a in pair
            ]
            order = [*forward[:ahead], *turns, *backward[total - ahead :]]
            orders.append(
                [(kind, stage, m) for kind, stage, m in order if m < microbatches]
            )
        return orders

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        return ramp(ranks, times) / chunks

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        return (2 * (ranks - 1 - rank) + (chunks - 1) * ranks + 1) / chunks

    def offers(self, ranks: int, microbatches: int, layers: int) -> Sequence[int]:
        if microbatches % ranks:
            return ()
        whole = [v for v in (2, 3, 4, 6, 8) if layers // (ranks * v) >= 1]
        return [
            v for v in whole if 0 in (layers % (ranks * v), (layers + 2) % (ranks * v))
        ]
