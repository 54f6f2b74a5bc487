"""Products and attention of batch-invariant forward passes (:mod:`weft.models.invariant`)."""

from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from weft.errors import UsageError
from weft.layout.mesh import Mesh
from weft.models.invariant import KEYS, TILE
from weft.recipe import ModelShape

T = torch.Tensor


def check_invariant(shape: ModelShape, mesh: Mesh) -> None:
    """Raise :class:`UsageError` if a model of ``shape`` on ``mesh`` does not support :func:`invariant`."""
    dense = not (shape.kv_rank or shape.mixtures or shape.kind or (shape.ffn or 0) % 2)
    softmax = {*map(shape.mixer_of, range(shape.layers))} == {"softmax"}
    one_cpu = mesh.layout.world == 1 and mesh.device.type == "cpu"
    if not (dense and softmax and one_cpu):
        raise UsageError("bits that no batch changes are for dense models with plain attention on one CPU, with an "
                         "even ffn; leave out invariant")  # fmt: skip


def by_tiles(product: Callable[[T], T], x: T) -> T:
    """Apply ``product`` to ``x`` ``[rows, in]`` in tiles of :data:`TILE` rows, the last tile padded.

    Every row is then computed by a kernel call of the same size, however many rows there are.
    """
    rows = len(x)
    if rows % TILE:
        x = F.pad(x, (0, 0, 0, -rows % TILE))
    return torch.cat([product(tile) for tile in x.split(TILE)])[:rows]


class Reach(NamedTuple):
    """Neighbouring queries of a text for which the same range of keys is read.

    ``first:last``: positions of the queries. ``low:high``: positions of the keys; both bounds are multiples of
    :data:`KEYS`.
    """

    first: int
    last: int
    low: int
    high: int


def reaches(first: int, last: int, window: int) -> Iterator[Reach]:
    """Yield the queries at positions ``first:last`` of a text, grouped by the range of keys that is read for them.

    ``window``: the number of tokens that a token sees, itself included; 0: all earlier ones.
    """

    def keys(at: int) -> tuple[int, int]:
        first = max(0, at - window + 1) if window else 0
        return first // KEYS * KEYS, (at // KEYS + 1) * KEYS

    for (low, high), queries in groupby(range(first, last), key=keys):
        places = list(queries)
        yield Reach(places[0], places[-1] + 1, low, high)


def bias_of(reach: Reach, window: int, group: int, like: T) -> T:
    """Return the attention bias of the queries of ``reach``: 0 for a key that the query sees, -inf for others.

    The shape is ``[queries, 1, group, keys]``. ``window``: the number of tokens that a token sees, itself included; 0:
    all earlier ones. ``group``: query heads per key head. ``like``: a tensor of the result's type and device.
    """
    at = torch.arange(reach.first, reach.last, device=like.device)[:, None]
    keys = torch.arange(reach.low, reach.high, device=like.device)
    return hiding_bias(at, keys, window, like)[:, None, None].expand(-1, 1, group, -1)


def hiding_bias(at: T, keys: T, window: int, like: T) -> T:
    """Return an attention bias: 0 where the query sees the key, and -inf elsewhere.

    ``at`` and ``keys``: positions of queries and of keys, broadcast to the result's shape. ``window``: the number of
    tokens that a token sees, itself included; 0: all earlier ones. ``like``: a tensor of the result's type.
    """
    hidden = (keys > at) | (keys <= at - window) if window else keys > at
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def attend_each(q: T, k: T, v: T, bias: T) -> tuple[T, T]:
    """Attend with every query of ``q`` ``[queries, heads, width]`` as a batch entry of its own.

    ``k, v``: ``[1, keys, kv_heads, width]`` if all queries share them, else ``[queries, keys, kv_heads, width]``.
    ``bias``: result of :func:`bias_of`. Returns outputs like ``q`` and log-sum-exps ``[queries, heads]``.
    """
    k, v = (each.transpose(1, 2).expand(len(q), -1, -1, -1) for each in (k, v))
    shared = q.unflatten(1, (k.shape[1], -1))  # [queries, kv_heads, group, width]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        shared, k, v, 0.0, False, attn_mask=bias
    )
    return out.flatten(1, 2), lse.flatten(1, 2)


def attend_documents(q: T, k: T, v: T, bounds: list[int], window: int) -> tuple[T, T]:
    """Compute causal attention within each document, with bitwise the same results in every batch.

    ``q, k, v``: ``[tokens, heads or kv_heads, width]``. ``bounds``: index of the first token of each document, and the
    number of all tokens. ``window``: the number of tokens that a token sees, itself included; 0: all earlier ones.
    Returns ``out`` like ``q`` and log-sum-exps ``[tokens, heads]``.
    """
    out = torch.zeros_like(q)
    lse = torch.zeros(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for a, b in pairwise(bounds):
        keys, values = (
            F.pad(each[a:b], (0, 0, 0, 0, 0, (a - b) % KEYS))[None] for each in (k, v)
        )
        for reach in reaches(0, b - a, window):
            rows = slice(a + reach.first, a + reach.last)
            cols = slice(reach.low, reach.high)
            bias = bias_of(reach, window, q.shape[1] // k.shape[1], q)
            out[rows], lse[rows] = attend_each(
                q[rows], keys[:, cols], values[:, cols], bias
            )
    return out, lse
