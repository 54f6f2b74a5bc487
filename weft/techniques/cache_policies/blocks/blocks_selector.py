"""Choice of blocks by their mean keys, and attention to the chosen blocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
import torch.nn.functional as F

from weft.models.block_selector import (
    BlockSelector,
    SelectedPages,
    gather_heads,
    padded_tables,
    seen_keys,
)
from weft.models.numbers import wide
from weft.models.queued_copy import queued_copy
from weft.models.spans import Span

T = torch.Tensor

#: Blocks that a token sees at least.
LEAST = 4

#: Queries of a text that choose in one call, where there are many.
TILE = 128


class _Singles(NamedTuple):
    """Texts with one new token each, of which some blocks are hidden. ``rows``: their tokens in the packed row;
    ``tables``: their blocks, ``[texts, blocks]``; ``past``: tokens before each, ``[texts]``; ``kept``: blocks that each
    sees beside its own, ``[texts]``; ``most``: the largest of these.
    """

    rows: T
    tables: T
    past: T
    kept: T
    most: int


class _Plan(NamedTuple):
    """The texts of a pass. ``whole``: those that are read whole; ``many``: those with several new tokens."""

    whole: list[Span]
    singles: _Singles | None
    many: list[Span]
    chosen: int  # keys that `singles` attend to, and read
    marked: int  # keys that `many` attend to


class MeanKeySelector(BlockSelector):
    """Chooses for each key head the fraction ``share`` of a text's blocks by their mean keys. The means are kept beside
    the cache.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.means: T | None = None  # [blocks, kv_heads, width]

    def kept_blocks(self, blocks: int) -> int:
        """Return how many blocks of a text a token in its last block sees, that block included. ``blocks``: number of
        the text's blocks.
        """
        return max(min(LEAST, blocks), ceil(self.share * blocks - 1e-9))

    def written(self, pages: SelectedPages) -> None:
        size = pages.size
        key = "written blocks"
        if key not in pages.reading.prepared:
            pages.reading.prepared[key] = sorted({
                block
                for span in pages.reading.spans
                for block in span.table[span.past // size : -(-(span.past + span.last - span.first) // size)]
            })  # fmt: skip
        self.loaded(pages, pages.reading.prepared[key])

    def loaded(self, pages: SelectedPages, blocks: Sequence[int]) -> None:
        store = pages.store
        if store is None or not blocks:
            return
        if self.means is None or len(self.means) < store.shape[1]:
            grown = store.new_zeros(store.shape[1], *store.shape[3:], dtype=wide(store.dtype))  # fmt: skip
            if self.means is not None:
                grown[: len(self.means)] = self.means
            self.means = grown
        at = queued_copy([*blocks], store.device)
        # of a block that is not full yet it is no mean, and is not asked for
        self.means[at] = store[0, at].to(self.means.dtype).mean(1)

    def attend(self, pages: SelectedPages, q: T, out: T, window: int) -> None:
        spans = pages.reading.spans
        if window:  # which bounds what is read already
            pages.attend_spans(spans, q, out, window)
            return
        key = "blocks"
        if key not in pages.reading.prepared:
            pages.reading.prepared[key] = self._plan(spans, pages.size, q)
        plan: _Plan = pages.reading.prepared[key]
        heads = pages.store.shape[3] if pages.store is not None else 0
        own = seen_keys(plan.whole) + plan.chosen
        chosen, read = own + plan.marked, own + seen_keys(plan.many)
        self.count(seen_keys(spans) * heads, chosen * heads, read * heads)
        if plan.whole:
            pages.attend_spans(plan.whole, q, out, 0)
        if plan.singles is not None:
            self._attend_singles(pages, q, out, plan.singles)
        for span in plan.many:
            for first in range(span.first, span.last, TILE):
                last = min(first + TILE, span.last)
                past = span.past + first - span.first
                self._attend_many(pages, q, out, span._replace(first=first, last=last, past=past))  # fmt: skip

    def _plan(self, spans: Sequence[Span], size: int, q: T) -> _Plan:
        whole, single, many = list[Span](), list[Span](), list[Span]()
        for span in spans:
            blocks = (span.past + span.last - span.first - 1) // size + 1
            hides = self.kept_blocks(blocks) < blocks
            alike = (
                (single if span.last - span.first == 1 else many) if hides else whole
            )
            alike.append(span)
        marked = sum(
            self._chosen(past, size)
            for span in many
            for past in range(span.past, span.past + span.last - span.first)
        )
        if not single:
            return _Plan(whole, None, many, 0, marked)
        kept = [self.kept_blocks(span.past // size + 1) - 1 for span in single]
        rows, past, numbers = queued_copy(
            [[s.first for s in single], [s.past for s in single], kept], q.device
        )
        chosen = sum(self._chosen(span.past, size) for span in single)
        singles = _Singles(rows, padded_tables(single, q), past, numbers, max(kept))
        return _Plan(whole, singles, many, chosen, marked)

    def _chosen(self, past: int, size: int) -> int:
        """Return how many keys a token with ``past`` tokens before it attends to."""
        return (self.kept_blocks(past // size + 1) - 1) * size + past % size + 1

    def _scores(self, q: T, tables: T) -> T:
        """Return how well the mean keys of blocks fit: ``[texts, kv_heads, queries, blocks]``.

        ``q``: ``[texts, kv_heads, queries, group, width]``; ``tables``: numbers of the blocks, ``[texts, blocks]``.
        """
        assert self.means is not None
        summed = q.to(self.means.dtype).sum(3)
        # [texts, kv_heads, blocks, width]
        means = self.means[tables].transpose(1, 2)
        return summed @ means.transpose(2, 3)

    def _attend_singles(self, pages: SelectedPages, q: T, out: T, texts: _Singles) -> None:  # fmt: skip
        store = pages.store
        assert store is not None
        size, kv_heads = pages.size, store.shape[3]
        # [texts, kv_heads, group, width]
        queries = q[texts.rows].unflatten(1, (kv_heads, -1))
        scores = self._scores(queries[:, :, None], texts.tables)[:, :, 0]
        own = texts.past // size
        numbers = torch.arange(texts.tables.shape[1], device=q.device)
        scores = scores.masked_fill(numbers >= own[:, None, None], -torch.inf)
        # [texts, kv_heads, most], indices in the tables
        best = scores.topk(texts.most, -1).indices
        chosen = torch.cat([best, own[:, None, None].expand(-1, kv_heads, 1)], -1)
        tables = texts.tables[:, None].expand(-1, kv_heads, -1)
        keys, values = gather_heads(store, tables.gather(2, chosen))
        places = torch.arange(texts.most * size, device=q.device) // size
        hidden = places >= texts.kept[:, None]
        behind = torch.arange(size, device=q.device) > (texts.past % size)[:, None]
        # [texts, 1, 1, keys]
        seen = ~torch.cat([hidden, behind], 1)[:, None, None]
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
        out[texts.rows] = attended.flatten(1, 2)

    def _attend_many(self, pages: SelectedPages, q: T, out: T, span: Span) -> None:
        """Read all of the text, as its new tokens see different blocks of it."""
        size = pages.size
        keys, values, _ = pages.read(span, 0)
        rows = slice(span.first, span.last)
        count, blocks = span.last - span.first, -(-len(keys) // size)
        # [kv_heads, tokens, group, width]
        queries = q[rows].unflatten(1, (keys.shape[1], -1)).transpose(0, 1)
        table = queued_copy([span.table[:blocks]], q.device)
        scores = self._scores(queries[None], table)[0]
        at = span.past + torch.arange(count, device=q.device)
        numbers = torch.arange(blocks, device=q.device)
        earlier = numbers < (at // size)[:, None]
        scores = scores.masked_fill(~earlier, -torch.inf)
        ranks = scores.argsort(-1, descending=True).argsort(-1)
        kept = [self.kept_blocks((span.past + i) // size + 1) - 1 for i in range(count)]
        least = queued_copy(kept, q.device)[:, None]
        own = numbers == (at // size)[:, None]
        # [kv_heads, tokens, keys]
        seen = ((ranks < least) & earlier | own).repeat_interleave(size, 2)
        seen = seen[..., : len(keys)] & (
            torch.arange(len(keys), device=q.device) <= at[:, None]
        )
        group = queries.shape[2]
        attended = F.scaled_dot_product_attention(
            queries.flatten(1, 2)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=seen.repeat_interleave(group, 1)[None],
        )
        # [tokens, heads, width]
        shaped = attended[0].unflatten(1, (count, group)).transpose(0, 1)
        out[rows] = shaped.flatten(1, 2)
