"""A row for each expert of a token, to the rank that has this expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.parallel.experts.dispatch_way import DispatchWay
from weft.registry import register

if TYPE_CHECKING:
    from weft.models.experts import Dispatcher
    from weft.parallel.experts.expert_ranks import ExpertRanks


@register(
    "dispatch",
    "all-to-all",
    title="Expert parallelism: a row per choice",
    paper="Lepikhin et al. 2020 (GShard)",
    recipe="experts.toml --layout shard=2,ep=2,dispatch=all-to-all",
    proof="tests/parallel/test_experts.py",
    figure="equal to 1e-10; typed to 1,024 ranks",
)
class RowForEachChoice(DispatchWay):
    """Sends a token once for each of its ``k`` experts: about ``T k (P - 1) / P`` rows per rank and direction (GShard,
    Lepikhin et al. 2020).

    ``T``: tokens of a rank; ``P``: number of ranks.
    """

    unequal = True

    def make(self, ranks: ExpertRanks) -> Dispatcher:
        from weft.parallel.experts.dispatch import AllToAll

        return AllToAll(ranks)
