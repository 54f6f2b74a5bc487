"""Ring attention where every rank owns an early and a late block of the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.parallel.context.scheme import AttentionScheme
from weft.registry import register

if TYPE_CHECKING:
    from weft.parallel.context.tables import TileTable


@register(
    "context",
    "zigzag",
    title="Zigzag ring",
    paper="Brandon et al. 2023 (striped); Zhu 2024 (ring-flash-attention)",
    recipe="zigzag.toml",
    proof="tests/parallel/test_context.py, tests/test_counts.py",
    figure=(
        "critical path P/2, the ideal; 28.3 MB a step where PyTorch's ring sends 41.9"
        " on 4 ranks (`bench/sequence.py`)"
    ),
)
class Zigzag(AttentionScheme):
    """Balances causal attention: each rank owns an early and a late block, and so computes two tiles in each step
    (Brandon et al. 2023; Zhu 2024).
    """

    paired = True

    def table(self, ranks: int) -> TileTable:
        from weft.parallel.context.tables import circle, zigzag_owners

        return circle("zigzag", zigzag_owners(ranks), "kv", buffers=4)
