"""Attention of parts of a row one after the other: a later part's queries see the earlier parts' keys and values."""

from itertools import pairwise

import torch

from weft.models.attention import (
    BACKWARD_SCHEMA,
    attend_backward,
    attend_forward,
    attention_like,
    local_attention,
    set_backward,
)
from weft.models.segments import QkvGradients, Segment, earlier_keys, windowed
from weft.models.token_parts import TokenPart

T = torch.Tensor


def part_segments(
    cu_seqlens: T, tokens: int, keys: int, new: int, window: int
) -> list[Segment]:
    """Return the rectangles of attention when rows are computed in parts: the queries are the last ``new`` of the first
    ``keys`` tokens of each row.

    ``cu_seqlens``: where documents begin in the flattened rows, and at last where they end; ``tokens``: tokens of a
    whole row; ``window``: the number of tokens that a token sees, itself included; 0: all. Queries are numbered over
    the new tokens of all rows, keys over the first ``keys`` tokens of all rows.
    """
    first, segments = keys - new, list[Segment]()
    for begin, end in pairwise(cu_seqlens.tolist()):
        row = begin // tokens
        a, b = begin - row * tokens, min(end - row * tokens, keys)
        start = max(a, first)
        if start >= b:
            continue
        pieces = windowed(start, b, window)
        if a < start:
            seen = max(a, start - window) if window else a
            earlier = earlier_keys(start, b, seen, start, window)
            pieces += [piece._replace(joins=True) for piece in earlier]
        q, k = row * new - first, row * keys
        segments += [
            piece._replace(
                q0=piece.q0 + q, q1=piece.q1 + q, k0=piece.k0 + k, k1=piece.k1 + k
            )
            for piece in pieces
        ]
    return segments


@torch.library.custom_op("weft::part_attention", mutates_args=())
def part_attention(
    q: T, k: T, v: T, cu_seqlens: T, tokens: int, window: int = 0
) -> tuple[T, T]:
    """Compute causal attention when rows are computed in parts: ``k`` and ``v`` are of the first tokens of each row,
    and ``q`` is of the last of these tokens.

    ``q``: ``[batch, new, heads, head_dim]``; ``k, v``: ``[batch, earlier and new, kv_heads, head_dim]``; ``tokens``:
    tokens of a whole row. The other arguments and the results are those of :func:`weft.models.attention.attention`.
    """
    segments = part_segments(cu_seqlens, tokens, k.shape[1], q.shape[1], window)
    flat = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
    out, lse = attend_forward(*flat, segments)
    return out.view(q.shape), lse.contiguous()


part_attention.register_fake(attention_like)


@torch.library.custom_op(
    "weft::part_attention_backward",
    mutates_args=(),
    schema=BACKWARD_SCHEMA.format(
        "Tensor out, Tensor lse, Tensor cu_seqlens, int tokens, int window=0"
    ),
)
def part_attention_backward(
    grad: T, q: T, k: T, v: T, out: T, lse: T, cu_seqlens: T, tokens: int,
    window: int = 0,
) -> QkvGradients:  # fmt: skip
    """Return the gradients of ``q``, ``k`` and ``v`` of :func:`part_attention`.

    ``grad``: the gradient of its output ``out``; ``out`` and ``lse``: its results. The other arguments are those of the
    forward call.
    """
    segments = part_segments(cu_seqlens, tokens, k.shape[1], q.shape[1], window)
    g, fq, fk, fv, o = (x.flatten(0, 1) for x in (grad, q, k, v, out))
    grads = attend_backward(g, fq, fk, fv, o, lse, segments)
    return QkvGradients(
        *(d.view(x.shape) for d, x in zip(grads, (q, k, v), strict=True))
    )


set_backward(part_attention, part_attention_backward)


class PartKeys:
    """Attention function of a layer whose rows are computed in parts, in the order of their tokens; it keeps keys and
    values of earlier parts. ``tokens``: tokens of a whole row. The attribute ``part`` must be set to the part that
    attends before each call.
    """

    part: TokenPart

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.kept: dict[int, list[tuple[T, T]]] = {}

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T:
        """Attend with the arguments of :func:`weft.models.attention.local_attention`, for whole rows ``cu_seqlens``."""
        part = self.part
        kept = self.kept.setdefault(part.top, [])
        kept.append((k, v))
        if part.last == self.tokens:
            del self.kept[part.top]
        starts = part_starts(cu_seqlens, self.tokens, part)
        if starts is not None:
            return local_attention(q, k, v, starts, window)
        keys, values = (torch.cat(each, 1) for each in zip(*kept, strict=True))
        out: T = part_attention(q, keys, values, cu_seqlens, self.tokens, window)[0]
        return out


def part_starts(cu_seqlens: T, tokens: int, part: TokenPart) -> T | None:
    """Return where documents begin and end among the tokens of ``part``, counted from its first token; None if a
    document that began in an earlier part goes on in ``part``. ``cu_seqlens``: where documents begin and end in whole
    rows of ``tokens`` tokens.
    """
    ends, size = [0], part.last - part.first
    for begin, end in pairwise(cu_seqlens.tolist()):
        row = begin // tokens
        a, b = begin - row * tokens, min(end - row * tokens, part.last)
        if b <= part.first:
            continue
        if a < part.first:
            return None
        if a < b:
            ends.append(row * size + b - part.first)
    return torch.tensor(ends, dtype=cu_seqlens.dtype)
