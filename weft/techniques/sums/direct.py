"""Direct exchange: every rank sends its summand to all others, and adds what it has received in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.layout.all_reduce import AllReduce
from weft.registry import register

if TYPE_CHECKING:
    import torch

    from weft.net.rank_links import RankLinks


@register(
    "sum",
    "direct",
    title="Direct all-reduce: one delay of a link",
    paper="beside TPI-LLM's star",
    recipe="weft generate --checkpoint RUN --layout tp=4,sum=direct",
    proof="tests/layout/test_sums.py",
    figure=(
        "messages and bytes as the formula; 5.38x ring for one token over links of 10 ms "
        "between 4 hosts (`bench/weak_hosts.py`)"
    ),
)
class DirectSum(AllReduce):
    """All-reduce in which every rank sends its values to all others at once. It takes one delay of a link. With tensors
    of ``b`` bytes every rank sends and receives ``(ranks - 1) b`` bytes.
    """

    def add(self, x: torch.Tensor, links: RankLinks) -> torch.Tensor:
        import torch

        from weft.layout.sums import total_in_order

        others = [rank for rank in range(links.ranks) if rank != links.rank]
        parts = {rank: torch.empty_like(x) for rank in others}
        links.exchange(dict.fromkeys(others, x), parts)
        parts[links.rank] = x
        return total_in_order([parts[rank] for rank in range(links.ranks)])
