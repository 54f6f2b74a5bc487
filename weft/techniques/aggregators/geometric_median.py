"""Geometric median of the replicas' gradients (Pillutla et al. 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register
from weft.sync.aggregator import Aggregator

if TYPE_CHECKING:
    import torch


#: The most turns of reweighting, and when the weights stand.
MEDIAN_TURNS, MEDIAN_STANDS = 2000, 1e-13


@register(
    "aggregator",
    "geometric-median",
    title="Geometric median of the replicas' gradients",
    paper="Pillutla et al. 2019",
    recipe="robust.toml --set resilience.aggregate=geometric-median",
    proof="tests/sync/test_robust_aggregation.py",
    figure="as Krum's",
)
class GeometricMedian(Aggregator):
    """Takes the point with the least sum of distances to all gradients, by Weiszfeld's iterations (Pillutla et al.
    2019).

    The point is a weighted mean of the gradients, so that the gradients' inner products suffice to compute its
    distances.
    """

    def weights(self, gram: torch.Tensor, faulty: int) -> torch.Tensor:
        import torch

        count = len(gram)
        weights = torch.full((count,), 1 / count, dtype=torch.float64)
        least = 1e-12 * gram.diag().median().sqrt().clamp(min=1e-300)
        for _ in range(MEDIAN_TURNS):
            inner = gram @ weights
            distances = (
                (gram.diag() - 2 * inner + weights @ inner)
                .clamp(min=0)
                .sqrt()
                .clamp(min=least)
            )
            before, weights = weights, (1 / distances) / (1 / distances).sum()
            if (weights - before).abs().max() < MEDIAN_STANDS:
                break
        return weights
