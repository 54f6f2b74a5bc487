"""T3 (Pati et al. 2024, 2401.16677) as a schedule: products in chunks whose reductions start as each chunk is done."""

from __future__ import annotations

from weft.models.token_parts import (
    WHOLE_ROWS,
    Overlap,
    PassTokens,
    Weave,
    by_phase,
    even,
)
from weft.registry import register

#: Chunks of a product, unless the recipe says how many. With two, a chunk waits for its own transfers; products of few
#: tokens are slow.
CHUNKS = 3


@register(
    "overlap",
    "chunks",
    title="T3: chunks of products",
    paper="Pati et al. 2024",
    rules=WHOLE_ROWS,
    recipe="overlap.toml --layout tp=2,overlap=chunks",
    proof="tests/models/test_weave.py, tests/techniques/test_overlaps.py",
    figure=(
        "equal to 1e-10; over links of 2 ms and 200 Mbit/s a step of two ranks is 1.754x, a long prompt 1.882x "
        "(`bench/overlap.py`)"
    ),
)
class ProductChunks(Overlap):
    """Cuts the tokens of every row into chunks; attention and feed-forward compute one chunk after the other (Pati et
    al. 2024).

    The reduction of a chunk starts as soon as the chunk's product is done, and travels while later chunks are computed.
    The gather of a chunk travels while earlier chunks are computed. The paper triggers reductions in hardware; here the
    processor starts them between chunks.
    """

    def __call__(self, tokens: PassTokens) -> Weave:
        return Weave(tokens.token_parts(even(tokens.asked or CHUNKS)), by_phase)
