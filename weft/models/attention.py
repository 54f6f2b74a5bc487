"""Causal attention over packed documents: local kernels, and the operator that autograd and recompute see.

A *segment* is one rectangle of work: queries ``q0:q1`` against keys ``k0:k1`` of flattened token rows, causal (a
document against itself) or full (a later part of a document against an earlier one). Attention over several ranks
(:mod:`weft.parallel.context`) runs both kinds through the same kernels; everybody merges with :func:`join`.

The kernels are aten's flash attention ops: private names, used because they are the only ones that return the
log-sum-exp and accept a global one in backward. Traps they have on the CPU (rows without keys give lse = 0, empty
blocks kill the process) cannot occur here: a segment is never empty and a causal one has equal query and key ranges.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten

#: Side of the smallest causal squares that longer documents are cut into on the CPU.
SQUARE = 256
T = torch.Tensor


class Segment(NamedTuple):
    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    joins: bool = False  # its queries have met other keys before


def document_segments(cu_seqlens: T) -> list[Segment]:
    """One causal segment per document."""
    bounds = cu_seqlens.tolist()
    return [Segment(a, b, a, b, True) for a, b in pairwise(bounds) if b > a]


def attend_forward(q: T, k: T, v: T, segments: list[Segment]) -> tuple[T, T]:
    """Attention of disjoint query ranges. ``q, k, v``: ``[tokens, heads, head_dim]``.

    Returns ``out`` like ``q`` (zeros where no segment reaches) and ``lse`` ``[tokens, heads]`` (-inf there).
    """
    if _varlen(q, segments):
        return _varlen_forward(q, k, v, segments)
    k, v, q, pieces = _pieces(segments, k, v, q)
    if len(pieces) == 1 and pieces[0].q1 - pieces[0].q0 == q.shape[1]:
        cols = (slice(None), slice(pieces[0].k0, pieces[0].k1))
        out, lse = _forward(q, k[cols], v[cols], pieces[0].causal)
        return out.flatten(0, 1), lse.flatten(0, 1)
    covered = sum(s.q1 - s.q0 for s in segments) == q.shape[0] * q.shape[1]
    out = torch.empty_like(q) if covered else torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide(q.dtype), device=q.device)
    for s in pieces:
        rows, cols = (slice(None), slice(s.q0, s.q1)), (slice(None), slice(s.k0, s.k1))
        o, l = _forward(q[rows], k[cols], v[cols], s.causal)
        if s.joins:
            join(out[rows], lse[rows], o, l)
        else:
            out[rows], lse[rows] = o, l
    return out.flatten(0, 1), lse.flatten(0, 1)


def join(out: T, lse: T, o: T, l: T) -> None:
    """Merge attention to other keys, ``o`` and its log-sum-exp ``l``, into ``out`` and ``lse``, in place.

    ``out``: ``[..., head_dim]`` in :func:`wide` precision, ``lse``: ``[...]``; -inf, with zeros in ``out``, where no
    key has been seen. Ring attention (Liu et al. 2023, 2310.01889); logaddexp is exact where sigmoids overflow.
    """
    both = torch.logaddexp(lse, l)
    at = both.clamp_min(torch.finfo(both.dtype).min)  # rows that neither side has seen stay zero, not nan
    out.mul_((lse - at).exp_()[..., None]).addcmul_(o.to(out.dtype), (l - at).exp_()[..., None])
    lse.copy_(both)


def attend_backward(grad: T, q: T, k: T, v: T, out: T, lse: T, segments: list[Segment]) -> tuple[T, T, T]:
    """Gradients of q, k, v for these segments, given the *global* ``out`` and ``lse`` of their queries."""
    if _varlen(q, segments):
        return _varlen_backward(grad, q, k, v, out, lse, segments)
    k, v, q, grad, out, lse, pieces = _pieces(segments, k, v, q, grad, out, lse)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for s in pieces:
        rows, cols = (slice(None), slice(s.q0, s.q1)), (slice(None), slice(s.k0, s.k1))
        parts = _backward(grad[rows], q[rows], k[cols], v[cols], out[rows], lse[rows], s.causal)
        for total, share, where in zip((dq, dk, dv), parts, (rows, cols, cols), strict=True):
            total[where] += share
    return dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)


def _varlen(q: T, segments: list[Segment]) -> bool:
    """Whether one call of a GPU kernel can take all segments."""
    whole = _uniform(segments, len(q), len(q))
    return q.is_cuda and q.dtype not in (torch.float32, torch.float64) and not whole and all(s.causal for s in segments)


def _pieces(segments: list[Segment], k: T, v: T, q: T, *others: T) -> tuple[Any, ...]:
    """The tensors as ``[batch, tokens, ...]`` and what is to be computed in every row of that batch.

    Equal segments that tile all tokens are one batch. On the CPU causal squares are cut: the kernel there
    takes 512 keys at a time and computes with all of them, also with those that no query sees.
    """
    whole = _uniform(segments, len(q), len(k))
    sizes = whole or (len(q), len(k))
    batched = [x.unflatten(0, (-1, sizes[1])) for x in (k, v)] + [x.unflatten(0, (-1, sizes[0])) for x in (q, *others)]
    if whole:
        segments = [Segment(0, whole[0], 0, whole[1], segments[0].causal)]
    if q.device.type == "cpu" and q.dtype != torch.bfloat16:  # whose results are too coarse to be joined
        segments = [piece for s in segments for piece in _cut(s)]
    return *batched, segments


def _cut(s: Segment) -> list[Segment]:
    """A causal square as small causal squares and full rectangles that join their rows; a rectangle as it is."""
    half = (s.q1 - s.q0) // 2
    if not s.causal or half < SQUARE:
        return [s]
    q, k = s.q0 + half, s.k0 + half
    upper, lower = Segment(s.q0, q, s.k0, k, True), Segment(q, s.q1, k, s.k1, True)
    return [*_cut(upper), *_cut(lower), Segment(q, s.q1, s.k0, k, False, joins=True)]


def _uniform(segments: list[Segment], queries: int, keys: int) -> tuple[int, int] | None:
    """Common size if the segments are equal and tile all queries and keys in order."""
    if not segments:
        return None
    n, m = segments[0].q1 - segments[0].q0, segments[0].k1 - segments[0].k0
    alike = (Segment(i * n, i * n + n, i * m, i * m + m, segments[0].causal) for i in range(len(segments)))
    tiled = n * len(segments) == queries and m * len(segments) == keys
    return (n, m) if tiled and all(a == b for a, b in zip(alike, segments, strict=True)) else None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision in which log-sum-exps are kept and joined."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _heads_first(*xs: T) -> list[T]:
    return [x.transpose(1, 2) for x in xs]


def _forward(q: T, k: T, v: T, causal: bool) -> tuple[T, T]:
    """``[batch, seq, heads, head_dim]`` each; returns out alike and lse ``[batch, seq, heads]``."""
    group = q.shape[2] // k.shape[2] if q.is_cuda else 1  # the CPU's kernel lets query heads share key/value heads
    q, k, v = _heads_first(q, repeat_heads(k, group), repeat_heads(v, group))
    if not q.is_cuda:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    elif q.dtype in (torch.float32, torch.float64):
        scores = _scores(q, k, causal)
        lse = scores.logsumexp(-1)
        out = (scores - lse[..., None]).exp() @ v
    else:
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return out.transpose(1, 2), lse.transpose(1, 2)


def _backward(grad: T, q: T, k: T, v: T, out: T, lse: T, causal: bool) -> tuple[T, T, T]:
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2] if q.is_cuda else 1
    grad, q, k, v, out, lse = _heads_first(grad, q, repeat_heads(k, group), repeat_heads(v, group), out, lse)
    if not q.is_cuda:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    elif q.dtype in (torch.float32, torch.float64):
        p = (_scores(q, k, causal) - lse[..., None]).exp()
        ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        grads = (ds @ k, ds.mT @ q, p.mT @ grad)
    else:
        n, m = q.shape[2], k.shape[2]
        zero = torch.zeros((), dtype=torch.uint64, device=q.device)  # dropout state: there is no dropout
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, n, m, 0.0, causal, zero, zero
        )
    dq, dk, dv = _heads_first(*grads)
    return dq, fold_heads(dk, kv_heads), fold_heads(dv, kv_heads)


def _varlen_forward(q: T, k: T, v: T, segments: list[Segment]) -> tuple[T, T]:
    cu, longest = _cu(segments, q.device)
    out, lse = aten._flash_attention_forward(q, k, v, cu, cu, longest, longest, 0.0, True, False)[:2]
    return out, lse.transpose(0, 1)


def _varlen_backward(grad: T, q: T, k: T, v: T, out: T, lse: T, segments: list[Segment]) -> tuple[T, T, T]:
    cu, longest = _cu(segments, q.device)
    zero = torch.zeros((), dtype=torch.uint64, device=q.device)
    return aten._flash_attention_backward(
        grad, q, k, v, out, lse.transpose(0, 1).contiguous(), cu, cu, longest, longest, 0.0, True, zero, zero
    )


def _cu(segments: list[Segment], device: torch.device) -> tuple[T, int]:
    bounds = [segments[0].q0, *(s.q1 for s in segments)]
    cu = torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True)
    return cu, max(s.q1 - s.q0 for s in segments)


def repeat_heads(x: T, group: int) -> T:
    """Repeat key/value heads so that every query head has its own: ``[b, s, kv_heads, d] -> [b, s, heads, d]``."""
    return x if group == 1 else x.repeat_interleave(group, dim=2)


def fold_heads(grad: T, kv_heads: int) -> T:
    """Sum the gradients of the query heads that share a key/value head."""
    return grad if grad.shape[2] == kv_heads else grad.unflatten(2, (kv_heads, -1)).sum(3)


def _scores(q: T, k: T, causal: bool) -> T:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return scores


@torch.library.custom_op("weft::attention", mutates_args=())
def attention(q: T, k: T, v: T, cu_seqlens: T) -> tuple[T, T]:
    """Per-document causal attention on one device, opaque to ``torch.compile`` and kept whole by selective recompute.

    ``q``: ``[batch, seq, heads, head_dim]``; ``k, v`` with ``kv_heads``; ``cu_seqlens`` as in
    :class:`weft.data.batch.Batch`. Returns ``out`` like ``q`` and ``lse`` ``[batch * seq, heads]``.
    """
    out, lse = attend_forward(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), document_segments(cu_seqlens))
    return out.view(q.shape), lse.contiguous()


@attention.register_fake
def _(q: T, k: T, v: T, cu_seqlens: T) -> tuple[T, T]:
    return torch.empty_like(q), q.new_empty(q.shape[0] * q.shape[1], q.shape[2], dtype=wide(q.dtype))


@torch.library.custom_op("weft::attention_backward", mutates_args=())
def attention_backward(grad: T, q: T, k: T, v: T, out: T, lse: T, cu_seqlens: T) -> tuple[T, T, T]:
    g, fq, fk, fv, o = (x.flatten(0, 1) for x in (grad, q, k, v, out))
    dq, dk, dv = attend_backward(g, fq, fk, fv, o, lse, document_segments(cu_seqlens))
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


@attention_backward.register_fake
def _(grad: T, q: T, k: T, v: T, out: T, lse: T, cu_seqlens: T) -> tuple[T, T, T]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:3], *output, inputs[3])


def _attention_grad(ctx, grad, _):  # type: ignore[no-untyped-def]
    return *attention_backward(grad, *ctx.saved_tensors), None


attention.register_autograd(_attention_grad, setup_context=_save)
