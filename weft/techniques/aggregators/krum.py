"""Krum: the one replica's gradient that is nearest to its neighbours (Blanchard et al. 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register
from weft.sync.aggregator import Aggregator

if TYPE_CHECKING:
    import torch


@register(
    "aggregator",
    "krum",
    title="Krum: the replica's gradient nearest to its neighbours",
    paper="Blanchard et al. 2017",
    recipe="robust.toml",
    proof="tests/sync/test_robust_aggregation.py",
    figure=(
        "equal to a plain program to 1e-6; bytes of a ring's sum and p² numbers; loss"
        " within 5 % of a run without garbage where 2 of 7 send it (turned, scaled, "
        "noise, not finite)"
    ),
)
class Krum(Aggregator):
    """Takes the one gradient with the least sum of squared distances to its nearest neighbours (Blanchard et al. 2017).
    Of ``p`` gradients, ``faulty`` may be wrong. The sum for a gradient goes over its ``p - faulty - 2`` nearest other
    gradients.
    """

    more = 3

    def weights(self, gram: torch.Tensor, faulty: int) -> torch.Tensor:
        from weft.sync.robust_aggregation import krum_scores, mean_of, squared_distances

        return mean_of(
            krum_scores(squared_distances(gram), faulty).argmin()[None], len(gram)
        )
