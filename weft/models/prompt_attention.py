"""Causal attention of answers that share a prompt which stands in their row once (:mod:`weft.data.shared_prompts`).

Every segment attends to itself. The segments that follow a prompt also attend to all of its tokens, in one rectangle
for all of them, and both results are merged by their log-sum-exps. The gradients of the prompt's keys and values are
the sums over these answers, so that they are those of prompts that stand in the row once for each answer.

In 16 bits on a GPU one call of flash attention computes all segments, because calls for each of them would keep the
device waiting for the host. The keys and values of every segment are gathered, its prompt's before its own, and a query
sees the keys up to its own.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch

from weft.models import gpu_attention
from weft.models.numbers import wide
from weft.models.segments import QkvGradients, Segment

T = torch.Tensor

#: Functions of :mod:`weft.models.attention`, which calls this module: attention of segments, what merges two results,
#: and gradients of segments.
Forward = Callable[[T, T, T, list[Segment]], tuple[T, T]]
Join = Callable[[T, T, T, T], None]
Backward = Callable[[T, T, T, T, T, T, list[Segment]], QkvGradients]

#: Gathered keys for each token of a row, at the most: short answers to a long prompt would repeat it in memory.
MOST_GATHERED = 4


class PromptParts(NamedTuple):
    """Calls that compute the attention of a row with shared prompts.

    ``alike``: for each call, the causal segments that it computes: neighbours of equal length. ``seen``: the rectangles
    of answers against their prompts.
    """

    alike: list[list[Segment]]
    seen: list[Segment]


class GatheredKeys(NamedTuple):
    """Keys of a row with shared prompts, gathered for one call: for each segment its prompt's, if any, and its own.

    ``tokens``: the token of each gathered key, int64 ``[gathered keys]``. ``queries``, ``keys``: where those of each
    segment are in the row and among the gathered keys.
    """

    tokens: T
    queries: gpu_attention.VarlenTokens
    keys: gpu_attention.VarlenTokens


@lru_cache(maxsize=16)
def prompt_parts(edges: tuple[int, ...], parents: tuple[int, ...]) -> PromptParts:
    """Return the parts of a row whose segments begin at ``edges``; the last entry is where the row ends.

    ``parents``: for each segment the number of the segment that it sees beside itself, or -1. The parts are the same in
    all layers, forward and backward.
    """
    own = [Segment(a, b, a, b, True) for a, b in pairwise(edges) if b > a]
    alike = [[*each] for _, each in groupby(own, lambda s: s.q1 - s.q0)]
    seen = list[Segment]()
    for (a, b), parent in zip(pairwise(edges), parents, strict=False):
        if parent < 0 or a == b:
            continue
        k0, k1 = edges[parent], edges[parent + 1]
        if seen and seen[-1].q1 == a and seen[-1].k0 == k0:
            seen[-1] = seen[-1]._replace(q1=b)
        else:
            seen.append(Segment(a, b, k0, k1, False))
    return PromptParts(alike, seen)


def in_one_call(q: T, edges: Sequence[int], parents: Sequence[int]) -> bool:
    """Return whether one call of a GPU's kernel takes all segments of queries ``q``: in 16 bits, where the gathered
    keys are not many times the row's. ``edges``, ``parents``: as for :func:`prompt_parts`.
    """
    if not q.is_cuda or gpu_attention.by_products(q):
        return False
    return gathered_count(edges, parents) <= MOST_GATHERED * len(q)


def gathered_count(edges: Sequence[int], parents: Sequence[int]) -> int:
    """Return how many keys are gathered if each segment has its prompt's before its own. The arguments are those of
    :func:`prompt_parts`.
    """
    lengths = [b - a for a, b in pairwise(edges)]
    own = zip(lengths, parents, strict=False)
    return sum(n + (lengths[p] if p >= 0 and n else 0) for n, p in own)


@lru_cache(maxsize=16)
def gathered_keys(
    edges: tuple[int, ...],
    parents: tuple[int, ...],
    device: torch.device,
    stream: object = None,
) -> GatheredKeys:
    """Return what each segment of a row sees, as tensors on ``device``; the same in all layers, forward and backward.

    ``edges``, ``parents``: as for :func:`prompt_parts`; ``stream``: the stream of a GPU on which the tensors are
    computed, and only used.
    """
    pieces, segments = list[tuple[int, int]](), list[int]()
    for (a, b), parent in zip(pairwise(edges), parents, strict=False):
        if a == b:
            continue
        seen = [(a, b)]
        if parent >= 0:
            seen.insert(0, (edges[parent], edges[parent + 1]))
        pieces += seen
        segments.append(sum(end - first for first, end in seen))
    total = sum(segments)
    # indices are computed on the device: as a copy they would be long enough to be waited for
    table = torch.tensor([(first, end - first) for first, end in pieces]).T.contiguous()
    firsts, lengths = table.to(device, non_blocking=True)
    shifts = firsts - (lengths.cumsum(0) - lengths)
    index = torch.arange(total, device=device)
    index += shifts.repeat_interleave(lengths, output_size=total)
    bounds = [edges[0], *(b for a, b in pairwise(edges) if b > a)]
    keys = gpu_attention.varlen_tokens([0, *accumulate(segments)], device)
    return GatheredKeys(index, gpu_attention.varlen_tokens(bounds, device), keys)


def _gathered(q: T, edges: tuple[int, ...], parents: tuple[int, ...]) -> GatheredKeys:
    stream = torch.cuda.current_stream(q.device) if q.is_cuda else None
    return gathered_keys(edges, parents, q.device, stream)


def _backward_in_one_call(
    grad: T, q: T, k: T, v: T, out: T, lse: T, seen: GatheredKeys
) -> QkvGradients:
    """Return the gradients of attention in one call; those of a prompt's keys are summed over its answers."""
    own_k, own_v = (x.index_select(0, seen.tokens) for x in (k, v))
    dq, *parts = gpu_attention.varlen_gradients(
        grad, q, own_k, own_v, out, lse, seen.queries, seen.keys
    )
    # 16 bits are too coarse to be summed
    sums = (torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in (k, v))
    dk, dv = (
        total.index_add_(0, seen.tokens, part.to(total.dtype)).to(part.dtype)
        for total, part in zip(sums, parts, strict=True)
    )
    return QkvGradients(dq, dk, dv)


def _moved(segments: Sequence[Segment]) -> tuple[slice, list[Segment]]:
    """Return the tokens of neighbouring causal segments, and the segments as indices among these tokens."""
    first, end = segments[0].q0, segments[-1].q1
    bounds = [(s.q0 - first, s.q1 - first) for s in segments]
    return slice(first, end), [Segment(a, b, a, b, True) for a, b in bounds]


def attend_after_prompts(
    attend: Forward, join: Join, q: T, k: T, v: T, cu_seqlens: T
) -> tuple[T, T]:
    """Compute the attention of a row with shared prompts, by ``attend`` and ``join``.

    ``q, k, v``: ``[tokens, heads or kv_heads, head_dim]``; ``cu_seqlens``: int32 ``[2, segments + 1]``
    (:func:`weft.data.shared_prompts.share_prompts`). Returns ``out`` like ``q`` and the log-sum-exps ``[tokens,
    heads]``.
    """
    edges, parents = map(tuple, cu_seqlens.tolist())
    if in_one_call(q, edges, parents):
        gathered = _gathered(q, edges, parents)
        own_k, own_v = (x.index_select(0, gathered.tokens) for x in (k, v))
        return gpu_attention.varlen_forward(
            q, own_k, own_v, gathered.queries, gathered.keys
        )
    out = torch.empty_like(q, dtype=wide(q.dtype))
    lse = torch.empty(q.shape[:2], dtype=out.dtype, device=q.device)
    alike, seen = prompt_parts(edges, parents)
    for segments in alike:
        at, own = _moved(segments)
        out[at], lse[at] = attend(q[at], k[at], v[at], own)
    for s in seen:
        rows, keys = slice(s.q0, s.q1), slice(s.k0, s.k1)
        whole = [Segment(0, s.q1 - s.q0, 0, s.k1 - s.k0, False)]
        join(out[rows], lse[rows], *attend(q[rows], k[keys], v[keys], whole))
    return out.to(q.dtype), lse


def backward_after_prompts(
    differentiate: Backward, grad: T, q: T, k: T, v: T, out: T, lse: T, cu_seqlens: T
) -> QkvGradients:
    """Return the gradients of ``q``, ``k`` and ``v`` of :func:`attend_after_prompts`, by ``differentiate``.

    ``grad``: the gradient of its ``out``. The other arguments are those of that call, and its results.
    """
    edges, parents = map(tuple, cu_seqlens.tolist())
    if in_one_call(q, edges, parents):
        gathered = _gathered(q, edges, parents)
        return _backward_in_one_call(grad, q, k, v, out, lse, gathered)
    totals = QkvGradients(*(torch.zeros_like(x) for x in (q, k, v)))
    alike, seen = prompt_parts(edges, parents)
    for segments in alike:
        at, own = _moved(segments)
        parts = differentiate(grad[at], q[at], k[at], v[at], out[at], lse[at], own)
        for total, part in zip(totals, parts, strict=True):
            total[at] = part
    for s in seen:
        rows, keys = slice(s.q0, s.q1), slice(s.k0, s.k1)
        whole = [Segment(0, s.q1 - s.q0, 0, s.k1 - s.k0, False)]
        parts = differentiate(
            grad[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], whole
        )
        for total, part, at in zip(totals, parts, (rows, keys, keys), strict=True):
            total[at] += part
    return totals
