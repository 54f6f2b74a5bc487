"""Choice of tokens by sums of attention weights, and attention to tokens on the device and on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

import torch
import torch.nn.functional as F

from weft.models.block_selector import (
    BlockSelector,
    SelectedPages,
    padded_tables,
    seen_keys,
)
from weft.models.numbers import wide
from weft.models.spans import Span, rounds
from weft.techniques.cache_policies.alisa.drawn_tokens import SeenTokens, count_drawn
from weft.techniques.cache_policies.alisa.host_memory import HostMemory, rounded

T = torch.Tensor

#: Blocks whose tokens a token sees at least.
LEAST = 4

#: What is kept of the sums after each block of queries. Without it the first tokens of a text, which all queries have
#: seen, would leave no room for later ones.
FADING = 0.5

#: Blocks at the end of a prompt whose queries count in the sums. Of sums from queries before them fading would leave
#: less than a hundredth.
RECENT = 8


class _Round(NamedTuple):
    """Pieces of texts that attend in one call, each within a block. ``rows``: their tokens in the packed row,
    ``[texts, tokens]``; ``tables``: their blocks, ``[texts, blocks]``; ``at``: positions of the tokens, like ``rows``.
    """

    pieces: list[Span]
    rows: T
    tables: T
    at: T


class WeightSumSelector(BlockSelector):
    """Chooses the fraction ``share`` of the tokens: half of these are the last tokens, the others those with the
    largest running sums of attention weights. All tokens of a block choose by the sums from the blocks before. The
    choice thus does not depend on the pieces in which a text is computed. ``size``: tokens of a block; ``in_bytes``:
    whether keys and values are rounded to 8 bits; ``prompts``: whether tokens of a prompt choose, too. Otherwise these
    see all tokens before them, and the last ones of them begin the sums.

    The attribute ``together`` is the largest number of tokens that choose together; ``sums_weights``: whether attention
    weights are summed; ``near``: the share of the seen tokens that are the last ones.
    """

    sums_weights, near = True, 0.5

    def __init__(
        self, share: float, size: int, in_bytes: bool, prompts: bool = False
    ) -> None:
        super().__init__()
        self.share, self.size, self.in_bytes = share, size, in_bytes
        self.prompts, self.together = prompts, size
        # sums from finished blocks of queries, and from the present one: [2, blocks, size, kv_heads]
        self.sums: T | None = None
        self.host = HostMemory(in_bytes)

    def written(self, pages: SelectedPages) -> None:
        store, slots = pages.store, pages.reading.slots
        assert store is not None
        shape = 2, *store.shape[1:4]
        if self.sums is None or self.sums.shape[1] < shape[1]:
            grown = store.new_zeros(shape, dtype=wide(store.dtype))
            if self.sums is not None:
                grown[:, : self.sums.shape[1]] = self.sums
            self.sums = grown
        self.sums.flatten(1, 2)[:, slots] = 0
        if self.in_bytes:
            tokens = store.flatten(1, 2)
            values, scales = rounded(tokens[:, slots])
            tokens[:, slots] = (values * scales).to(store.dtype)

    def copied(
        self, pages: SelectedPages, blocks: Sequence[tuple[int, int]]
    ) -> Sequence[tuple[int, int]]:
        moves = [pair for pair in blocks if pair[1] < 0]
        if moves:
            self._move(pages, moves)
        return [pair for pair in blocks if pair[1] >= 0]

    def _move(self, pages: SelectedPages, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to the host. ``moves``: numbers of the blocks, and -1 minus their numbers on the host."""
        store, sums = pages.store, self.sums
        assert store is not None and sums is not None
        # a number on the host can have been given away again since
        last = {new: old for old, new in moves}
        blocks = [*last.values()]
        self.host.put([*last], store[:, blocks], sums[:, blocks])

    def attend(self, pages: SelectedPages, q: T, out: T, window: int) -> None:
        reading, store = pages.reading, pages.store
        assert store is not None
        spans = reading.spans
        heads = store.shape[3]
        key = "rounds"
        if key not in reading.prepared:
            reading.prepared[key] = self._parted(spans, q)
        whole, pieces = reading.prepared[key]
        chosen = seen_keys(whole) * heads
        if whole:
            pages.attend_spans(whole, q, out, window)
        for each in pieces:
            chosen += self._attend_round(store, q, out, each)
        self.count(seen_keys(spans) * heads, chosen, chosen)

    def dense_until(self, span: Span) -> int:
        """Return how many tokens at the beginning of the text of ``span`` see all tokens before them."""
        return 0 if self.prompts else span.prompt

    def _counted_from(self, span: Span) -> int:
        """Return the position from which on tokens of a text count in the sums."""
        return max(0, -(-self.dense_until(span) // self.size) - RECENT) * self.size

    def _parted(self, spans: Sequence[Span], q: T) -> tuple[list[Span], list[_Round]]:
        """Return which spans attend to all keys, none of which is on the host, and the rounds of the others."""
        if self.share == 1:
            near = [span for span in spans if min(span.table) >= 0]
            return near, self._rounds([s for s in spans if min(s.table) < 0], q)
        whole, dense, sparse = list[Span](), list[Span](), list[Span]()
        for span in spans:
            for first, last, kind in self._pieces(span):
                here = kind == 0 and min(span.table) >= 0
                past = span.past + first - span.first
                part = span._replace(first=first, last=last, past=past)
                (whole if here else sparse if kind == 2 else dense).append(part)
        # sums of a prompt's tokens come before the choice of written ones
        return whole, [*self._rounds(dense, q), *self._rounds(sparse, q, self.together)]

    def _pieces(self, span: Span) -> Iterator[tuple[int, int, int]]:
        """Yield where pieces of a span begin and end: those that see all tokens and count in no sums (0), those that
        count (1), and those that choose (2).
        """
        ends = self._counted_from(span), self.dense_until(span), span.past + span.last
        first = span.first
        for kind, end in enumerate(ends):
            last = min(span.last, max(first, end - span.past + span.first))
            if last > first:
                yield first, last, kind
            first = last

    def _rounds(self, spans: Sequence[Span], q: T, together: int = 0) -> list[_Round]:
        """Return rounds of the spans, in pieces of ``together`` tokens; 0: of a block."""
        called = list[_Round]()
        for pieces in rounds(spans, together or self.size):
            rows = torch.tensor([[*range(p.first, p.last)] for p in pieces], device=q.device)  # fmt: skip
            past = torch.tensor([[p.past] for p in pieces], device=q.device)
            at = past + torch.arange(rows.shape[1], device=q.device)
            cut = [p._replace(table=p.table[: p.past // self.size + 1]) for p in pieces]
            called.append(_Round(cut, rows, padded_tables(cut, q), at))
        return called

    def _attend_round(self, store: T, q: T, out: T, texts: _Round) -> int:
        """Attend in one call, and add to the sums. Return how many keys tokens attend to."""
        heads, tokens = store.shape[3], texts.rows.shape[1]
        choices = [self._choose(span, store, q) for span in texts.pieces]
        chosen = [each.places for each in choices]
        most = max(each.shape[1] for each in chosen)
        # [texts, kv_heads, keys], positions in the texts; behind the last one where a text has fewer
        places = torch.stack(
            [F.pad(x, (0, most - x.shape[1]), value=-1) for x in chosen]
        )
        known = places >= 0
        places = places.clamp(min=0)
        blocks = (
            texts.tables[:, None].expand(-1, heads, -1).gather(2, places // self.size)
        )
        keys, values = self._fetch(store, blocks, places % self.size)
        # [texts, kv_heads, group, tokens, width]
        queries = q[texts.rows].unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
        scores = queries.flatten(2, 3).to(keys.dtype) @ keys.transpose(2, 3)
        scores = (scores * q.shape[-1] ** -0.5).unflatten(2, (-1, tokens))
        # [texts, kv_heads, 1, tokens, keys]
        seen = known[:, :, None] & (places[:, :, None] <= texts.at[:, None, :, None])
        scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
        for row, each in zip(scores, choices, strict=True):
            if each.drawn is not None:
                count_drawn(row, each.drawn)
        weights = scores.softmax(-1)
        attended = weights @ values[:, :, None]
        out[texts.rows] = attended.permute(0, 3, 1, 2, 4).flatten(2, 3).to(out.dtype)
        if self.share < 1 and self.sums_weights:
            counted = [each.past >= self._counted_from(each) for each in texts.pieces]
            counts = known & torch.tensor(counted, device=q.device)[:, None, None]
            self._add(blocks, places % self.size, weights.sum((2, 3)) * counts)
            self._finish(texts.pieces)
        # the last ones of a piece see more of it than the first
        own = len(chosen) * tokens * (tokens - 1) // 2
        read = tokens * sum(each.shape[1] for each in chosen) - own
        return heads * (read + sum(self._looked(p, store) for p in texts.pieces))

    def _choose(self, span: Span, store: T, q: T) -> SeenTokens:
        """Return which tokens the new tokens of a piece see. ``store``: keys and values of the layer; ``q``: queries of
        all new tokens of the pass.
        """
        assert self.sums is not None
        size, heads = self.size, self.sums.shape[-1]
        if span.past < self.dense_until(span):
            end = span.past + span.last - span.first
            every = torch.arange(end, device=self.sums.device)
            return SeenTokens(every.expand(heads, -1))
        before = span.past // size * size
        count = self._budget(before) - self._looked(span, store)
        others = int(count * (1 - self.near))
        last = before if count >= before else count - others
        near = torch.arange(before - last, span.past + span.last - span.first, device=self.sums.device)  # fmt: skip
        near = near.expand(heads, -1)
        if last == before:
            return SeenTokens(near)
        blocks = torch.tensor(span.table[: before // size], device=self.sums.device)
        far = self._choose_far(span, store, q, blocks, before - last, others)
        return far._replace(places=torch.cat([far.places, near], 1))

    def _budget(self, before: int) -> int:
        """Return how many of the ``before`` tokens in the blocks before its own a token sees, or looks at."""
        share = ceil(self.share * (before + self.size) - 1e-9)
        return max(LEAST * self.size, share) - self.size

    def _looked(self, span: Span, store: T) -> int:
        """Return as how many keys counts what a token of a piece reads to choose. ``store``: the layer's cache."""
        return 0

    def _choose_far(
        self, span: Span, store: T, q: T, blocks: T, far: int, count: int
    ) -> SeenTokens:
        """Return which ``count`` of the first ``far`` tokens a piece sees. ``blocks``: all blocks before the piece's
        own; ``store``: the layer's cache; ``q``: queries of all new tokens of the pass.
        """
        standing = self._sums_of(blocks).flatten(0, 1).T[:, :far]
        return SeenTokens(standing.topk(count, -1).indices)

    def _sums_of(self, blocks: T) -> T:
        """Return the sums of blocks on the device and on the host: ``[blocks, size, kv_heads]``."""
        assert self.sums is not None
        sums = self.sums[0, blocks.clamp(min=0)]
        away = blocks < 0
        if away.any():
            sums[away] = self.host.sums(blocks[away]).to(sums.device)
        return sums

    def _fetch(self, store: T, blocks: T, places: T, parts: int = 2) -> T:
        """Return keys and values of single tokens, or keys alone: ``[parts, texts, kv_heads, keys, width]``.

        ``blocks``: blocks of the tokens, ``[texts, kv_heads, keys]``; ``places``: places in the blocks, likewise.
        """
        heads = torch.arange(store.shape[3], device=store.device)[:, None]
        chosen = store[:parts, blocks.clamp(min=0), places, heads]
        chosen = chosen.to(wide(store.dtype))
        away = blocks < 0
        if away.any():
            at = blocks[away], places[away], heads.expand_as(blocks)[away]
            chosen[:, away] = self.host.read(parts, *at, chosen)
        return chosen

    def _add(self, blocks: T, places: T, weights: T) -> None:
        """Add attention weights to the sums of the present block of queries. All are ``[texts, kv_heads, keys]``."""
        assert self.sums is not None
        heads = torch.arange(blocks.shape[1], device=blocks.device)[:, None].expand_as(blocks)  # fmt: skip
        near = blocks >= 0
        at = blocks[near], places[near], heads[near]
        self.sums[1].index_put_(at, weights[near].to(self.sums.dtype), accumulate=True)
        if not near.all():
            away = blocks[~near], places[~near], heads[~near]
            self.host.add(*away, weights[~near])

    def _finish(self, pieces: Sequence[Span]) -> None:
        """Let the sums of a block of queries count, for texts whose block is full."""
        assert self.sums is not None
        full = [p for p in pieces if (p.past + p.last - p.first) % self.size == 0]
        near = [block for p in full for block in p.table if block >= 0]
        away = [-1 - block for p in full for block in p.table if block < 0]
        kept = self.sums, self.host.tokens and self.host.tokens.sums
        for sums, blocks in zip(kept, (near, away), strict=True):
            if sums is not None and blocks:
                sums[0, blocks] = FADING * sums[0, blocks] + sums[1, blocks]
                sums[1, blocks] = 0
