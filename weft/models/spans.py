"""Spans, the new tokens of texts that one forward pass computes, and the attention of many spans in one call."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F

from weft.models.attention import Segment, attend_forward
from weft.models.invariant import is_invariant
from weft.models.invariant_kernels import (
    Reach,
    attend_each,
    bias_of,
    hiding_bias,
    reaches,
)
from weft.models.queued_copy import queued_copy
from weft.models.segments import earlier_keys, windowed

T = torch.Tensor

#: The most tokens of spans that share a call with others of the same length; longer spans fill a call alone.
SHORT = 16

#: In one call, the largest ratio of padded to own keys, and the most blocks that are copied.
PADDED, MOST = 1.5, 1024


class PrefixTile(NamedTuple):
    """A prefix of another text that a text attends to.

    ``table``: numbers of the cache blocks of the other text; ``tokens``: number of tokens of the prefix, the first ones
    in these blocks. ``turn``: number of positions by which queries are rotated further when they attend to this prefix.
    The prefix then counts as standing that many positions earlier than it was cached at.
    """

    table: Sequence[int]
    tokens: int
    turn: int = 0


class Span(NamedTuple):
    """The new tokens of one text in a forward pass: the tokens ``first:last`` of a packed row.

    ``past``: the number of the text's earlier tokens. ``table``: numbers of the cache blocks of the text. ``context``:
    prefixes of other texts that the new tokens also see. ``prompt``: number of tokens of the text's prompt.
    """

    first: int
    last: int
    past: int
    table: Sequence[int]
    context: Sequence[PrefixTile] = ()  # of other texts, all of which comes before
    prompt: int = 0


class SpanBatch(NamedTuple):
    """New tokens of several texts whose attention is one call; every text has equally many.

    Attributes:
        ``rows``: indices of the tokens in the packed row, ``[texts, tokens]``; a slice if they follow each other.
        ``shape``: the numbers of texts and of tokens in a text.
        ``blocks``: cache blocks of each text, ``[texts, blocks]``; shorter tables are padded with their last block.
        ``bias``: 0 where a token sees a key, else -inf, ``[texts, 1, tokens * group, keys]``; ``group`` is the number
            of query heads per key head.
        ``keys``: range of keys in the blocks that is read, in a batch in which each token attends by itself; None: all
            keys.
    """

    # [texts, tokens], places in the packed row; a slice if they follow each other there
    rows: T | slice
    shape: tuple[int, int]  # of the rows: texts, tokens
    blocks: T  # [texts, blocks], shorter tables filled up with their last block
    bias: T  # [texts, 1, tokens * group, keys]: 0 where a token sees a key, else -inf
    # those of the blocks that are read, where every token is attended to for itself
    keys: slice | None = None


def seen_blocks(span: Span, size: int, window: int) -> tuple[int, int]:
    """Return where in ``span.table`` the blocks lie that any token of the span sees: first index and end.

    ``size``: tokens of a block; ``window``: the number of tokens that a token sees, itself included; 0: all.
    """
    first = max(0, span.past - window + 1) // size if window else 0
    return first, -(-(span.past + span.last - span.first) // size)


def batch_spans(
    spans: Iterable[Span], size: int, window: int, q: T, group: int
) -> list[SpanBatch | Span]:
    """Group the spans whose attention is computed in one call. Returns the groups.

    A span is the new tokens of one text. Spans of at most :data:`SHORT` tokens share a call if they have equally many
    tokens and about equally many cache blocks. Every other span has a call of its own, and is returned as it is.
    ``size``: tokens of a cache block; ``window``: the number of tokens that a token sees, itself included; 0: all.
    ``q``: a tensor of the queries' type; ``group``: query heads of each key/value head.
    """
    if is_invariant():
        return [*batch_each_query(spans, size, window, q, group)]

    def measure(span: Span) -> tuple[int, int]:
        first, last = seen_blocks(span, size, window)
        return span.last - span.first, last - first

    groups: list[list[Span]] = []
    for span in sorted(spans, key=measure):
        tokens, blocks = measure(span)
        if groups:
            alike = groups[-1]
            same_tokens, least = measure(alike[0])
            fits = same_tokens == tokens <= SHORT and blocks <= PADDED * least
            if fits and blocks * (len(alike) + 1) <= MOST:
                alike.append(span)
                continue
        groups.append([span])
    return [
        _batch(alike, size, window, q, group) if len(alike) > 1 else alike[0]
        for alike in groups
    ]


def batch_each_query(
    spans: Iterable[Span], size: int, window: int, q: T, group: int
) -> Iterator[SpanBatch]:
    """Group spans so that each group's attention is one call, and no result depends on what else is in the batch.

    A group has the queries that read the same number of keys. In the call each query attends by itself. ``size``:
    tokens of a cache block; ``window``: the number of tokens that a token sees, itself included; 0: all. ``q``: a
    tensor of the queries' type; ``group``: query heads of each key/value head.
    """
    reaches_by_size: dict[tuple[int, int, int], list[tuple[Span, Reach]]] = defaultdict(
        list
    )
    for span in spans:
        for reach in reaches(span.past, span.past + span.last - span.first, window):
            # several queries of one text share its keys
            alone = span.first if reach.last - reach.first > 1 else -1
            reaches_by_size[reach.low, reach.high, alone].append((span, reach))
    for (low, high, _), alike in reaches_by_size.items():
        first, last = low // size, -(-high // size)
        tables = [
            [*s.table[first:last], *[s.table[-1]] * (last - max(first, len(s.table)))]
            for s, _ in alike
        ]
        rows = [
            [*range(s.first + r.first - s.past, s.first + r.last - s.past)]
            for s, r in alike
        ]
        bias = torch.cat([bias_of(reach, window, group, q) for _, reach in alike])
        blocks = queued_copy(tables, q.device)
        keys = slice(low - first * size, high - first * size)
        shape = len(rows), len(rows[0])
        yield SpanBatch(packed_rows(rows, q), shape, blocks, bias, keys)


def _batch(
    spans: Sequence[Span], size: int, window: int, q: T, group: int
) -> SpanBatch:
    seen = [seen_blocks(span, size, window) for span in spans]
    width = max(last - first for first, last in seen)
    tables = [
        [*s.table[a:b], *[s.table[b - 1]] * (width - (b - a))]
        for s, (a, b) in zip(spans, seen, strict=True)
    ]
    rows = [[*range(span.first, span.last)] for span in spans]
    past = queued_copy([[span.past] for span in spans], q.device)
    before = queued_copy([[first * size] for first, _ in seen], q.device)
    # [texts, tokens, 1]
    at = (past + torch.arange(len(rows[0]), device=q.device))[:, :, None]
    # [texts, 1, keys]
    keys = (before + torch.arange(width * size, device=q.device))[:, None]
    bias = hiding_bias(at, keys, window, q).repeat_interleave(group, 1)[:, None]
    blocks = queued_copy(tables, q.device)
    return SpanBatch(packed_rows(rows, q), (len(rows), len(rows[0])), blocks, bias)


def packed_rows(rows: Sequence[Sequence[int]], like: T) -> T | slice:
    """Return the indices ``rows`` as a slice if they follow each other, else as a tensor on the device of ``like``.

    ``rows``: indices in the packed row, ``[texts, tokens]``.
    """
    places = [place for row in rows for place in row]
    first, count = places[0], len(places)
    if places == [*range(first, first + count)]:
        return slice(first, first + count)
    return queued_copy(rows, like.device)


def attend_batch(q: T, k: T, v: T, batch: SpanBatch) -> T:
    """Compute the attention of several texts' queries in one call: ``[texts, tokens, heads, width]``.

    ``q``: the queries, of the same shape; ``k, v``: keys and values in the cache blocks of ``batch``, ``[texts, keys,
    kv_heads, width]``. Query heads that share a key head are treated as further queries of this head, so that its keys
    are read once for all of them.
    """
    if batch.keys is not None:
        attended, _ = attend_each(
            q.flatten(0, 1), k[:, batch.keys], v[:, batch.keys], batch.bias
        )
        return attended.view(q.shape)
    tokens, kv_heads = q.shape[1], k.shape[2]
    # [texts, kv_heads, tokens * group, width]
    shared = q.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3)
    out = F.scaled_dot_product_attention(
        shared, k.transpose(1, 2), v.transpose(1, 2), attn_mask=batch.bias
    )
    return out.unflatten(2, (tokens, -1)).transpose(1, 2).flatten(2, 3)


def own_segments(tokens: int, past: int, window: int) -> list[Segment]:
    """Return the attention segments of a text's last ``tokens`` tokens, which also see the ``past`` tokens before.

    ``window``: the number of tokens that a token sees, itself included; 0: all.
    """
    earlier = earlier_keys(past, past + tokens, 0, past, window) if past else []
    pieces = [
        *windowed(past, past + tokens, window),
        *(s._replace(joins=True) for s in earlier),
    ]
    return [s._replace(q0=s.q0 - past, q1=s.q1 - past) for s in pieces]


def attend_span(q: T, k: T, v: T, past: int, window: int) -> T:
    """Compute the attention of the last tokens of a text to the text: ``[tokens, heads, width]``.

    Each token attends to itself and to the tokens before it. ``q``: queries of the last tokens, of the same shape.
    ``k, v``: keys and values of the text, ``[past + tokens, kv_heads, width]``; the first ``past`` of them belong to
    the earlier tokens. ``window``: the number of tokens that a token sees, itself included; 0: all.
    """
    if len(q) > 1:
        return attend_forward(q, k, v, own_segments(len(q), past, window))[0]
    if window:
        k, v = k[-window:], v[-window:]
    # One token sees every key. The query heads that share a key head can then be so many queries of it, and the keys
    # are read once for all of them: [1, kv_heads, group, width].
    shared = q.reshape(1, k.shape[1], -1, q.shape[2])
    out = F.scaled_dot_product_attention(
        shared, k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    )
    return out.reshape(*q.shape[:2], -1)


def rounds(spans: Iterable[Span], size: int) -> Iterator[list[Span]]:
    """Cut spans where cache blocks of ``size`` tokens end, and yield lists of pieces that can be computed together.

    The pieces of a list are equally long and of different texts. The pieces of one text are yielded in the order of its
    tokens.
    """
    pieces: list[tuple[int, Span]] = []
    for span in spans:
        first = span.first
        past = span.past
        turn = 0
        while first < span.last:
            count = min(size - past % size, span.last - first)
            cut = span._replace(first=first, last=first + count, past=past, context=())
            pieces.append((turn, cut))
            first = first + count
            past = past + count
            turn = turn + 1
    order = sorted(pieces, key=lambda p: (p[0], p[1].last - p[1].first))
    for _, alike in groupby(order, key=lambda p: (p[0], p[1].last - p[1].first)):
        yield [piece for _, piece in alike]
