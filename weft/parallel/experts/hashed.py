"""Similar tokens travel as one mean: the compressed exchange of LSH-MoE (Nie et al. 2024).

Of the tokens that chose an expert, those with the same hash are sent as their mean. The hash of each of some random
rotations is the axis that a token is nearest to, with its sign. What the expert makes of the mean stands for all of
them; with ``residual`` each gets what it differs from the mean by on top, as if the expert passed that through.
"""

from functools import lru_cache, partial
from typing import Any

import torch

from weft.layout.boundary import untyped
from weft.models.experts import (
    Arriving,
    Dispatched,
    Dispatcher,
    MovedRows,
    expert_counts,
)
from weft.models.graph_parts import current_part, read
from weft.models.numbers import has_numbers
from weft.models.router import Choice
from weft.parallel.experts.expert_ranks import ExpertRanks
from weft.parallel.experts.rows import Awaited

T = torch.Tensor


class Hashed:
    """Means of tokens by the ``inner`` way; one token in a bucket changes nothing. Without gradients all are sent."""

    def __init__(self, ranks: ExpertRanks, inner: Dispatcher) -> None:
        layout = ranks.mesh.layout
        self.ranks, self.inner, self.rotations, self.residual = (
            ranks,
            inner,
            layout.lsh,
            layout.lsh_residual,
        )

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        if not torch.is_grad_enabled():
            arriving = self.inner.dispatch(x, choice)
            return lambda: (found := arriving())._replace(
                meta=(found.meta, None, choice, None)
            )
        k = choice.ids.shape[1]
        with untyped():
            buckets, ids = self._buckets(x.detach(), choice.ids)
            share = 1 / expert_counts(buckets, len(ids)).to(x.dtype)[:, None]
            ones = choice.weights.new_ones(len(ids), 1)
        buckets, ids, ones, share = map(
            self.ranks.declared, (buckets, ids, ones, share)
        )
        each = x[:, None].expand(-1, k, -1)
        means = summed(each.flatten(0, 1), buckets, len(ids)) * share
        arriving = self.inner.dispatch(means, Choice(ones, ids[:, None]))
        apart = None
        if self.residual:
            apart = partial(
                read,
                each - shared(means, buckets).unflatten(0, (-1, k)),
                current_part(),
            )

        def arrived() -> Dispatched:
            found = arriving()
            return found._replace(meta=(found.meta, buckets, choice, apart))

        return arrived

    def combine(self, rows: T, meta: Any) -> Awaited:
        inner, buckets, choice, apart = meta
        back = self.inner.combine(rows, inner)
        if buckets is None:
            return back
        # of what is not dropped
        weights = choice.weights * (choice.ids < self.ranks.items // self.ranks.pieces)

        def home() -> T:
            # [tokens, k, embed]
            each = shared(back(), buckets).unflatten(0, choice.ids.shape)
            return torch.einsum(
                "tk,tkd->td",
                weights.to(each.dtype),
                each if apart is None else each + apart(),
            )

        return home

    def _buckets(self, x: T, ids: T) -> tuple[T, T]:
        """The bucket of each choice, ``[tokens * k]``, and the expert that each bucket is for."""
        if not has_numbers(x):
            return torch.arange(ids.numel(), device=x.device), ids.flatten()
        # [rotations, tokens, embed]
        turned = x.float() @ rotations(x.shape[1], self.rotations, x.device)
        axis = turned.abs().argmax(-1)
        codes = 2 * axis + (turned.gather(-1, axis[..., None])[..., 0] > 0)
        _, code = torch.unique(codes, dim=1, return_inverse=True)  # [tokens]
        keys, buckets = torch.unique(ids * len(x) + code[:, None], return_inverse=True)
        return buckets.flatten(), keys // max(1, len(x))


def summed(rows: T, buckets: T, count: int) -> T:
    """What the rows of each bucket add up to."""
    return MovedRows.apply(rows, *_ways(count), buckets)


def shared(sums: T, buckets: T) -> T:
    """The row of its bucket for each."""
    return MovedRows.apply(sums, *_ways(len(sums))[::-1], buckets)


def _ways(count: int) -> tuple[Any, Any]:
    """The two, each of which is the other's transpose."""
    return (
        lambda rows, buckets: rows.new_zeros(count, *rows.shape[1:]).index_add_(
            0, buckets, rows
        ),
        lambda sums, buckets: sums[buckets],
    )


@lru_cache
def rotations(width: int, count: int, device: torch.device) -> T:
    """So many random rotations, the same on all ranks and in every run: ``[count, width, width]``."""
    drawn = torch.randn(count, width, width, generator=torch.Generator().manual_seed(0))
    return torch.linalg.qr(drawn).Q.to(device)
