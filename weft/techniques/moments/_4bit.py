"""Moments in 4 bits, with a scale for each block of a row (Li et al. 2023)."""

from __future__ import annotations

from weft.refusal import Rule
from weft.registry import register
from weft.train.rules.compact_adamw import BlockAdamW, BlockSettings
from weft.train.rules.update_rule import WHOLE_ROWS

#: Two numbers of four bits share a byte.
ODD_COLUMNS = Rule(
    "4bit moments at odd columns",
    "layout shape optimizer",
    lambda a: a.odd_width is not None,
    "optimizer.state = '4bit' keeps numbers in pairs, and tp={0.layout.tp} cuts the ffn of {0.odd_width} at an odd "
    "column",
    "use '8bit', another layout.tp or an even model.ffn and model.expert_ffn",
)


@register(
    "moments",
    "4bit",
    settings=BlockSettings,
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
class FourBitAdamW(BlockAdamW):
    """AdamW whose moments are kept in 4 bits, with a scale for each block of a row (Li et al. 2023)."""

    kept = 0.25
    bits = 4
