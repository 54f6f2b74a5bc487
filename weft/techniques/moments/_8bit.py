"""Moments in 8 bits, with a scale for each block of a row (Dettmers et al. 2021)."""

from __future__ import annotations

from weft.registry import register
from weft.train.rules.compact_adamw import BlockAdamW, BlockSettings
from weft.train.rules.update_rule import WHOLE_ROWS


@register(
    "moments",
    "8bit",
    settings=BlockSettings,
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
class EightBitAdamW(BlockAdamW):
    """AdamW whose moments are kept in 8 bits, with a scale for each block of a row (Dettmers et al. 2021)."""

    kept = 0.5
    bits = 8
