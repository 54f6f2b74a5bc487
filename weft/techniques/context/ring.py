"""Ring attention (Liu et al. 2023, 2310.01889), where every rank owns one contiguous block of the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.parallel.context.scheme import AttentionScheme
from weft.registry import register

if TYPE_CHECKING:
    from weft.parallel.context.tables import TileTable


@register(
    "context",
    "ring",
    title="Ring attention",
    paper="Liu et al. 2023",
    recipe="ring.toml",
    proof="tests/parallel/test_context.py, tests/test_counts.py",
    figure=(
        "critical path P - 1/2 tiles, ideal P/2 (`docs/measured/sequence-balance.png`); half "
        "the bytes of passing everything on"
    ),
)
class RingAttention(AttentionScheme):
    """Sends keys and values around a ring of ranks (Liu et al. 2023). With causal attention only the last rank has work
    in all steps.
    """

    def table(self, ranks: int) -> TileTable:
        from weft.parallel.context.tables import circle, contiguous_owners

        return circle("ring", contiguous_owners(ranks), "kv", buffers=2)
