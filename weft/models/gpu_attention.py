"""The attention kernels of a GPU for one rectangle of the attention matrix, and for whole documents in one call.

In 16 bits they are cuDNN's where the device has them (from Hopper on: 0.64 of flash attention's time forward and
backward on an H100, 8,192 tokens, heads of 64), else flash attention's (Dao 2023, 2307.08691). Both let query heads
share key/value heads. In float32 and float64 attention is computed by products with all scores, for proofs; so it is
for heads that no kernel takes, such as the 576 elements of latent attention to a cache.
``torch.backends.cuda.enable_cudnn_sdp(False)`` turns cuDNN's off.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch

from weft.models.numbers import wide
from weft.models.segments import QkvGradients

aten = torch.ops.aten
T = torch.Tensor

#: The widest head that flash attention takes, in elements.
WIDEST = 256


def attend_rectangle(q: T, k: T, v: T, causal: bool) -> tuple[T, T]:
    """Compute attention of all queries to all keys, or causal attention, with a GPU's kernel. Return the output
    ``[batch, heads, seq, head_dim]`` and the log-sum-exps ``[batch, heads, seq]``. ``q``: ``[batch, heads, seq,
    head_dim]``; ``k, v``: ``[batch, kv_heads, keys, head_dim]``; ``causal``: whether query ``i`` sees only the keys
    ``0`` to ``i``. It may be True only if ``keys`` equals ``seq``.
    """
    if by_products(q):
        dtype = q.dtype
        q, k, v = (x.to(wide(dtype)) for x in (q, k, v))
        k, v = _repeated(q, k), _repeated(q, v)
        scores = _scores(q, k, causal)
        lse = scores.logsumexp(-1)
        return ((scores - lse[..., None]).exp() @ v).to(dtype), lse
    if takes_cudnn(q):
        out, lse = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal
        )[:2]
        return out, lse.view(q.shape[:3])
    out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return out, lse


def rectangle_gradients(
    grad: T, q: T, k: T, v: T, out: T, lse: T, causal: bool
) -> QkvGradients:
    """Return the gradients of ``q``, ``k`` and ``v`` of :func:`attend_rectangle`, each of the shape of its tensor.
    ``grad``: the gradient of the output. ``out`` and ``lse``: output and log-sum-exps of the queries over all keys that
    they see; ``k`` and ``v`` may be only some of these keys. The other arguments are those of the forward call.
    """
    if by_products(q):
        grad, q, k, v, out = (x.to(wide(q.dtype)) for x in (grad, q, k, v, out))
        wide_k, wide_v = _repeated(q, k), _repeated(q, v)
        p = (_scores(q, wide_k, causal) - lse[..., None]).exp()
        d_p = grad @ wide_v.mT - (grad * out).sum(-1, keepdim=True)
        ds = p * d_p * q.shape[-1] ** -0.5
        return QkvGradients(ds @ wide_k, _folded(ds.mT @ q, k), _folded(p.mT @ grad, v))
    lengths = None, None, q.shape[2], k.shape[2]
    # the state of dropout, of which there is none
    if takes_cudnn(q):
        zero = torch.zeros((), dtype=torch.int64, device=q.device)
        given = grad, q, k, v, out, lse.contiguous().unsqueeze(-1), zero, zero, None
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            *given, *lengths, 0.0, causal
        )
    else:
        zero = torch.zeros((), dtype=torch.uint64, device=q.device)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, zero, zero
        )
    return QkvGradients(dq, dk, dv)


class VarlenTokens(NamedTuple):
    """Queries or keys of documents of different lengths in one tensor.

    ``bounds``: index of each document's first token, and at the end the number of tokens, int32 ``[documents + 1]`` on
    the GPU. ``longest``: tokens of the longest document.
    """

    bounds: T
    longest: int


def varlen_forward(
    q: T, k: T, v: T, queries: VarlenTokens, keys: VarlenTokens
) -> tuple[T, T]:
    """Compute causal attention within documents of different lengths in one call of flash attention.

    ``q, k, v``: ``[queries or keys, heads or kv_heads, head_dim]`` in 16 bits; ``queries``, ``keys``: where those of
    each document are. If a document has more keys than queries, the last query sees all of them, and every query before
    it one less than the next. Returns the output like ``q`` and the log-sum-exps ``[queries, heads]``.
    """
    lengths = (queries.bounds, keys.bounds, queries.longest, keys.longest)
    out, lse = aten._flash_attention_forward(q, k, v, *lengths, 0.0, True, False)[:2]
    return out, lse.transpose(0, 1)


def varlen_gradients(
    grad: T, q: T, k: T, v: T, out: T, lse: T, queries: VarlenTokens, keys: VarlenTokens
) -> QkvGradients:
    """Return the gradients of ``q``, ``k`` and ``v`` of :func:`varlen_forward`. ``grad``: the gradient of its output;
    ``out``, ``lse``: its results. The other arguments are those of the forward call.
    """
    zero = torch.zeros((), dtype=torch.uint64, device=q.device)
    lse = lse.transpose(0, 1).contiguous()
    lengths = (queries.bounds, keys.bounds, queries.longest, keys.longest)
    dq, dk, dv = aten._flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, True, zero, zero
    )
    return QkvGradients(dq, dk, dv)


def varlen_tokens(bounds: Sequence[int], device: torch.device) -> VarlenTokens:
    """Return where documents are whose first tokens have the indices ``bounds``, with the number of tokens at the
    end.
    """
    cu = torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True)
    lengths = (after - before for before, after in pairwise(bounds))
    return VarlenTokens(cu, max(lengths))


def forward_documents(q: T, k: T, v: T, bounds: Sequence[int]) -> tuple[T, T]:
    """Compute :func:`varlen_forward` of documents that have equal queries and keys.

    ``bounds``: index of each document's first token, and at the end the number of tokens.
    """
    tokens = varlen_tokens(bounds, q.device)
    return varlen_forward(q, k, v, tokens, tokens)


def backward_documents(
    grad: T, q: T, k: T, v: T, out: T, lse: T, bounds: Sequence[int]
) -> QkvGradients:
    """Return the gradients of ``q``, ``k`` and ``v`` of :func:`forward_documents`. ``grad``: the gradient of its
    output; ``out``, ``lse``: its results. The other arguments are those of the forward call.
    """
    tokens = varlen_tokens(bounds, q.device)
    return varlen_gradients(grad, q, k, v, out, lse, tokens, tokens)


def by_products(q: T) -> bool:
    """Return whether the attention kernels of a GPU do not support queries like ``q`` ``[..., head_dim]``: they take 16
    bits, and heads of at most :data:`WIDEST` elements, a multiple of 8.
    """
    width = q.shape[-1]
    return q.dtype in (torch.float32, torch.float64) or width > WIDEST or width % 8 > 0


def takes_cudnn(q: T) -> bool:
    """Return whether attention with the queries ``q`` ``[batch, heads, seq, head_dim]`` is computed by cuDNN."""
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 128 and q.shape[2] >= 128
    return fits and torch.backends.cuda.cudnn_sdp_enabled() and _has_cudnn(q.device)


@cache
def _has_cudnn(device: torch.device) -> bool:
    """Return whether the device is of Hopper's generation or later, and PyTorch has cuDNN."""
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    return hopper and torch.backends.cudnn.is_available()


def _repeated(q: T, x: T) -> T:
    """Repeat the key/value heads of ``x`` so that every query head of ``q`` has its own."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _folded(grad: T, x: T) -> T:
    """Sum the gradients ``[batch, heads, keys, head_dim]`` of the query heads that share a key/value head of ``x``."""
    return grad.unflatten(1, (x.shape[1], -1)).sum(2)


def _scores(q: T, k: T, causal: bool) -> T:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return scores
