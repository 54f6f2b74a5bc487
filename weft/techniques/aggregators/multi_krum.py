"""Multi-Krum: the mean of the gradients that Krum ranks first (Blanchard et al. 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register
from weft.sync.aggregator import Aggregator

if TYPE_CHECKING:
    import torch


@register(
    "aggregator",
    "multi-krum",
    title="Multi-Krum: the mean of the best of Krum's",
    paper="Blanchard et al. 2017",
    recipe="robust.toml --set resilience.aggregate=multi-krum",
    proof="tests/sync/test_robust_aggregation.py",
    figure="as Krum's",
)
class MultiKrum(Aggregator):
    """Takes the mean of the ``p - faulty - 2`` gradients that Krum ranks first, of ``p`` replicas' gradients (Blanchard
    et al. 2017).
    """

    more = 3

    def weights(self, gram: torch.Tensor, faulty: int) -> torch.Tensor:
        from weft.sync.robust_aggregation import krum_scores, mean_of, squared_distances

        best = krum_scores(squared_distances(gram), faulty).argsort(stable=True)
        return mean_of(best[: max(1, len(gram) - faulty - 2)], len(gram))
