"""TokenWeave (Gond et al. 2025, 2505.11329): halves of the tokens take turns."""

from __future__ import annotations

from weft.models.token_parts import (
    WHOLE_ROWS,
    Overlap,
    PassTokens,
    Weave,
    even,
    weaving,
)
from weft.registry import register


@register(
    "overlap",
    "tokens",
    title="TokenWeave",
    paper="Gond et al. 2025",
    rules=WHOLE_ROWS,
    recipe="overlap.toml",
    proof="tests/models/test_weave.py, tests/techniques/test_overlaps.py",
    figure=(
        "equal to 1e-10; over links of 2 ms and 200 Mbit/s a step of two ranks is 1.18x, a long prompt 1.15x; "
        "of four ranks on two cores 1.10x and 1.11x (`bench/overlap.py`)"
    ),
)
class TokenWeave(Overlap):
    """Cuts the tokens of every row into halves: while one half travels, the other is computed. The later half attends
    to the keys of the earlier one. The paper fuses the reduction with the residual sum and the norm. Here
    :mod:`weft.layout.boundary` does the same: tokens are summed and scattered, each rank of ``tp`` adds and normalises
    its own tokens, and they are gathered.
    """

    def __call__(self, tokens: PassTokens) -> Weave:
        return Weave(tokens.token_parts(even(tokens.asked or 2)), weaving)
