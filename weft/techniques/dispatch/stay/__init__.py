"""Tokens that stay on the rank of their expert while a text is written (ExFlow, Yao et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.parallel.experts.dispatch_way import DispatchWay
from weft.registry import register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.models.experts import Dispatcher
    from weft.models.paged import Pages
    from weft.models.transformer import Transformer
    from weft.parallel.experts.dispatch_way import DecodePass
    from weft.parallel.experts.expert_ranks import ExpertRanks


@register(
    "dispatch",
    "stay",
    title=(
        "One exchange per layer while a text is written: tokens stay with their expert, "
        "and the context is gathered once per pass"
    ),
    paper="Yao et al. 2024 (ExFlow)",
    recipe="experts.toml --layout shard=2,ep=2,dispatch=stay",
    proof="tests/generate/test_stay.py",
    figure=(
        "tokens and log-probabilities of one rank to 1e-10; one exchange of tokens per "
        "layer, and rows as a walk over one device's choices says; with one expert per "
        "token placed by the integer programs 3.19 times fewer rows per token and layer "
        "than the two of tokens that return (1.55 times fewer with those for the "
        "context), with two experts 1.70 times fewer (1.29); over links of 2 Mbit/s "
        "2.53 times as fast as `per-rank`, 1.93 with two experts (`bench/staying.py`)"
    ),
)
class StayWithExpert(DispatchWay):
    """Sends a token that is being generated to a rank of its experts, and lets it stay there for the attention of its
    next layer (ExFlow, Yao et al. 2024). Every rank caches the keys and values of all tokens, so that attention can run
    on any rank. In training and while prompts are read, tokens come back after each layer: a token travels once to each
    rank that has some of its experts.
    """

    unequal = True
    whole_context = True

    def make(self, ranks: ExpertRanks) -> Dispatcher:
        from weft.parallel.experts.dispatch import per_rank

        return per_rank(ranks)

    def decode_pass(self, model: Transformer, pages: Sequence[Pages]) -> DecodePass:
        from weft.techniques.dispatch.stay.decode import StayingTokens

        return StayingTokens(model, pages)
