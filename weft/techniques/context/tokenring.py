"""TokenRing (Wang et al. 2024, 2412.20501): queries go around the ring, keys stay, results go straight home.

A result goes straight back to the rank of its query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.parallel.context.scheme import AttentionScheme
from weft.registry import register

if TYPE_CHECKING:
    from weft.parallel.context.tables import TileTable


@register(
    "context",
    "tokenring",
    title="TokenRing, with the backward pass that its code lacks",
    paper="Wang et al. 2024",
    recipe="tokenring.toml",
    proof="tests/parallel/test_context.py",
    figure="critical path P/2; bytes as the formula",
)
class TokenRing(AttentionScheme):
    """Sends queries around the ring instead of keys and values (Wang et al. 2024). Each rank owns an early and a late
    block of tokens.
    """

    paired = True

    def table(self, ranks: int) -> TileTable:
        from weft.parallel.context.tables import circle, zigzag_owners

        return circle("tokenring", zigzag_owners(ranks), "q", buffers=4)
