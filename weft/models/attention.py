"""Causal attention over packed documents: local kernels, and the operator that autograd and recompute see.

A *segment* is one rectangle of work: queries ``q0:q1`` against keys ``k0:k1`` of flattened token rows, causal (a document
against itself) or full (a later part of a document against an earlier one). One device needs only causal segments; ring
attention (:mod:`weft.parallel.context`) runs both kinds through the same kernels and merges by log-sum-exp.

The kernels are aten's flash attention ops: private names, used because they are the only ones that return the
log-sum-exp and accept a global one in backward. Traps they have on the CPU (rows without keys give lse = 0, empty blocks
kill the process) cannot occur here: a segment is never empty and a causal one has equal query and key ranges.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

aten = torch.ops.aten


class Segment(NamedTuple):
    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool


def document_segments(cu_seqlens: torch.Tensor) -> list[Segment]:
    """One causal segment per document."""
    bounds = cu_seqlens.tolist()
    return [Segment(a, b, a, b, True) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]


def attend_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: list[Segment]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of disjoint query ranges. ``q, k, v``: ``[tokens, heads, head_dim]``.

    Returns ``out`` like ``q`` (zeros where no segment reaches) and ``lse`` ``[tokens, heads]`` (-inf there).
    """
    whole = _uniform(segments, len(q))
    if whole:  # documents of equal length are one batch
        out, lse = _forward(*(x.unflatten(0, (-1, whole)) for x in (q, k, v)), causal=True)
        return out.flatten(0, 1), lse.flatten(0, 1)
    if q.is_cuda and q.dtype != torch.float32 and q.dtype != torch.float64 and all(s.causal for s in segments):
        return _varlen_forward(q, k, v, segments)
    covered = sum(s.q1 - s.q0 for s in segments) == len(q)
    out = torch.empty_like(q) if covered else torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=_wide(q.dtype), device=q.device)
    for s in segments:
        o, l = _forward(q[None, s.q0 : s.q1], k[None, s.k0 : s.k1], v[None, s.k0 : s.k1], s.causal)
        out[s.q0 : s.q1], lse[s.q0 : s.q1] = o[0], l[0]
    return out, lse


def attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: list[Segment],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v for these segments, given the *global* ``out`` and ``lse`` of their queries."""
    whole = _uniform(segments, len(q))
    if whole:
        grads = _backward(*(x.unflatten(0, (-1, whole)) for x in (grad, q, k, v, out, lse)), causal=True)
        return tuple(g.flatten(0, 1) for g in grads)  # type: ignore[return-value]
    if q.is_cuda and q.dtype != torch.float32 and q.dtype != torch.float64 and all(s.causal for s in segments):
        return _varlen_backward(grad, q, k, v, out, lse, segments)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for s in segments:
        rows, cols = slice(s.q0, s.q1), slice(s.k0, s.k1)
        parts = _backward(*(x[None, rows] for x in (grad, q)), *(x[None, cols] for x in (k, v)), out[None, rows],
                          lse[None, rows], s.causal)  # fmt: skip
        for total, share, where in zip((dq, dk, dv), parts, (rows, cols, cols), strict=True):
            total[where] += share[0]
    return dq, dk, dv


def _uniform(segments: list[Segment], tokens: int) -> int:
    """Common length if the segments are equal documents that tile all tokens, else 0."""
    length = segments[0].q1 - segments[0].q0 if segments else 0
    same = length * len(segments) == tokens and all(s.causal and s.q1 - s.q0 == length for s in segments)
    return length if same else 0


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _heads_first(*xs: torch.Tensor) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in xs]


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``[batch, seq, heads, head_dim]`` each; returns out alike and lse ``[batch, seq, heads]``."""
    group = q.shape[2] // k.shape[2]
    q, k, v = _heads_first(q, _spread(k, group), _spread(v, group))
    if not q.is_cuda:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    elif q.dtype in (torch.float32, torch.float64):
        scores = _scores(q, k, causal)
        lse = scores.logsumexp(-1)
        out = (scores - lse[..., None]).exp() @ v
    else:
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return out.transpose(1, 2), lse.transpose(1, 2)


def _backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    grad, q, k, v, out, lse = _heads_first(grad, q, _spread(k, group), _spread(v, group), out, lse)
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
    return dq, _fold(dk, kv_heads), _fold(dv, kv_heads)


def _varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: list[Segment]
) -> tuple[torch.Tensor, torch.Tensor]:
    cu, longest = _cu(segments, q.device)
    out, lse = aten._flash_attention_forward(q, k, v, cu, cu, longest, longest, 0.0, True, False)[:2]
    return out, lse.transpose(0, 1)


def _varlen_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: list[Segment],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    cu, longest = _cu(segments, q.device)
    zero = torch.zeros((), dtype=torch.uint64, device=q.device)
    return aten._flash_attention_backward(
        grad, q, k, v, out, lse.transpose(0, 1).contiguous(), cu, cu, longest, longest, 0.0, True, zero, zero
    )


def _cu(segments: list[Segment], device: torch.device) -> tuple[torch.Tensor, int]:
    bounds = [segments[0].q0, *(s.q1 for s in segments)]
    cu = torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True)
    return cu, max(s.q1 - s.q0 for s in segments)


def _spread(x: torch.Tensor, group: int) -> torch.Tensor:
    """Repeat key/value heads so that every query head has its own: ``[b, s, kv_heads, d] -> [b, s, heads, d]``."""
    return x if group == 1 else x.repeat_interleave(group, dim=2)


def _fold(grad: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Sum the gradients of the query heads that share a key/value head."""
    return grad if grad.shape[2] == kv_heads else grad.unflatten(2, (kv_heads, -1)).sum(3)


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return scores


@torch.library.custom_op("weft::attention", mutates_args=())
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-document causal attention on one device, opaque to ``torch.compile`` and kept whole by selective recompute.

    ``q``: ``[batch, seq, heads, head_dim]``; ``k, v`` with ``kv_heads``; ``cu_seqlens`` as in :class:`weft.data.batch.Batch`.
    Returns ``out`` like ``q`` and ``lse`` ``[batch * seq, heads]``.
    """
    out, lse = attend_forward(*(x.flatten(0, 1) for x in (q, k, v)), document_segments(cu_seqlens))
    return out.view(q.shape), lse.contiguous()


@attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[0] * q.shape[1], q.shape[2], dtype=_wide(q.dtype))


@torch.library.custom_op("weft::attention_backward", mutates_args=())
def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flat = [x.flatten(0, 1) for x in (grad, q, k, v, out)]
    dq, dk, dv = attend_backward(*flat, lse, document_segments(cu_seqlens))
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


@attention_backward.register_fake
def _(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:3], *output, inputs[3])


def _attention_grad(ctx, grad, _):  # type: ignore[no-untyped-def]
    return *attention_backward(grad, *ctx.saved_tensors), None


attention.register_autograd(_attention_grad, setup_context=_save)
