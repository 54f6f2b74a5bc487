"""Attention of texts to prefixes of other texts, beside their own tokens and at any positions.

A text sees tiles: the first tokens in blocks of other texts. Keys are never copied or rotated again. Where a text sees
a tile at other positions than those of the tile's keys, the queries are rotated by the difference, once for all tokens
of the tile (Hogwild! Inference, Rodionov et al. 2025, 2504.06261). All texts that see a tile attend to it in one call,
and results of tiles are merged by their log-sum-exps.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from weft.models.attention import Segment, attend_forward, join
from weft.models.numbers import wide
from weft.models.rope import angles, rotate
from weft.models.spans import Span, own_segments

T = torch.Tensor


class PrefixReaders(NamedTuple):
    """A prefix that several texts share, and the queries that attend to it.

    Attributes:
        ``table``: numbers of the cache blocks in which the prefix lies.
        ``tokens``: number of tokens of the prefix: the first ones in these blocks.
        ``places``: indices of the queries that attend to the prefix, among all queries of the :class:`PrefixGroup`.
        ``turns``: cosines and sines, ``[queries, 1, rotated / 2]`` each. Every query is rotated further by these angles
            before it attends to the prefix. The prefix then counts as standing at other positions than those it was
            cached at. None: no further rotation.
    """

    table: Sequence[int]
    tokens: int
    places: T  # [queries], among all queries of the group
    # cosine and sine [queries, 1, rotated / 2] of what turns each query, if anything does
    turns: tuple[T, T] | None


class PrefixGroup(NamedTuple):
    """New tokens of texts that attend to prefixes of other cached texts beside their own text.

    ``spans``: the new tokens of each text; ``rows``: index of each of their queries in the packed row; ``seen``: the
    prefixes of other texts, each with the queries that attend to it.
    """

    spans: Sequence[Span]
    rows: T  # [queries], places in the packed row
    seen: Sequence[PrefixReaders]


def group_prefixes(spans: Sequence[Span], freq: T | None, like: T) -> PrefixGroup:
    """Return the queries of ``spans``, grouped by the prefixes of other texts that they attend to.

    Each prefix is then read once for all its queries. ``freq``: frequencies of rotary embedding. They give the angles
    by which queries are rotated further where a prefix counts as standing at other positions than those it was cached
    at. None: no query is rotated. ``like``: a tensor of the queries' type and device.
    """
    rows = [list(range(span.first, span.last)) for span in spans]
    viewers = defaultdict[tuple[tuple[int, ...], int], list[tuple[int, int]]](list)
    at = 0
    for span in spans:
        for tile in span.context:
            viewers[tuple(tile.table), tile.tokens] += [
                (place, tile.turn) for place in range(at, at + span.last - span.first)
            ]
        at += span.last - span.first

    def seen(
        table: tuple[int, ...], tokens: int, who: Sequence[tuple[int, int]]
    ) -> PrefixReaders:
        places, turns = torch.tensor(who, device=like.device).T
        if freq is None or not turns.any():
            return PrefixReaders(table, tokens, places, None)
        # [1, 1, queries, 1, rotated / 2]
        cos, sin = angles(turns[None], freq[None], like.dtype)
        return PrefixReaders(table, tokens, places, (cos[0, 0], sin[0, 0]))

    flat = torch.tensor([row for each in rows for row in each], device=like.device)
    return PrefixGroup(spans, flat, [seen(*key, who) for key, who in viewers.items()])


def turned(q: T, cos: T, sin: T) -> T:
    """Rotate queries, which have been rotated once already, by further angles.

    ``q``: ``[queries, heads, width]``. ``cos``, ``sin``: cosines and sines of the angles, last dimension ``pairs``.
    Only the last ``2 * pairs`` elements of each head are rotated; the first of them is paired with the one ``pairs``
    further on.
    """
    width = 2 * cos.shape[-1]
    return torch.cat([q[..., :-width], rotate(q[..., -width:], cos, sin)], -1)


def attend_prefixes(q: T, group: PrefixGroup, read: Callable[[Span], tuple[T, T]]) -> T:
    """Compute the attention of the queries of ``group`` to their own texts and to the prefixes of other texts.

    ``q``: the queries of the group's spans one after the other, ``[queries, heads, width]``; the result has the same
    shape. ``read``: a function from a span to the keys and values that its text has in the cache.
    """
    outs = []
    logs = []
    first = 0
    for span in group.spans:
        last = first + span.last - span.first
        out, lse = attend_forward(
            q[first:last], *read(span), own_segments(last - first, span.past, 0)
        )
        outs.append(out.to(wide(q.dtype)))
        logs.append(lse)
        first = last
    total, lse = torch.cat(outs), torch.cat(logs)
    for table, tokens, places, turns in group.seen:
        asked = q[places] if turns is None else turned(q[places], *turns)
        attended = attend_forward(
            asked,
            *read(Span(0, tokens, 0, table)),
            [Segment(0, len(places), 0, tokens, False)],
        )
        some = total[places], lse[places]
        join(*some, *attended)
        total[places], lse[places] = some
    return total.to(q.dtype)
