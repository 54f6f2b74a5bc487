"""Star: every rank sends its summand to the first rank, which adds them and sends the sum back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.layout.all_reduce import AllReduce
from weft.registry import register

if TYPE_CHECKING:
    import torch

    from weft.net.rank_links import RankLinks


@register(
    "sum",
    "star",
    title="Star all-reduce: two delays of a link, whatever the number of ranks",
    paper="Li et al. 2024 (TPI-LLM, 2410.00531)",
    recipe="weft generate --checkpoint RUN --layout tp=4,sum=star",
    proof="tests/layout/test_sums.py",
    figure=(
        "messages and bytes as the formula; 2.85x ring for one token over links of 10 ms "
        "between 4 hosts (`bench/weak_hosts.py`)"
    ),
)
class StarSum(AllReduce):
    """All-reduce through the first rank, which adds up and sends the sum to all (TPI-LLM, Li et al. 2024). It takes two
    delays of a link, where a ring takes ``2 (ranks - 1)``. With tensors of ``b`` bytes the first rank receives and
    sends ``(ranks - 1) b`` bytes, so that a ring is faster for large tensors.
    """

    def add(self, x: torch.Tensor, links: RankLinks) -> torch.Tensor:
        import torch

        from weft.layout.sums import total_in_order

        if links.rank:
            total = torch.empty_like(x)
            links.exchange({0: x}, {0: total})
            return total
        others = range(1, links.ranks)
        parts = {rank: torch.empty_like(x) for rank in others}
        links.exchange({}, parts)
        total = total_in_order([x, *parts.values()])
        links.exchange(dict.fromkeys(others, total), {})
        return total
