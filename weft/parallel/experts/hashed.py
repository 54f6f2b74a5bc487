"""Similar tokens travel as one mean: the compressed exchange of LSH-MoE (Nie et al. 2024).

Tokens with the same hash that chose the same expert are sent as their mean. A hash has one number for each of some
random rotations: the axis that the rotated token is nearest to, with its sign. The expert's result for the mean stands
for all of its tokens; with ``layout.lsh_residual`` each token's difference from the mean is added to it.
"""

from functools import lru_cache, partial
from typing import Any

import torch

from weft.layout.boundary import untyped
from weft.models.experts import Arriving, Dispatcher, MovedRows, expert_counts
from weft.models.graph_parts import current_part, read
from weft.models.numbers import has_numbers
from weft.models.router import Choice
from weft.parallel.experts.dispatch import then
from weft.parallel.experts.expert_ranks import ExpertRanks
from weft.parallel.experts.rows import Awaited

T = torch.Tensor


class Hashed:
    """Dispatcher of LSH-MoE (Nie et al. 2024): similar tokens for the same expert are sent as one, their mean.

    Tokens with the same expert and the same hash form a bucket. The dispatcher ``inner`` sends the mean of each bucket,
    and the expert's result for the mean stands for all tokens of the bucket. A token that is alone in its bucket is
    sent unchanged. Where no gradients are computed, every token is sent. ``ranks``: the ranks that hold the experts.
    """

    def __init__(self, ranks: ExpertRanks, inner: Dispatcher) -> None:
        self.ranks, self.inner, self.layout = ranks, inner, ranks.mesh.layout

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        if not torch.is_grad_enabled():
            return then(self.inner.dispatch(x, choice), (None, choice, None))
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
        if self.layout.lsh_residual:
            of_choices = shared(means, buckets).unflatten(
                0, (-1, k)
            )  # [tokens, k, embed]
            apart = partial(read, each - of_choices, current_part())
        return then(arriving, (buckets, choice, apart))

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
            if apart is not None:
                each = each + apart()
            return torch.einsum("tk,tkd->td", weights.to(each.dtype), each)

        return home

    def _buckets(self, x: T, ids: T) -> tuple[T, T]:
        """Return the bucket of each choice, ``[tokens * k]``, and the expert of each bucket, ``[buckets]``."""
        if not has_numbers(x):
            return torch.arange(ids.numel(), device=x.device), ids.flatten()
        # [rotations, tokens, embed]
        turned = x.float() @ rotations(x.shape[1], self.layout.lsh, x.device)
        axis = turned.abs().argmax(-1)
        codes = 2 * axis + (turned.gather(-1, axis[..., None])[..., 0] > 0)
        _, code = torch.unique(codes, dim=1, return_inverse=True)  # [tokens]
        keys, buckets = torch.unique(ids * len(x) + code[:, None], return_inverse=True)
        return buckets.flatten(), keys // max(1, len(x))


def summed(rows: T, buckets: T, count: int) -> T:
    """Sum the rows of each bucket: ``[rows, ...]`` to ``[count, ...]``.

    ``buckets``: the bucket of each row; ``count``: number of buckets.
    """
    return MovedRows.apply(rows, *_ways(count), buckets)


def shared(sums: T, buckets: T) -> T:
    """Return for each row the entry of its bucket in ``sums``: ``[buckets, ...]`` to ``[rows, ...]``.

    ``buckets``: index of the bucket of each row.
    """
    return MovedRows.apply(sums, *_ways(len(sums))[::-1], buckets)


def _ways(count: int) -> tuple[Any, Any]:
    """Return the sum over buckets and the look-up of a bucket's row; each is the transpose of the other."""

    def add(rows: T, buckets: T) -> T:
        return rows.new_zeros(count, *rows.shape[1:]).index_add_(0, buckets, rows)

    return add, lambda sums, buckets: sums[buckets]


@lru_cache
def rotations(width: int, count: int, device: torch.device) -> T:
    """Return ``count`` random rotations of vectors of ``width`` elements: ``[count, width, width]`` on ``device``.

    They are the same on all ranks and in every run.
    """
    drawn = torch.randn(count, width, width, generator=torch.Generator().manual_seed(0))
    return torch.linalg.qr(drawn).Q.to(device)
