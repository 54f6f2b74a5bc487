"""Ring attention with an early and a late block on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.parallel.context.scheme import AttentionScheme
from weft.registry import register

if TYPE_CHECKING:
    from weft.parallel.context.tables import TileTable


@register(
    "context",
    "zigzag",
    title="Zigzag ring attention",
    paper="Brandon et al. 2023 (striped); Zhu 2024",
    recipe="zigzag.toml",
    proof="tests/parallel/test_context.py",
)
class Zigzag(AttentionScheme):
    """Two tiles per rank and step."""

    paired = True

    def table(self, ranks: int) -> TileTable:
        from weft.parallel.context.tables import circle, zigzag_owners

        return circle("zigzag", zigzag_owners(ranks), "kv", buffers=4)
