"""Moments in 8 bits, with a scale for each block of a row (Dettmers et al. 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from weft.registry import register
from weft.section import Section
from weft.train.rules.compact_adamw import CompactAdamW
from weft.train.rules.update_rule import WHOLE_ROWS

if TYPE_CHECKING:
    from weft.recipe import Optimizer
    from weft.train.rules.rank_sums import RankSums


class EightBitSettings(Section):
    """Settings of moments in 8 bits."""

    block: PositiveInt = Field(
        256,
        description="Number of neighbouring values that share one scale. Smaller blocks are more exact.",
    )


@register(
    "moments",
    "8bit",
    settings=EightBitSettings,
    rules=(WHOLE_ROWS,),
    title="AdamW with moments of 8 bits, in blocks of the logical rows",
    paper="Dettmers et al. 2021",
    recipe="optimizers.toml --set optimizer.kind=adamw --set optimizer.state=8bit",
    proof="tests/techniques/test_optimizers.py",
    figure=(
        "slots equal to one device's; 2.08 bytes per parameter where AdamW keeps 8, "
        "loss within 0.2 % after 300 steps (`bench/optimizers.py`)"
    ),
)
class EightBitAdamW(CompactAdamW):
    """Keeps AdamW's moments in 8 bits, with a scale for each block."""

    kept = 0.5
    shaping = ("block",)

    def __init__(self, settings: Optimizer, ranks: RankSums) -> None:
        from weft.train.rules.block_moments import BlockMoments

        block = settings.own(EightBitSettings).block
        super().__init__(settings, ranks, BlockMoments(8, block, ranks))
