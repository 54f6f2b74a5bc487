"""One copy of a token to each rank that has any of its experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.parallel.experts.dispatch_way import DispatchWay
from weft.registry import register

if TYPE_CHECKING:
    from weft.models.experts import Dispatcher
    from weft.parallel.experts.expert_ranks import ExpertRanks


@register(
    "dispatch",
    "per-rank",
    title="Expert parallelism: one copy of a token to each rank",
    paper="DeepSeek-AI 2025 (DeepEP)",
    recipe="experts.toml --layout shard=2,ep=2,dispatch=per-rank",
    proof="tests/parallel/test_experts.py",
    figure="equal to 1e-10; typed to 1,024 ranks",
)
class CopyForEachRank(DispatchWay):
    """Sends a token once to each rank that has some of its experts (DeepEP, DeepSeek-AI 2025). The receiving rank sends
    back the sum of their outputs.
    """

    unequal = True

    def make(self, ranks: ExpertRanks) -> Dispatcher:
        from weft.parallel.experts.dispatch import per_rank

        return per_rank(ranks)
