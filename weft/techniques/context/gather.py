"""All-gather of keys and values (Llama 3, 2407.21783) while a rank computes the tiles of its own keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.parallel.context.scheme import AttentionScheme
from weft.registry import register

if TYPE_CHECKING:
    from weft.parallel.context.tables import TileTable


@register(
    "context",
    "gather",
    title="All-gather of keys and values",
    paper="Grattafiori et al. 2024 (Llama 3)",
    recipe="zigzag.toml --layout cp=4,context=gather",
    proof="tests/parallel/test_context.py",
    figure=(
        "bytes of zigzag; 75.0 MiB for 2,048 tokens on each of 4 ranks where zigzag "
        "needs 63.5, both linear (`bench/sequence.py`)"
    ),
)
class Gather(AttentionScheme):
    """Fetches the keys and values of all ranks at once (Llama 3, Grattafiori et al. 2024). While they travel, a rank
    computes attention to its own keys, and then to all others.
    """

    paired = True

    def table(self, ranks: int) -> TileTable:
        from weft.parallel.context.tables import TileTable, tiles_between, zigzag_owners

        owners, tiles = zigzag_owners(ranks), []
        for rank in range(ranks):
            for other in range(ranks):
                step = int(rank != other)
                tiles += tiles_between(step, rank, owners[rank], owners[other])
        return TileTable("gather", owners, tuple(tiles), buffers=2 * (ranks - 1))
