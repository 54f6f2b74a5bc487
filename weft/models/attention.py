"""Causal attention over packed documents: local kernels, and the operator that autograd and recompute see.

Attention is computed by causal and full rectangles of the attention matrix (:mod:`weft.models.segments`). Attention
over several ranks (:mod:`weft.parallel.context`) runs both through the same kernels, and all callers merge results with
:func:`join`.

The kernels are aten's flash attention operators: private names, but the only ones that return the log-sum-exp and
accept a global one in backward; those of GPUs are in :mod:`weft.models.gpu_attention`. Their traps on the CPU (rows
without keys give lse = 0, empty blocks kill the process) cannot occur here: a segment is never empty, and a causal one
has equal query and key ranges.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.library import CustomOpDef

from weft.models.invariant import is_invariant
from weft.models.numbers import wide
from weft.models.segments import QkvGradients, Segment, cut, document_segments, uniform
from weft.models.widened import widened

aten = torch.ops.aten
T = torch.Tensor
#: ``attend(q, k, v, cu_seqlens)``; a windowed layer adds how many tokens a token sees.
Attend = Callable[..., T]
#: Arguments and results of the backward operators. PyTorch cannot read them from the name of a tuple's class.
BACKWARD_SCHEMA = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, {}) -> (Tensor, Tensor, Tensor)"
)


def gpu_kernels() -> ModuleType:
    """Return :mod:`weft.models.gpu_attention`, which runs without a GPU do not import."""
    from weft.models import gpu_attention

    return gpu_attention


def attend_forward(q: T, k: T, v: T, segments: list[Segment]) -> tuple[T, T]:
    """Compute attention for the rectangles ``segments`` of the attention matrix.

    ``q, k, v``: ``[tokens, heads or kv_heads, head_dim]``. Returns ``out`` like ``q`` and the log-sum-exps ``[tokens,
    heads]``. Queries that are in no segment have zeros in ``out`` and -inf as log-sum-exp.
    """
    if _varlen(q, segments):
        return gpu_kernels().forward_documents(q, k, v, _bounds(segments))
    k, v, q, pieces = _pieces(segments, k, v, q)
    if len(pieces) == 1 and pieces[0].q1 - pieces[0].q0 == q.shape[1]:
        cols = (slice(None), slice(pieces[0].k0, pieces[0].k1))
        out, lse = _forward(q, k[cols], v[cols], pieces[0])
        return out.flatten(0, 1), lse.flatten(0, 1)
    tokens = sum(s.q1 - s.q0 for s in segments if not s.joins)
    covered = tokens == q.shape[0] * q.shape[1]
    # bfloat16 is too coarse to be joined
    kept = wide(q.dtype) if any(s.joins for s in pieces) else q.dtype
    out = (torch.empty_like if covered else torch.zeros_like)(q, dtype=kept)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide(q.dtype), device=q.device)
    for s in pieces:
        rows, cols = (slice(None), slice(s.q0, s.q1)), (slice(None), slice(s.k0, s.k1))
        o, l = _forward(q[rows], k[cols], v[cols], s)
        if s.joins:
            join(out[rows], lse[rows], o, l)
        else:
            out[rows], lse[rows] = o, l
    return out.flatten(0, 1).to(q.dtype), lse.flatten(0, 1)


def join(out: T, lse: T, o: T, l: T) -> None:
    """Merge two attention results of the same queries over different keys, in place into ``out`` and ``lse``.

    ``out`` and ``lse``: output ``[..., head_dim]`` (in the type that :func:`wide` gives) and log-sum-exp ``[...]`` of
    the first result; ``o`` and ``l``: the same of the second result. Where a query has seen no key, its log-sum-exp is
    -inf and its output 0. This is the step of ring attention (Liu et al. 2023, 2310.01889); logaddexp is exact where
    sigmoids overflow.
    """
    both = torch.logaddexp(lse, l)
    # rows that neither side has seen stay zero, not nan
    at = both.clamp_min(torch.finfo(both.dtype).min)
    out.mul_((lse - at).exp_()[..., None]).addcmul_(
        o.to(out.dtype), (l - at).exp_()[..., None]
    )
    lse.copy_(both)


def attend_backward(
    grad: T, q: T, k: T, v: T, out: T, lse: T, segments: list[Segment]
) -> QkvGradients:
    """Return what the rectangles ``segments`` of the attention matrix add to the gradients of ``q``, ``k`` and ``v``.

    ``grad``: the gradient of ``out``. ``out`` and ``lse``: the result over all keys of each query, not only over those
    in ``segments``.
    """
    if _varlen(q, segments):
        bounds = _bounds(segments)
        return gpu_kernels().backward_documents(grad, q, k, v, out, lse, bounds)
    k, v, q, grad, out, lse, pieces = _pieces(segments, k, v, q, grad, out, lse)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for s in pieces:
        rows, cols = (slice(None), slice(s.q0, s.q1)), (slice(None), slice(s.k0, s.k1))
        parts = _backward(
            grad[rows], q[rows], k[cols], v[cols], out[rows], lse[rows], s
        )
        for total, share, where in zip(grads, parts, (rows, cols, cols), strict=True):
            total[where] += share
    return QkvGradients(*(total.flatten(0, 1) for total in grads))


def _varlen(q: T, segments: list[Segment]) -> bool:
    """Return whether one call of a GPU kernel can take all segments."""
    if not q.is_cuda or gpu_kernels().by_products(q):
        return False
    plain = all(s.causal and not s.flipped for s in segments)
    return plain and not uniform(segments, len(q), len(q))


def _bounds(segments: list[Segment]) -> list[int]:
    """Return the first token of each segment, and the end of the last."""
    return [segments[0].q0, *(s.q1 for s in segments)]


def _pieces(segments: list[Segment], k: T, v: T, q: T, *others: T) -> tuple[Any, ...]:
    """Return the tensors as ``[batch, tokens, ...]``, and the segments to compute in every row of that batch.

    Equal segments that tile all tokens are one batch. On the CPU causal squares are cut: the kernel there takes 512
    keys at a time and computes with all of them, also with keys that no query sees.
    """
    whole = uniform(segments, len(q), len(k))
    queries, keys = whole or (len(q), len(k))
    batched = [x.unflatten(0, (-1, keys)) for x in (k, v)]
    batched += [x.unflatten(0, (-1, queries)) for x in (q, *others)]
    if whole:
        segments = [Segment(0, queries, 0, keys, segments[0].causal)]
    # whose results are too coarse to be joined
    if q.device.type == "cpu" and q.dtype != torch.bfloat16:
        segments = [piece for s in segments for piece in cut(s)]
    return *batched, segments


def _heads_first(*xs: T) -> list[T]:
    return [x.transpose(1, 2) for x in xs]


def _flipped(s: Segment, *xs: T) -> list[T]:
    """Return ``[batch, seq, ...]`` each, read from the end if the segment is flipped."""
    return [x.flip(1) for x in xs] if s.flipped else list(xs)


def _forward(q: T, k: T, v: T, s: Segment) -> tuple[T, T]:
    """Return ``[batch, seq, heads, head_dim]`` each, of ``s`` only; returns out alike and lse ``[batch, seq,
    heads]``.
    """
    q, k, v = _heads_first(*_flipped(s, q, k, v))
    if q.is_cuda:
        out, lse = gpu_kernels().attend_rectangle(q, k, v, s.causal)
    else:
        # query heads may share key/value heads
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, s.causal
        )
    out, lse = _flipped(s, out.transpose(1, 2), lse.transpose(1, 2))
    return out, lse


def _backward(grad: T, q: T, k: T, v: T, out: T, lse: T, s: Segment) -> list[T]:
    grad, q, k, v, out, lse = _heads_first(*_flipped(s, grad, q, k, v, out, lse))
    kv_heads, dtype = k.shape[1], q.dtype
    if q.is_cuda:
        grads = gpu_kernels().rectangle_gradients(grad, q, k, v, out, lse, s.causal)
    else:
        grad, q, k, v, out = widened(grad, q, k, v, out)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, s.causal
        )
    dq, dk, dv = _heads_first(*(each.to(dtype) for each in grads))
    return _flipped(s, dq, fold_heads(dk, kv_heads), fold_heads(dv, kv_heads))


def repeat_heads(x: T, group: int) -> T:
    """Return keys or values ``x`` with heads repeated, so that every query head has its own: ``[b, s, kv_heads, d] ->
    [b, s, heads, d]``.

    ``group``: number of query heads that share a key/value head.
    """
    return x if group == 1 else x.repeat_interleave(group, dim=2)


def fold_heads(grad: T, kv_heads: int) -> T:
    """Return the gradient of keys or values from ``grad``, the gradient of :func:`repeat_heads`: the sum over the query
    heads that share a key/value head, ``[b, s, heads, d] -> [b, s, kv_heads, d]``.
    """
    if grad.shape[2] == kv_heads:
        return grad
    return grad.unflatten(2, (kv_heads, -1)).sum(3)


@torch.library.custom_op("weft::attention", mutates_args=())
def attention(q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> tuple[T, T]:
    """Compute causal attention within each document on one device.

    ``q``: ``[batch, seq, heads, head_dim]``; ``k, v``: ``[batch, seq, kv_heads, head_dim]``; ``cu_seqlens``: index of
    the first token of each document in the flattened ``batch * seq`` tokens, and at the end the number of all tokens,
    or two rows where documents share prompts (:func:`weft.data.shared_prompts.share_prompts`);
    ``window``: the number of tokens that a token sees, itself included, 0 for all. Returns ``out`` like ``q`` and the
    log-sum-exps ``[batch * seq, heads]``. This custom operator is opaque to ``torch.compile``, and selective recompute
    keeps its results.
    """
    flat = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
    if is_invariant():
        from weft.models.invariant_kernels import attend_documents

        out, lse = attend_documents(*flat, cu_seqlens.tolist(), window)
    elif cu_seqlens.dim() > 1:  # with prompts that several documents share
        from weft.models.prompt_attention import attend_after_prompts

        out, lse = attend_after_prompts(attend_forward, join, *flat, cu_seqlens)
    else:
        out, lse = attend_forward(*flat, document_segments(cu_seqlens, window))
    return out.view(q.shape), lse.contiguous()


@attention.register_fake
def attention_like(q: T, *rest: Any, **options: Any) -> tuple[T, T]:
    """Return tensors of the shapes and types of an attention operator's results, without values, for compilers and fake
    tensors.

    ``q``: ``[batch, seq, heads, head_dim]``; ``rest`` and ``options``: the operator's other arguments.
    """
    return torch.empty_like(q), q.new_empty(
        q.shape[0] * q.shape[1], q.shape[2], dtype=wide(q.dtype)
    )


@torch.library.custom_op(
    "weft::attention_backward",
    mutates_args=(),
    schema=BACKWARD_SCHEMA.format(
        "Tensor out, Tensor lse, Tensor cu_seqlens, int window=0"
    ),
)
def attention_backward(
    grad: T, q: T, k: T, v: T, out: T, lse: T, cu_seqlens: T, window: int = 0
) -> QkvGradients:
    """Return the gradients of ``q``, ``k`` and ``v`` of :func:`attention`.

    ``grad``: the gradient of its output ``out``; ``out`` and ``lse``: its results. The other arguments are those of the
    forward call.
    """
    g, fq, fk, fv, o = (x.flatten(0, 1) for x in (grad, q, k, v, out))
    if cu_seqlens.dim() > 1:
        from weft.models.prompt_attention import backward_after_prompts

        grads = backward_after_prompts(
            attend_backward, g, fq, fk, fv, o, lse, cu_seqlens
        )
    else:
        segments = document_segments(cu_seqlens, window)
        grads = attend_backward(g, fq, fk, fv, o, lse, segments)
    return QkvGradients(
        *(d.view(x.shape) for d, x in zip(grads, (q, k, v), strict=True))
    )


def set_backward(
    operator: CustomOpDef, backward: CustomOpDef, kept: slice = slice(None)
) -> None:
    """Make the custom operator ``backward`` the gradient of the custom operator ``operator``.

    ``operator``: takes q, k, v, ``cu_seqlens`` and plain values; only the gradient of its first output is used.
    ``backward``: returns the gradients of q, k and v. It takes, in this order: the gradient of that first output; q, k
    and v; the outputs of ``operator`` that ``kept`` selects; ``cu_seqlens`` and the plain values. ``kept``: slice of
    the operator's outputs; by default all.
    """

    def save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        q, k, v, cu_seqlens, *ctx.rest = inputs
        ctx.save_for_backward(q, k, v, *output[kept], cu_seqlens)

    def gradients(ctx, grad, *_):  # type: ignore[no-untyped-def]
        return *backward(grad, *ctx.saved_tensors, *ctx.rest), *[None] * (
            1 + len(ctx.rest)
        )

    @backward.register_fake
    def _(grad: T, q: T, k: T, v: T, *rest: Any) -> QkvGradients:
        return QkvGradients(*(x.new_empty(x.shape) for x in (q, k, v)))

    operator.register_autograd(gradients, setup_context=save)


set_backward(attention, attention_backward)


def local_attention(q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T:
    """Return the output of :func:`attention` without its log-sum-exps; the arguments are the same."""
    return attention(q, k, v, cu_seqlens, window)[0]
