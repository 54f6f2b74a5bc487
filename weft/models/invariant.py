"""Forward passes in which a token's numbers do not depend, to the last bit, on what stands beside it in the row.

Kernels choose how they add up by the shapes that they are given: a product of one row ends in other bits than the same
row in a product of many, and attention cuts keys by how many there are (He et al. 2025, "Defeating Nondeterminism in
LLM Inference"). In here (:func:`invariant`) products are of :data:`TILE` rows each, the last filled up, and every query
is attended to for itself, with its keys cut where their positions in the text are multiples of :data:`KEYS`. So an
engine that reads texts in pieces, beside others, comes to what training computes of whole texts. What is left (norms,
activations, softmax) works row by row; with rows in a multiple of :data:`TILE` nothing is the rest of a vector.

The kernels do not promise any of this. Tests hold it, for this PyTorch on the CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from weft.errors import UsageError
from weft.layout.mesh import Mesh
from weft.recipe import ModelShape

T = torch.Tensor

TILE, KEYS = 16, 64

_on: ContextVar[bool] = ContextVar("invariant", default=False)


@contextmanager
def invariant(on: bool = True) -> Iterator[None]:
    """What is computed in here is computed alike in any batch; the tokens of a row must be a multiple of TILE."""
    token = _on.set(on)
    try:
        yield
    finally:
        _on.reset(token)


def is_invariant() -> bool:
    return _on.get()


def check_invariant(shape: ModelShape, mesh: Mesh) -> None:
    """Raises :class:`UsageError` if a model on ``mesh`` cannot be computed alike in every batch."""
    other = (
        shape.kv_rank
        or shape.mixtures
        or shape.kind
        or (shape.ffn or 0) % 2
        or mesh.layout.world > 1
    )
    if (
        other
        or mesh.device.type != "cpu"
        or {*map(shape.mixer_of, range(shape.layers))} != {"softmax"}
    ):
        raise UsageError("bits that no batch changes are for dense models with plain attention on one CPU, with an "
                         "even ffn; leave out invariant")  # fmt: skip


def by_tiles(product: Callable[[T], T], x: T) -> T:
    """``product`` of ``[rows, in]``, so many rows at once."""
    rows = len(x)
    if rows % TILE:
        x = F.pad(x, (0, 0, 0, -rows % TILE))
    return torch.cat([product(tile) for tile in x.split(TILE)])[:rows]


class Reach(NamedTuple):
    """Queries at positions ``first:last`` of a text, whose keys are cut alike: they are looked for in ``low:high``."""

    first: int
    last: int
    low: int
    high: int


def reaches(first: int, last: int, window: int) -> Iterator[Reach]:
    """The queries at positions ``first:last``, each with all keys up to itself or those in its window."""

    def keys(at: int) -> tuple[int, int]:
        return (max(0, at - window + 1) // KEYS * KEYS if window else 0), (
            at // KEYS + 1
        ) * KEYS

    for (low, high), queries in groupby(range(first, last), key=keys):
        places = list(queries)
        yield Reach(places[0], places[-1] + 1, low, high)


def bias_of(reach: Reach, window: int, group: int, like: T) -> T:
    """0 for the keys that each query sees and -inf for others: ``[queries, 1, group, keys]``."""
    at = torch.arange(reach.first, reach.last, device=like.device)[:, None]
    keys = torch.arange(reach.low, reach.high, device=like.device)
    hidden = (keys > at) | (keys <= at - window) if window else keys > at
    return (
        like.new_zeros(hidden.shape)
        .masked_fill_(hidden, -torch.inf)[:, None, None]
        .expand(-1, 1, group, -1)
    )


def attend_each(q: T, k: T, v: T, bias: T) -> tuple[T, T]:
    """Attention of every query for itself: ``[queries, heads, width]`` and log-sum-exps ``[queries, heads]``.

    ``k, v``: of all queries, or of each, ``[1 or queries, keys, kv_heads, width]``.
    """
    k, v = (each.transpose(1, 2).expand(len(q), -1, -1, -1) for each in (k, v))
    shared = q.unflatten(1, (k.shape[1], -1))  # [queries, kv_heads, group, width]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        shared, k, v, 0.0, False, attn_mask=bias
    )
    return out.flatten(1, 2), lse.flatten(1, 2)


def attend_documents(q: T, k: T, v: T, bounds: list[int], window: int) -> tuple[T, T]:
    """Causal attention of documents, which begin at ``bounds``: ``[tokens, heads or kv_heads, width]``."""
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
