"""All tokens to all ranks, in messages of fixed size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.parallel.experts.dispatch_way import DispatchWay
from weft.registry import register

if TYPE_CHECKING:
    from weft.models.experts import Dispatcher
    from weft.parallel.experts.expert_ranks import ExpertRanks


@register(
    "dispatch",
    "all-gather",
    title="Expert parallelism: all tokens to all",
    paper="Rajbhandari et al. 2022 (DeepSpeed-MoE)",
    recipe="experts.toml --layout shard=2,ep=2,dispatch=all-gather",
    proof="tests/parallel/test_experts.py",
    figure="equal to 1e-10; typed to 1,024 ranks",
)
class AllTokensToAll(DispatchWay):
    """Sends each of a rank's ``T`` tokens to all ``P`` ranks: each rank sends ``T (P - 1)`` rows on the way to the
    experts, and as many on the way back (DeepSpeed-MoE, Rajbhandari et al. 2022).
    """

    def make(self, ranks: ExpertRanks) -> Dispatcher:
        from weft.parallel.experts.dispatch import AllGather

        return AllGather(ranks)
