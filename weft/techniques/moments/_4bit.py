"""Moments in 4 bits, with a scale for each block of a row (Li et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from weft.refusal import Rule
from weft.registry import register
from weft.section import Section
from weft.train.rules.compact_adamw import CompactAdamW
from weft.train.rules.update_rule import WHOLE_ROWS

if TYPE_CHECKING:
    from weft.recipe import Optimizer
    from weft.train.rules.rank_sums import RankSums

#: Two numbers of four bits share a byte.
ODD_COLUMNS = Rule(
    "4bit moments at odd columns",
    "layout shape optimizer",
    lambda a: a.odd_width is not None,
    "optimizer.state = '4bit' keeps numbers in pairs, and tp={0.layout.tp} cuts the ffn of {0.odd_width} at an odd "
    "column",
    "use '8bit', another layout.tp or an even model.ffn and model.expert_ffn",
)


class FourBitSettings(Section):
    """Settings of moments in 4 bits."""

    block: PositiveInt = Field(
        256,
        description="Number of neighbouring values that share one scale. Smaller blocks are more exact.",
    )


@register(
    "moments",
    "4bit",
    settings=FourBitSettings,
    rules=(WHOLE_ROWS, ODD_COLUMNS),
    title="AdamW with moments of 4 bits, in blocks of the logical rows",
    paper="Li et al. 2023",
    recipe="optimizers.toml --set optimizer.kind=adamw --set optimizer.state=4bit",
    proof="tests/techniques/test_optimizers.py",
    figure=(
        "slots equal to one device's; 1.09 bytes per parameter where AdamW keeps 8, "
        "loss 0.9 % below after 300 steps (`bench/optimizers.py`)"
    ),
)
class FourBitAdamW(CompactAdamW):
    """Keeps AdamW's moments in 4 bits, with a scale for each block."""

    kept = 0.25
    shaping = ("block",)

    def __init__(self, settings: Optimizer, ranks: RankSums) -> None:
        from weft.train.rules.block_moments import BlockMoments

        block = settings.own(FourBitSettings).block
        super().__init__(settings, ranks, BlockMoments(4, block, ranks))
