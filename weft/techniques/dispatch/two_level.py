"""Two-level dispatch: a row goes first to a rank of the same node, and from there to the expert's rank.

The first of these ranks has the same position in its node as the expert's rank has in its own.
"""

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
    "two-level",
    rules=(NODES,),
    title="Two levels of exchange: inside nodes, then between (2DH)",
    paper="Hwang et al. 2023 (Tutel); Nie et al. 2022 (HetuMoE)",
    recipe="experts.toml --layout dp=2,shard=2,ep=4,node=2,dispatch=two-level",
    proof="tests/parallel/test_experts.py",
    figure=(
        "bytes inside and between nodes, and messages, as the formulas: 2 of these "
        "for every 3 at 2 nodes of 2"
    ),
)
class TwoLevel(DispatchWay):
    """Exchanges tokens within each node, then between nodes, in fewer and larger messages than one all-to-all (Tutel,
    Hwang et al. 2023; HetuMoE, Nie et al. 2022).

    A rank sends ``g + n - 2`` messages, with ``n`` nodes of ``g`` ranks.
    """

    by_node = True

    def make(self, ranks: ExpertRanks) -> Dispatcher:
        from weft.layout.placement_groups import experts_per_node
        from weft.parallel.experts.dispatch import EachChoice, PerMember, local_experts

        near = experts_per_node(ranks.mesh.layout)
        across = PerMember(ranks.across(near), local_experts(ranks))
        return EachChoice(PerMember(ranks.within(near, from_anywhere=True), across))
