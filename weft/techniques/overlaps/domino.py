"""Domino (Wang et al. 2024, 2409.15241): halves of the rows take turns, or last products are cut by columns."""

from __future__ import annotations

from weft.models.token_parts import (
    WHOLE_PASSES,
    Overlap,
    PassTokens,
    Weave,
    even,
    weaving,
)
from weft.registry import register


@register(
    "overlap",
    "domino",
    title="Domino",
    paper="Wang et al. 2024",
    rules=WHOLE_PASSES,
    recipe="overlap.toml --layout tp=2,overlap=domino",
    proof="tests/models/test_weave.py, tests/techniques/test_overlaps.py",
    figure=(
        "equal to 1e-10; over links of 2 ms and 200 Mbit/s a step of two ranks is 1.807x, a long prompt 1.756x "
        "(`bench/overlap.py`)"
    ),
)
class Domino(Overlap):
    """Cuts a pass into halves of its rows, and a single row into halves of its tokens (Wang et al. 2024).

    While a half's reduction travels, the other half computes. A pass that cannot be cut, such as a single row under
    ``cp``, overlaps inside layers. Half of the columns of a layer's last product are sent while the other half is
    computed. The two ways are not combined: this was slower over links with latency, because it sends twice as many
    messages.
    """

    def __call__(self, tokens: PassTokens) -> Weave:
        if tokens.asked == 1:
            return Weave(tokens.whole, weaving)
        shares = even(tokens.asked or 2)
        parts = tokens.row_parts(shares)
        if len(parts) == 1:
            parts = tokens.token_parts(shares)
        return Weave(parts, weaving, columns=1 if len(parts) > 1 else 2)
