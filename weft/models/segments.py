"""Attention as rectangles of the attention matrix: queries against keys of packed documents, within a sliding window.

A :class:`Segment` is the work of one kernel call. Only two masks are needed, causal and none: the edge of a window is a
triangle in the opposite corner, which is causal when queries and keys are read in reverse order.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

#: Side of the smallest causal squares that longer documents are cut into on the CPU.
SQUARE = 256


class QkvGradients(NamedTuple):
    """Gradients of queries, keys and values, each of the shape of its tensor."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Segment(NamedTuple):
    """A rectangle of the attention matrix, the work of one kernel call.

    Attributes:
        ``q0:q1``, ``k0:k1``: the queries and the keys, as indices of tokens in the flattened rows.
        ``causal``: whether a query sees only the keys up to its own position (the rectangle is then a square);
            otherwise it sees all keys.
        ``joins``: whether the queries have attended to other keys before, so that results must be merged.
        ``flipped``: for a causal square, whether a query sees instead the keys from its own position on.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool  # a square, in which a query sees the keys up to its own place
    joins: bool = False  # its queries have met other keys before
    # of a causal square: a query sees the keys from its own place on
    flipped: bool = False


def document_segments(cu_seqlens: torch.Tensor, window: int = 0) -> list[Segment]:
    """Return the segments of causal attention within each document, as rectangles of the attention matrix.

    ``cu_seqlens``: where documents begin in the flattened rows, and at last where they end; ``window``: the number of
    tokens that a token sees, itself included; 0: all.
    """
    documents = [(a, b) for a, b in pairwise(cu_seqlens.tolist()) if b > a]
    return [segment for a, b in documents for segment in windowed(a, b, window)]


def windowed(a: int, b: int, window: int) -> list[Segment]:
    """Return the segments (rectangles of the attention matrix) of causal attention among the tokens ``a:b``.

    ``window``: the number of tokens that a token sees, itself included; 0: all.
    """
    step, segments = window or b - a, []
    for start in range(a, b, step):
        end = min(start + step, b)
        segments.append(Segment(start, end, start, end, True))
        if start > a:
            before = earlier_keys(start, end, start - step, start, window)
            segments += [segment._replace(joins=True) for segment in before]
    return segments


def earlier_keys(q0: int, q1: int, k0: int, k1: int, window: int) -> list[Segment]:
    """Return the segments of queries ``q0:q1`` against earlier keys ``k0:k1`` (``k1 <= q0``) of the same document.

    ``window``: the number of tokens that a token sees, itself included. For 0 a token sees all, and there is one
    segment, a rectangle. With a window there are up to three segments:

    - a rectangle of the first queries, which see all keys;
    - a triangle of the queries after them, each of which sees one key less than the query before;
    - a rectangle of these same queries and the last keys, which all of them see.
    """
    if not window:
        return [Segment(q0, q1, k0, k1, False)]
    reach = window - 1  # from a query to the farthest key that it sees
    k0, q1 = max(k0, q0 - reach), min(q1, k1 + reach)
    if q0 >= q1 or k0 >= k1:
        return []
    edge = max(q0, min(q1, k0 + reach))
    segments = [Segment(q0, edge, k0, k1, False)] if edge > q0 else []
    if edge < q1:
        first, seen = edge - reach, q1 - reach
        segments.append(Segment(edge, q1, first, seen, True, flipped=True))
        if seen < k1:
            segments.append(Segment(edge, q1, seen, k1, False, joins=True))
    return segments


def cut(s: Segment, square: int = SQUARE) -> list[Segment]:
    """Cut the causal segment ``s`` into small causal squares, and full rectangles that cover the rest.

    ``square``: the least size of a small square. A segment that is not causal is returned whole.
    """
    half = (s.q1 - s.q0) // 2
    if not s.causal or half < square:
        return [s]
    q, k = s.q0 + half, s.k0 + half
    first, second = s._replace(q1=q, k1=k), s._replace(q0=q, k0=k)
    queries, keys = (first, second) if s.flipped else (second, first)
    corner = Segment(queries.q0, queries.q1, keys.k0, keys.k1, False, joins=True)
    return [*cut(first, square), *cut(second, square), corner]


def uniform(segments: list[Segment], queries: int, keys: int) -> tuple[int, int] | None:
    """Return the number of queries and the number of keys of each segment (a rectangle of the attention matrix), if one
    batched call can compute all ``segments``.

    One call is possible if all segments have equal sizes, and together cover ``queries`` queries and ``keys`` keys in
    order. Otherwise the result is None.
    """
    if not segments:
        return None
    n, m = segments[0].q1 - segments[0].q0, segments[0].k1 - segments[0].k0
    if (n * len(segments), m * len(segments)) != (queries, keys):
        return None
    for i, segment in enumerate(segments):
        if segment != Segment(i * n, i * n + n, i * m, i * m + m, segments[0].causal):
            return None
    return n, m
