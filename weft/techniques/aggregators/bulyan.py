"""Bulyan: in each coordinate the mean around the median of the gradients that Krum chooses (El Mhamdi et al. 2018)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register
from weft.sync.aggregator import Aggregator

if TYPE_CHECKING:
    import torch


@register(
    "aggregator",
    "bulyan",
    title="Bulyan: around the median of what Krum chooses",
    paper="El Mhamdi et al. 2018",
    recipe="robust.toml --layout dp=7 --set resilience.aggregate=bulyan",
    proof="tests/sync/test_robust_aggregation.py",
    figure="as Krum's, where 1 of 7 sends garbage",
)
class Bulyan(Aggregator):
    """Selects some gradients by repeated Krum, then averages the selected values of each coordinate without outliers
    (El Mhamdi et al. 2018). Of ``p`` gradients, ``faulty`` may be wrong. Krum is applied ``p - 2 faulty`` times, and
    selects one more gradient each time. In each coordinate, the ``2 faulty`` selected values that are farthest from
    their median are left out of the mean.
    """

    each = 4
    more = 3

    def combined(
        self, chunks: torch.Tensor, gram: torch.Tensor, faulty: int
    ) -> torch.Tensor:
        from weft.sync.robust_aggregation import krum_scores, squared_distances

        distances, left, chosen = squared_distances(gram), list(range(len(gram))), []
        for _ in range(max(1, len(gram) - 2 * faulty)):
            best = int(krum_scores(distances[left][:, left], faulty).argmin())
            chosen.append(left.pop(best))
        among = chunks[chosen].sort(dim=0).values  # [chosen, elements]
        lower, upper = among[(len(among) - 1) // 2], among[len(among) // 2]
        nearest = (
            (among - (lower + upper) / 2)
            .abs()
            .argsort(dim=0, stable=True)[: max(1, len(among) - 2 * faulty)]
        )
        return among.gather(0, nearest).mean(0)
