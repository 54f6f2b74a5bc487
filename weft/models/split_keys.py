"""Attention of few new tokens by shares of their keys, with one fixed maximum (FlashDecoding++, 2311.01282).

The shares of a text's keys are multiplied one after the other, while each is in the processor's caches, and their sums
add (:mod:`weft.models.fixed_maximum`). All query heads that share a key head are rows of one flat product, so that a
key is read once for all of them. The maximum of a layer is 0 until scores were too far from it: then the text's tokens
are computed again, and the largest of these scores is the layer's maximum from then on.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from weft.models.fixed_maximum import FixedSums, query_rows, rows_by_token
from weft.models.numbers import wide
from weft.models.spans import Span, seen_blocks

T = torch.Tensor

#: Keys of a share.
SHARE_KEYS = 1024


class ShortSpans(NamedTuple):
    """A group of texts with few new tokens each; the texts are attended to one after the other. ``spans``: the new
    tokens of each text.
    """

    spans: Sequence[Span]


#: The fixed maximum of each layer whose scores were too far from 0, by where its cache is in memory.
_highest: dict[int, float] = {}


class KeyShare(NamedTuple):
    """A share of a text's keys and values, which are read together. ``keys``, ``values``: ``[kv_heads, tokens,
    width]``. ``first``: position in the text of the first of these tokens.
    """

    keys: T
    values: T
    first: int


def key_shares(store: T, span: Span, window: int) -> Iterator[KeyShare]:
    """Yield the keys and values that the new tokens of ``span`` see, share by share. ``store``: the cache of a layer;
    ``window``: the number of tokens that a token sees, itself included; 0: all. Blocks that lie side by side are not
    copied.
    """
    size, end = store.shape[2], span.past + span.last - span.first
    first, last = seen_blocks(span, size, window)
    step = max(1, SHARE_KEYS // size)
    low = max(0, span.past - window + 1) if window else 0
    for at in range(first, last, step):
        table = span.table[at : min(at + step, last)]
        if all(b - a == 1 for a, b in pairwise(table)):
            parts = [part[table[0] : table[-1] + 1] for part in store]
        else:
            numbers = torch.tensor(table, device=store.device)
            parts = [part.index_select(0, numbers) for part in store]
        begin = max(low, at * size)
        own = slice(begin - at * size, end - at * size)
        # [kv_heads, tokens, width] each
        keys, values = (part.flatten(0, 1)[own].transpose(0, 1) for part in parts)
        yield KeyShare(keys, values, begin)


def attend_short(q: T, store: T, spans: Sequence[Span], window: int, out: T) -> None:
    """Write the attention of the new tokens of ``spans`` into ``out``.

    ``q``, ``out``: ``[packed tokens, heads, width]``; ``store``: the cache of a layer, ``[2, blocks, size, kv_heads,
    width]``; ``window``: the number of tokens that a token sees, itself included; 0: all.
    """
    place = store.data_ptr()
    for span in spans:
        highest = _highest.get(place, 0.0)
        attended, is_exact = attend_shares(q, store, span, window, highest)
        if not is_exact:
            highest = largest_score(q, store, span, window)
            _highest[place] = highest
            attended, is_exact = attend_shares(q, store, span, window, highest)
        if not is_exact:  # rows that are too far from each other for one maximum
            attended, _ = attend_shares(q, store, span, window, None)
        out[span.first : span.last] = attended


def attend_shares(
    q: T, store: T, span: Span, window: int, highest: float | None
) -> tuple[T, bool]:
    """Compute the attention of the new tokens of ``span``, ``[tokens, heads, width]``. Return it, and whether it is
    exact. ``q``: queries of all new tokens; ``store``: the cache of a layer; ``window``: the number of tokens that a
    token sees, itself included; 0: all. ``highest``: the fixed maximum of the scores; None: each row's largest score,
    for which all keys are read once more. The result is not exact if a score was so far from the fixed maximum that its
    exponential overflows or loses precision.
    """
    count, kv_heads = span.last - span.first, store.shape[3]
    rows = query_rows(q[span.first : span.last], kv_heads)
    group = rows.shape[1] // count
    fixed: float | T | None = highest
    if highest is None:
        fixed = _scores(rows, store, span, window).amax(-1, keepdim=True)
    sums = FixedSums(rows, fixed)
    for share in key_shares(store, span, window):
        sums.add(share.keys, share.values, hidden_keys(span, share, window, group))
    return rows_by_token(sums.out, count).to(q.dtype), sums.exact


def hidden_keys(span: Span, share: KeyShare, window: int, group: int) -> T | None:
    """Return a mask, bool ``[tokens * group, keys]``, that is True where a row of queries, of the new tokens of
    ``span``, does not see a key of ``share``; None: each row sees all. ``group``: query heads per key head; ``window``:
    the number of tokens that a token sees, itself included; 0: all.
    """
    count, end = span.last - span.first, share.first + share.keys.shape[1]
    sees_last = end <= span.past + 1
    sees_first = not window or share.first > span.past + count - 1 - window
    if sees_last and sees_first:
        return None
    keys = torch.arange(share.first, end, device=share.keys.device)
    places = torch.arange(span.past, span.past + count, device=keys.device)[:, None]
    hidden = keys > places
    if window:
        hidden = hidden | (keys <= places - window)
    return hidden.repeat_interleave(group, 0)


def largest_score(q: T, store: T, span: Span, window: int) -> float:
    """Return the largest attention score of any new token of ``span`` with a key that it sees. ``q``: queries of all
    new tokens, ``[packed tokens, heads, width]``; ``store``: the cache of a layer; ``window``: the number of tokens
    that a token sees, itself included; 0: all.
    """
    rows = query_rows(q[span.first : span.last], store.shape[3])
    return float(_scores(rows, store, span, window).amax())


def _scores(rows: T, store: T, span: Span, window: int) -> T:
    """All scores of a text's rows: ``[kv_heads, rows, keys]``."""
    group = rows.shape[1] // (span.last - span.first)
    scaled = rows.to(wide(rows.dtype)) * rows.shape[-1] ** -0.5
    scores = []
    for share in key_shares(store, span, window):
        score = torch.bmm(scaled, share.keys.to(scaled.dtype).transpose(1, 2))
        hidden = hidden_keys(span, share, window, group)
        scores.append(
            score if hidden is None else score.masked_fill_(hidden, -torch.inf)
        )
    return torch.cat(scores, -1)
