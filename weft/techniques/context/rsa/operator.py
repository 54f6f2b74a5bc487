"""Ring Self-Attention (Li et al. 2021, 2105.13120): keys go around the ring and fill rows of scores, then values do.

Later schemes are compared with this baseline. There is no online softmax, so a rank holds the scores of its queries
against all keys, ``tokens^2 / ranks`` per head, and keeps them for backward. A rank sends as much as in ring attention,
in two rounds instead of one, by the same table of transfers. Of packed documents, only what a query reads is computed
and moved.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from weft.models.attention import fold_heads, set_backward
from weft.models.numbers import wide
from weft.parallel.context.tile_attention import TilePiece, Trip, trip_of

T = torch.Tensor


class Spot(NamedTuple):
    """A rectangle of the matrix of attention scores, of one block of queries and one block of keys.

    Attributes:
        ``q``: the rectangle's queries, as a slice of the block's flattened queries.
        ``k``: the rectangle's keys, as a slice of the block's flattened keys.
        ``at``: position of the rectangle in the tensor of scores, ``[batch, heads, seq held, seq]``.
        ``causal``: whether query ``i`` of the rectangle sees only its keys 0 to ``i``; otherwise every query sees all
            keys of the rectangle.
        ``flipped``: whether query ``i`` of a causal rectangle sees the keys from ``i`` on instead.
    """

    q: slice
    k: slice
    at: tuple[int, slice, slice, slice]
    causal: bool
    flipped: bool


def spots(trip: Trip, piece: TilePiece) -> Iterator[Spot]:
    start = sum(trip.lengths[: piece.k])
    for s in piece.segments:
        q, k = piece.rows.start + s.q0, piece.cols.start + s.k0
        n, m = s.q1 - s.q0, s.k1 - s.k0
        row, top = divmod(q, trip.lengths[piece.q])
        left = start + k % trip.lengths[piece.k]
        at = (row, slice(None), slice(top, top + n), slice(left, left + m))
        yield Spot(slice(q, q + n), slice(k, k + m), at, s.causal, s.flipped)


def _times(q: T, k: T) -> T:
    """Return ``[n, heads, d]`` by ``[m, kv_heads, d]``: ``[heads, n, m]``."""
    return torch.einsum("nkgd,mkd->kgnm", q.unflatten(1, (k.shape[1], -1)), k).flatten(
        0, 1
    )


def _weigh(p: T, x: T) -> T:
    """Return ``[heads, n, m]`` by ``[m, kv_heads, d]``: ``[n, heads, d]``."""
    return torch.einsum("kgnm,mkd->nkgd", p.unflatten(0, (x.shape[1], -1)), x).flatten(
        1, 2
    )


def _collect(p: T, x: T, kv_heads: int) -> T:
    """Return ``[heads, n, m]`` by ``[n, heads, d]``, summed over the query heads of each key head: ``[m, kv_heads,
    d]``.
    """
    return fold_heads(torch.einsum("hnm,nhd->mhd", p, x)[None], kv_heads)[0]


def _round(
    trip: Trip,
    q: T,
    block: T,
    compute: Callable[[T, T, TilePiece], T | None],
    gradient: bool = False,
) -> T:
    """``block`` (keys or values, ``[rows, tokens held, kv_heads, d]``) goes once round the ring, past own ``q``.

    With ``gradient``, ``compute`` returns what a piece adds to that of its block, which goes home and is returned.
    """
    here = trip.cut(block)
    held = {("q", b): [x] for b, x in trip.cut(q).items()} | {
        ("kv", b): [x] for b, x in here.items()
    }
    like = {"kv": [block[0, :0]], "dkv": [block[0, :0].to(wide(block.dtype))]}

    def step(query: list[T], visiting: list[T], piece: TilePiece) -> dict[str, list[T]]:
        gradients = compute(query[0], visiting[0], piece)
        return {} if gradients is None else {"dkv": [gradients[piece.cols]]}

    def merge(total: list[T], part: list[T]) -> None:
        total[0].add_(part[0])

    if not gradient:
        trip.run(held, {"kv": like["kv"]}, {}, step, merge)
        return block
    done = trip.run(held, like, {"dkv": (0.0,)}, step, merge)
    return trip.whole({b: done["dkv", b][0] for b in here})


@torch.library.custom_op("weft::ring_self_attention", mutates_args=())
def ring_self_attention(
    q: T,
    k: T,
    v: T,
    cu_seqlens: T,
    peers: Sequence[int],
    index: int,
    lengths: Sequence[int],
    window: int = 0,
) -> tuple[T, T]:
    """Compute attention of this rank's queries to the keys and values of all ranks, which hold contiguous blocks.

    Returns the output of attention with the shape of ``q``, and the softmax of the scores, ``[batch, heads, seq held,
    seq]``.

    Arguments:
        ``q``: queries of this rank's block, ``[batch, seq held, heads, head_dim]``.
        ``k``, ``v``: keys and values of this rank's block, ``[batch, seq held, kv_heads, head_dim]``.
        ``cu_seqlens``: boundaries of the documents in the flattened rows of all ranks.
        ``peers``: global numbers of the ranks, in the order of their blocks.
        ``index``: this rank's position among ``peers``.
        ``lengths``: for each rank's block, how many tokens of a row it holds; empty if all blocks have equally many.
        ``window``: number of tokens that a token sees, 0 for all.
    """
    trip, high = (
        trip_of(q, cu_seqlens, "rsa", peers, index, lengths, window),
        wide(q.dtype),
    )
    p = q.new_full(
        (q.shape[0], q.shape[2], q.shape[1], sum(trip.lengths)), -torch.inf, dtype=high
    )

    def score(query: T, keys: T, piece: TilePiece) -> None:
        for s in spots(trip, piece):
            scores = _times(query[s.q].to(high), keys[s.k].to(high)).mul_(
                q.shape[-1] ** -0.5
            )
            if s.causal:
                every = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
                scores.masked_fill_(
                    every.tril(-1) if s.flipped else every.triu(1), -torch.inf
                )
            p[s.at] = scores

    _round(trip, q, k, score)
    # in place: this matrix is what the scheme costs
    p.sub_(p.amax(-1, keepdim=True)).exp_()
    p.div_(p.sum(-1, keepdim=True))
    out = torch.zeros(q.shape, dtype=high, device=q.device)

    def average(query: T, values: T, piece: TilePiece) -> None:
        for s in spots(trip, piece):
            out[s.at[0], s.at[2]] += _weigh(p[s.at], values[s.k].to(high))

    _round(trip, q, v, average)
    return out.to(q.dtype), p


@torch.library.custom_op("weft::ring_self_attention_backward", mutates_args=())
def ring_self_attention_backward(
    grad: T, q: T, k: T, v: T, out: T, p: T, cu_seqlens: T, peers: Sequence[int], index: int, lengths: Sequence[int],
    window: int = 0,
) -> tuple[T, T, T]:  # fmt: skip
    trip, high, kv_heads = (
        trip_of(q, cu_seqlens, "rsa", peers, index, lengths, window),
        p.dtype,
        k.shape[2],
    )
    ds, dq = torch.zeros_like(p), torch.zeros(q.shape, dtype=high, device=q.device)

    def by_values(query: T, values: T, piece: TilePiece) -> T:
        dv = torch.zeros(values.shape, dtype=high, device=q.device)
        for s in spots(trip, piece):
            g = query[s.q].to(high)
            ds[s.at] = _times(g, values[s.k].to(high))
            dv[s.k] += _collect(p[s.at], g, kv_heads)
        return dv

    dv = _round(trip, grad, v, by_values, gradient=True)
    towards = (grad.to(high) * out.to(high)).sum(-1)  # [batch, seq held, heads]
    ds.sub_(towards.transpose(1, 2)[..., None]).mul_(p).mul_(q.shape[-1] ** -0.5)

    def by_keys(query: T, keys: T, piece: TilePiece) -> T:
        dk = torch.zeros(keys.shape, dtype=high, device=q.device)
        for s in spots(trip, piece):
            dq[s.at[0], s.at[2]] += _weigh(ds[s.at], keys[s.k].to(high))
            dk[s.k] += _collect(ds[s.at], query[s.q].to(high), kv_heads)
        return dk

    dk = _round(trip, q, k, by_keys, gradient=True)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@ring_self_attention.register_fake
def _(
    q: T,
    k: T,
    v: T,
    cu_seqlens: T,
    peers: Sequence[int],
    index: int,
    lengths: Sequence[int],
    window: int = 0,
) -> tuple[T, T]:
    row = sum(lengths) or q.shape[1] * len(peers)
    return q.new_empty(q.shape), q.new_empty(
        q.shape[0], q.shape[2], q.shape[1], row, dtype=wide(q.dtype)
    )


set_backward(ring_self_attention, ring_self_attention_backward)
