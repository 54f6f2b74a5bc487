"""Trimmed mean of the replicas' gradients, by coordinate (Yin et al. 2018)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register
from weft.sync.aggregator import Aggregator

if TYPE_CHECKING:
    import torch


@register(
    "aggregator",
    "trimmed-mean",
    title="Trimmed mean of the replicas' gradients, by coordinate",
    paper="Yin et al. 2018",
    recipe="robust.toml --set resilience.aggregate=trimmed-mean",
    proof="tests/sync/test_robust_aggregation.py",
    figure="as Krum's",
)
class TrimmedMean(Aggregator):
    """Takes the mean in each coordinate without the ``faulty`` largest and the ``faulty`` smallest values (Yin et al.
    2018).

    ``faulty``: the number of replicas that may send wrong gradients.
    """

    def combined(
        self, chunks: torch.Tensor, gram: torch.Tensor, faulty: int
    ) -> torch.Tensor:
        among = chunks.sort(dim=0).values
        return among[faulty : len(among) - faulty].mean(0)
