"""Attention as rectangles of work: which queries meet which keys, of packed documents and within a sliding window.

A :class:`Segment` is what a kernel computes in one call. Only two masks are ever needed, causal and none: what slides
out of a window is a triangle at the other corner, and becomes a causal one when both sides are read from the end.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

#: Side of the smallest causal squares that longer documents are cut into on the CPU.
SQUARE = 256


class Segment(NamedTuple):
    """Queries ``q0:q1`` against keys ``k0:k1`` of flattened token rows: all of them, or as many as ``causal`` says."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool  # a square, in which a query sees the keys up to its own place
    joins: bool = False  # its queries have met other keys before
    # of a causal square: a query sees the keys from its own place on
    flipped: bool = False


def document_segments(cu_seqlens: torch.Tensor, window: int = 0) -> list[Segment]:
    """One causal segment per document, or what a ``window`` leaves of it (0: none): so many tokens, with itself."""
    bounds = cu_seqlens.tolist()
    return [
        segment
        for a, b in pairwise(bounds)
        if b > a
        for segment in windowed(a, b, window)
    ]


def windowed(a: int, b: int, window: int) -> list[Segment]:
    """Tokens ``a:b`` against themselves."""
    step, segments = window or b - a, []
    for start in range(a, b, step):
        end = min(start + step, b)
        segments.append(Segment(start, end, start, end, True))
        if start > a:
            before = earlier_keys(start, end, start - step, start, window)
            segments += [segment._replace(joins=True) for segment in before]
    return segments


def earlier_keys(q0: int, q1: int, k0: int, k1: int, window: int) -> list[Segment]:
    """Queries ``q0:q1`` against keys ``k0:k1`` before them (``k1 <= q0``) of one document.

    Within a window that is a rectangle of the first queries, which see all keys, then a triangle of those that lose a
    key each, and the rectangle of the keys that these all see.
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
    """A causal square as small causal squares and full rectangles that join their rows; a rectangle as it is."""
    half = (s.q1 - s.q0) // 2
    if not s.causal or half < square:
        return [s]
    q, k = s.q0 + half, s.k0 + half
    corner = (
        Segment(s.q0, q, k, s.k1, False, True)
        if s.flipped
        else Segment(q, s.q1, s.k0, k, False, True)
    )
    return [
        *cut(s._replace(q1=q, k1=k), square),
        *cut(s._replace(q0=q, k0=k), square),
        corner,
    ]


def uniform(segments: list[Segment], queries: int, keys: int) -> tuple[int, int] | None:
    """Common size if the segments are equal and tile all queries and keys in order."""
    if not segments:
        return None
    n, m = segments[0].q1 - segments[0].q0, segments[0].k1 - segments[0].k0
    alike = (
        Segment(i * n, i * n + n, i * m, i * m + m, segments[0].causal)
        for i in range(len(segments))
    )
    tiled = n * len(segments) == queries and m * len(segments) == keys
    if tiled and all(a == b for a, b in zip(alike, segments, strict=True)):
        return (n, m)
    return None
