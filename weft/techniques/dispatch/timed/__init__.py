"""Dispatch of tokens or of expert weights, as was faster in the run's trials (after Tutel, Hwang et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.parallel.experts.dispatch_way import DispatchWay
from weft.refusal import Rule
from weft.registry import register

if TYPE_CHECKING:
    from weft.models.experts import Dispatcher
    from weft.parallel.experts.expert_ranks import ExpertRanks

#: A pass that is computed again must take the way that it took.
RECOMPUTED = Rule(
    "timed dispatch with recompute",
    "layout train",
    lambda a: a.layout.ep > 1 and a.train.recompute != "none",
    "layout.dispatch = 'timed' tries another way in each of its first passes, and train.recompute = "
    "{0.train.recompute!r} would repeat a pass in another way",
    "use dispatch = 'adaptive', or recompute = 'none'",
)
#: The clock of an exchange would count what others do meanwhile, in other ways.
SEVERAL = Rule(
    "timed dispatch in pieces",
    "layout",
    lambda a: a.layout.ep > 1 and (a.layout.pieces != 1 or bool(a.layout.overlap)),
    "layout.dispatch = 'timed' measures one exchange at a time, and several are under way with layout.pieces = "
    "{0.layout.pieces} and layout.overlap = {0.layout.overlap!r}",
    "use dispatch = 'adaptive', or leave out pieces and overlap",
)


@register(
    "dispatch",
    "timed",
    rules=(RECOMPUTED, SEVERAL),
    title=(
        "What takes least time, tokens or experts on their way, measured in a run's "
        "own passes"
    ),
    paper="Hwang et al. 2023 (Tutel)",
    recipe="experts.toml --layout shard=2,ep=2,dispatch=timed",
    proof="tests/parallel/test_experts.py",
    figure=(
        "losses of one device's way to 1e-12 while every option is tried; all ranks "
        "take the same one; experts that are cut in their state alone take 0.70 and "
        "0.98 times as long (quartiles 0.52 to 1.90 and 0.61 to 2.78, at a load of "
        "15.8, which tells nothing from `all-to-all`) (`bench/experts.py`)"
    ),
)
class FastestInTrials(DispatchWay):
    """Times each way of exchanging tokens or expert weights in some passes, and uses the fastest in all others (Tutel,
    Hwang et al. 2023).
    """

    copies = True

    def make(self, ranks: ExpertRanks) -> Dispatcher:
        from weft.techniques.dispatch.timed.choice import TimedDispatch

        return TimedDispatch(ranks)
