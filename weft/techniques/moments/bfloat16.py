"""Moments in bfloat16, rounded up or down at random (Gupta et al. 2015) so that small changes are not lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.checkpoint.boxes import MOMENTS
from weft.registry import register
from weft.train.rules.compact_adamw import CompactAdamW

if TYPE_CHECKING:
    from torch import Tensor as T

    from weft.layout.parts import Part
    from weft.parallel.state import Held
    from weft.recipe import Optimizer
    from weft.train.rules.rank_sums import RankSums


class InBfloat16:
    """Stores AdamW's moments in bfloat16 with stochastic rounding, so that small changes are not lost. The random bits
    are a function of parameter, element, update and moment: every layout rounds alike.
    """

    def slots(self, held: Held) -> dict[str, Part]:
        import torch

        from weft.train.rules.rank_sums import like

        return {moment: like(held, torch.bfloat16) for moment in MOMENTS}

    def load(self, held: Held) -> list[T]:
        return [held.slots[moment].values.to(held.local.dtype) for moment in MOMENTS]

    def store(self, held: Held, moments: Sequence[T]) -> None:
        from zlib import crc32

        from weft.memory.noise import random_bits
        from weft.memory.quantised import rounded_bf16
        from weft.train.rules.rank_sums import logical_positions

        positions = logical_positions(held)
        for number, (moment, x) in enumerate(zip(MOMENTS, moments, strict=True)):
            seed = (
                crc32(held.name.encode()) << 32
                | int(held.updates.item()) * len(MOMENTS) + number
            )
            held.slots[moment].values.copy_(
                rounded_bf16(x, random_bits(positions, seed))
            )


@register(
    "moments",
    "bfloat16",
    title="Moments in bfloat16, rounded stochastically",
    paper="Gupta et al. 2015",
    recipe="optimizers.toml --set optimizer.kind=adamw --set optimizer.state=bfloat16",
    proof="tests/techniques/test_optimizers.py",
    figure=(
        "noise by logical index; 4 bytes per parameter, loss within 0.1 % "
        "(`bench/optimizers.py`)"
    ),
)
class Bfloat16AdamW(CompactAdamW):
    """AdamW whose moments are kept in bfloat16, with stochastic rounding (Gupta et al. 2015)."""

    elementwise = True
    kept = 1.0

    def __init__(self, settings: Optimizer, ranks: RankSums) -> None:
        super().__init__(settings, ranks, InBfloat16())
