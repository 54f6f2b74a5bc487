"""Flag Aggregator: the mean direction in the subspace on which most replicas agree (Almasi et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register
from weft.sync.aggregator import Aggregator

if TYPE_CHECKING:
    import torch


#: Turns of reweighting, and the weight of the differences between gradients in the subspace.
FLAG_TURNS, DIFFERENCES = 5, 1.0


@register(
    "aggregator",
    "flag",
    title="Flag Aggregator: the mean direction in the subspace that replicas agree on",
    paper="Almasi et al. 2024",
    recipe="robust.toml --set resilience.aggregate=flag",
    proof="tests/sync/test_robust_aggregation.py",
    figure="as Krum's",
)
class Flag(Aggregator):
    """Takes the mean of the gradients' directions, projected onto a subspace on which most of them agree (Almasi et al.
    2024). The subspace has about half as many dimensions as there are gradients. It has the least sum of distances to
    the gradients' directions and to the pairwise differences of these directions. Iterations find it from the
    gradients' inner products alone, because weighted sums of the gradients span it. The result has the gradients'
    median length, unlike in the program of the paper's authors. Equal gradients are therefore returned unchanged, and a
    gradient that is scaled up counts no more than the others.
    """

    def weights(self, gram: torch.Tensor, faulty: int) -> torch.Tensor:
        import torch

        from weft.sync.robust_aggregation import squared_distances

        count, rank = len(gram), len(gram) // 2 + 1
        norms = gram.diag().sqrt()
        lengths = norms.clamp(min=1e-300)
        cosines = gram / lengths[:, None] / lengths[None]
        apart = squared_distances(cosines)  # between directions
        by_own, by_pair = (
            torch.ones(count, dtype=torch.float64),
            torch.ones_like(cosines),
        )
        sums = seen = torch.empty(0)
        for _ in range(FLAG_TURNS):
            pairs = (
                DIFFERENCES
                / (count * max(1, count - 1))
                * by_pair
                / apart.clamp(min=1e-300)
            )
            pairs = torch.where(apart > 1e-20, pairs, 0.0)
            spread = torch.diag(by_own + 2 * pairs.sum(1)) - 2 * pairs
            sums = subspace(cosines, spread, rank)
            # [replicas, rank], what the subspace has of each direction
            seen = cosines @ sums
            within = seen @ seen.T
            by_own = ((within.diag() - 1).abs() + 1e-7).rsqrt()
            by_pair = (
                (squared_distances(within) / apart.clamp(min=1e-300) - 1).abs() + 1e-7
            ).rsqrt()
        return sums @ seen.mean(0) * norms.median() / lengths


def subspace(inner: torch.Tensor, spread: torch.Tensor, rank: int) -> torch.Tensor:
    """Return an orthonormal basis of the subspace of dimension ``rank`` on which most of the given vectors agree.

    ``inner``: the vectors' inner products, ``[vectors, vectors]``. ``spread``: weights of the vectors and of their
    differences as a positive semidefinite matrix ``S``, ``[vectors, vectors]``. With the vectors as columns of ``X``
    the basis consists of the first ``rank`` left singular vectors of ``X C``, where ``C C^T = S``. The basis is
    returned as coefficients of the vectors, ``[vectors, rank]``, with fewer columns if ``X C`` has a smaller rank.
    """
    import torch

    values, vectors = torch.linalg.eigh(spread)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    # squared singular values, the smallest first
    squares, turned = torch.linalg.eigh(root @ inner @ root)
    squares, turned = squares[-rank:], turned[:, -rank:]
    nonzero = squares > 1e-12 * squares[-1]
    return root @ turned[:, nonzero] / squares[nonzero].sqrt()
