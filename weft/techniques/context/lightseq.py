"""LightSeq (Li et al. 2023, 2310.03294): ranks with early tokens, which have few keys, compute for later ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.parallel.context.scheme import AttentionScheme
from weft.registry import register

if TYPE_CHECKING:
    from weft.parallel.context.tables import TileTable


@register(
    "context",
    "lightseq",
    title="LightSeq: balanced helpers",
    paper="Li et al. 2023",
    recipe="lightseq.toml",
    proof="tests/parallel/test_context.py",
    figure="critical path P/2 at odd P, half a tile more at even P",
)
class LightSeq(AttentionScheme):
    """Balances causal attention: ranks that hold early tokens, and so have few keys to attend to, compute tiles for
    ranks that hold late tokens. A tile is the attention of one rank's queries to one rank's keys, and in a step a rank
    computes one tile. Causal attention thus takes ``ranks // 2 + 1`` steps. If the number of ranks is even, half of the
    ranks are idle in the last step.
    """

    def table(self, ranks: int) -> TileTable:
        from weft.parallel.context.tables import (
            TileTable,
            contiguous_owners,
            tiles_between,
        )

        owners, tiles = contiguous_owners(ranks), []
        for step in range(ranks // 2 + 1):
            for rank in range(ranks):
                if rank >= step:
                    tiles += tiles_between(step, rank, (rank,), (rank - step,))
                elif 2 * step < ranks:
                    tiles += tiles_between(step, rank, (rank - step + ranks,), (rank,))
        return TileTable("lightseq", owners, tuple(tiles), buffers=2)
