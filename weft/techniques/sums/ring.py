"""Ring: pieces go round once while they are added up, and once more with their sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.layout.all_reduce import AllReduce
from weft.registry import register

if TYPE_CHECKING:
    import torch

    from weft.net.rank_links import RankLinks


@register(
    "sum",
    "ring",
    title="Ring all-reduce: the fewest bytes on every link",
    paper="Patarasuk & Yuan 2009",
    recipe="weft generate --checkpoint RUN --layout tp=4,sum=ring",
    proof="tests/layout/test_sums.py",
    figure="messages and bytes as the formula",
)
class RingSum(AllReduce):
    """All-reduce along a ring (Patarasuk & Yuan 2009). It takes ``2 (ranks - 1)`` delays of a link. With tensors of
    ``b`` bytes every rank sends and receives less than ``2 b`` bytes, however many ranks there are.
    """

    def add(self, x: torch.Tensor, links: RankLinks) -> torch.Tensor:
        import torch

        from weft.layout.sums import total_in_order

        ranks, rank = links.ranks, links.rank
        following, before = (rank + 1) % ranks, (rank - 1) % ranks
        total = x.clone()
        pieces = total.tensor_split(ranks)
        for step in range(ranks - 1):
            sent, grown = (
                pieces[(rank - step) % ranks],
                pieces[(rank - step - 1) % ranks],
            )
            came = torch.empty_like(grown)
            links.exchange({following: sent}, {before: came})
            grown.copy_(total_in_order([came, grown]))
        for step in range(ranks - 1):
            done, filled = (
                pieces[(rank + 1 - step) % ranks],
                pieces[(rank - step) % ranks],
            )
            links.exchange({following: done}, {before: filled})
        return total
