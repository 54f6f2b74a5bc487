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
        "equal to 1e-10; over links of 2 ms and 200 Mbit/s a step of two ranks is 1.675x, a long prompt 1.752x "
        "(`bench/overlap.py`)"
    ),
)
class TokenWeave(Overlap):
    """Overlaps the sums over the ranks of ``tp`` with computation (Gond et al. 2025). The tokens of every row are cut
    into halves, and one half is computed while the other is summed. The later half attends to the keys of the earlier
    one.

    The paper has one fused kernel for the sum, the residual and the norm. :mod:`weft.layout.boundary` takes three
    steps: a reduce-scatter of the tokens, residual and norm of each rank's own tokens, and an all-gather.
    """

    def __call__(self, tokens: PassTokens) -> Weave:
        return Weave(tokens.token_parts(even(tokens.asked or 2)), weaving)
