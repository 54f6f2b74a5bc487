"""One copy of a token to each node that has any of its experts, and from there to each rank that has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.parallel.experts.by_node import NODES
from weft.parallel.experts.dispatch_way import DispatchWay
from weft.registry import register

if TYPE_CHECKING:
    from weft.models.experts import Dispatcher
    from weft.parallel.experts.expert_ranks import ExpertRanks


@register(
    "dispatch",
    "per-node",
    rules=(NODES,),
    title="One copy of a token to each node, forwarded inside",
    paper="DeepSeek-AI 2025 (DeepEP)",
    recipe="experts.toml --layout dp=2,shard=2,ep=4,node=2,dispatch=per-node",
    proof="tests/parallel/test_experts.py",
    figure="bytes inside and between nodes as the formulas",
)
class CopyForEachNode(DispatchWay):
    """Sends a token at most once to each node, however many of the token's experts are there (DeepEP, DeepSeek-AI
    2025).
    """

    by_node = True

    def make(self, ranks: ExpertRanks) -> Dispatcher:
        from weft.layout.placement_groups import experts_per_node
        from weft.parallel.experts.dispatch import PerMember, local_experts

        near = experts_per_node(ranks.mesh.layout)
        within = PerMember(ranks.within(near), local_experts(ranks))
        return PerMember(ranks.across(near), within)
