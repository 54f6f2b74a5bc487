"""Dispatch of tokens or of expert weights, whichever is less, per layer and pass (after Tutel, Hwang et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.parallel.experts.dispatch_way import DispatchWay
from weft.registry import register

if TYPE_CHECKING:
    from weft.models.experts import Dispatcher
    from weft.parallel.experts.expert_ranks import ExpertRanks


@register(
    "dispatch",
    "adaptive",
    title=(
        "What sends least, tokens or experts, chosen in each layer and pass by "
        "counted bytes; fewer experts than ranks cut in their width"
    ),
    paper="Hwang et al. 2023 (Tutel)",
    recipe="experts.toml --layout shard=2,ep=2,dispatch=adaptive",
    proof="tests/parallel/test_experts.py",
    figure=(
        "equal to 1e-10; the least bytes in 1,000 of 1,000 random settings; switching"
        " in every layer and pass changes no loss beyond 1e-12; tokens in pieces that"
        " travel while others are computed, forward and backward; chosen by bytes "
        "alone: where ranks share two cores it takes 1.18 times as long as "
        "`all-to-all` (`bench/experts.py`)"
    ),
)
class LeastBytes(DispatchWay):
    """Counts in every pass how many elements each way of exchanging tokens or expert weights would send, and uses the
    way that sends least (Tutel, Hwang et al. 2023).
    """

    copies = True

    def make(self, ranks: ExpertRanks) -> Dispatcher:
        from weft.techniques.dispatch.adaptive.options import Adaptive

        return Adaptive(ranks)
