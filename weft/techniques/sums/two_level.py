"""Two levels: summands are added within each host first, then between hosts, and the sum returns the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.layout.all_reduce import AllReduce
from weft.registry import register

if TYPE_CHECKING:
    import torch

    from weft.net.rank_links import RankLinks


@register(
    "sum",
    "two-level",
    title="Hierarchical all-reduce: within hosts, then between them",
    paper="Li et al. 2024 (TPI-LLM, 2410.00531)",
    recipe="weft generate --checkpoint RUN --layout tp=4,sum=two-level",
    proof="tests/layout/test_sums.py",
    figure="messages and bytes as the formula",
)
class TwoLevelSum(AllReduce):
    """All-reduce within each host, then between the first ranks of the hosts (TPI-LLM, Li et al. 2024). It takes one
    delay of the links between hosts, and two delays of the links within. With tensors of ``b`` bytes ``(hosts - 1) b``
    bytes leave a host, however many ranks it has.
    """

    def fits(self, links: RankLinks) -> bool:
        return 1 < len(links.hosts) < links.ranks

    def add(self, x: torch.Tensor, links: RankLinks) -> torch.Tensor:
        import torch

        from weft.layout.sums import total_in_order

        own = next(members for members in links.hosts if links.rank in members)
        head, *others = own
        if links.rank != head:
            total = torch.empty_like(x)
            links.exchange({head: x}, {head: total})
            return total
        parts = {rank: torch.empty_like(x) for rank in others}
        links.exchange({}, parts)
        sums = {head: total_in_order([x, *parts.values()])}
        heads = [members[0] for members in links.hosts if members is not own]
        sums |= {rank: torch.empty_like(x) for rank in heads}
        links.exchange(
            dict.fromkeys(heads, sums[head]), {rank: sums[rank] for rank in heads}
        )
        total = total_in_order([sums[members[0]] for members in links.hosts])
        links.exchange(dict.fromkeys(others, total), {})
        return total
