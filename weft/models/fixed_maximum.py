"""Attention over parts of the keys whose results just add, as all parts share one maximum that was fixed before.

Softmax over keys subtracts the largest score, so that no exponential overflows. Parts that each subtract their own must
be rescaled when they are merged. With one number for all parts nothing is rescaled: a part's weighted values and its
weights are added to those before (FlashDecoding++, Hong et al. 2023, 2311.01282). The result is exact while no score is
so far from that number that its exponential overflows or all vanish. That shows in the sums, and the caller computes
such queries again in another way.
"""

import math

import torch

from weft.models.numbers import wide

T = torch.Tensor

#: How far below the fixed maximum all scores of a query may lie. Exponentials that count are then normal numbers.
DEPTH = {torch.float32: 50.0, torch.float64: 600.0}


class FixedSums:
    """Attention of some queries to keys that come in several calls of :meth:`add`. Exponentials use one fixed maximum
    instead of a running one, so that no sum is rescaled. ``q``: the queries, ``[kv_heads, rows, width]``; queries of
    all query heads that share a key head are rows. ``highest``: the fixed maximum of the scores, a number, or one for
    each query, ``[kv_heads, rows, 1]``; None: for each query, its largest score among the first keys.
    """

    def __init__(self, q: T, highest: T | float | None = None) -> None:
        dtype = wide(q.dtype)
        self._q = q.to(dtype) * q.shape[-1] ** -0.5
        self._highest = highest
        self._values: T | None = None
        self._weights = self._q.new_zeros(*q.shape[:2], 1)

    def add(self, keys: T, values: T, hidden: T | None = None) -> None:
        """Add keys and values to the attention. ``keys``, ``values``: ``[kv_heads, tokens, width]``. ``hidden``: bool
        ``[rows, tokens]``, True where a row does not see a key; None: all rows see all keys.
        """
        dtype = self._q.dtype
        # [kv_heads, rows, tokens]: few rows, so that the product reads each key once
        scores = torch.bmm(self._q, keys.to(dtype).transpose(1, 2))
        if self._highest is None:
            self._highest = scores.amax(-1, keepdim=True)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        weights = scores.sub_(self._highest).exp_()
        self._weights += weights.sum(-1, keepdim=True)
        if self._values is None:
            self._values = torch.bmm(weights, values.to(dtype))
        else:
            self._values.baddbmm_(weights, values.to(dtype))

    @property
    def exact(self) -> bool:
        """Whether the fixed maximum fitted: no exponential has overflowed, and no query's sum has become so small that
        precision is lost. If it is False, the attention must be computed again in another way.
        """
        assert self._values is not None
        least = math.exp(-DEPTH[self._weights.dtype])
        # not a number fails both comparisons
        fits = (self._weights >= least).all() & torch.isfinite(self._weights).all()
        return bool(fits & torch.isfinite(self._values).all())

    @property
    def out(self) -> T:
        """The attention of all queries to the keys so far, ``[kv_heads, rows, width]``."""
        assert self._values is not None
        return self._values / self._weights

    @property
    def lse(self) -> T:
        """Log-sum-exps of the scores of all queries over the keys so far, ``[kv_heads, rows]``."""
        assert self._highest is not None
        return (self._weights.log() + self._highest).squeeze(-1)


def query_rows(q: T, kv_heads: int) -> T:
    """Return the queries ``q`` ``[tokens, heads, width]`` as ``[kv_heads, tokens * group, width]``, where ``group``
    query heads share a key head.
    """
    return q.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)


def rows_by_token(rows: T, tokens: int) -> T:
    """Undo :func:`query_rows`: return ``[kv_heads, tokens * group, ...]`` as ``[tokens, heads, ...]``."""
    return rows.unflatten(1, (tokens, -1)).transpose(0, 1).flatten(1, 2)
