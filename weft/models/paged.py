"""Attention that remembers: replaces a layer's ``attend`` while a model reads texts piece by piece.

A block calls ``attend(q, k, v, cu_seqlens)``, with its window if it has one, and does not know whether earlier tokens
are remembered; training never does. Whoever generates makes one such object per layer (:func:`layer_pages`) and lets
the layers use them for the time of one forward pass (:func:`attending`). What they remember lies in blocks of ``size``
tokens, which a table per text lists (PagedAttention, Kwon et al. 2023): keys and values of softmax layers, what these
are made from of latent ones, and of linear layers the state behind the last token of every block. So a text can begin
from blocks of another one, whatever its layers are. Anything else with this signature can take their place, such as
keys and values of several ranks (:mod:`weft.parallel.striped`). Keys arrive already rotated to their positions.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from weft.models.attention import Attend, repeat_heads, wide
from weft.models.latent import LatentAttention
from weft.models.linear_attention import (
    forward,
    local_state,
    state_to_state,
    state_to_tokens,
)
from weft.models.shared_prefixes import PrefixGroup, attend_prefixes, group_prefixes
from weft.models.spans import (
    Span,
    SpanBatch,
    attend_batch,
    attend_span,
    batch_spans,
    rounds,
    seen_blocks,
)
from weft.models.transformer import Attention, Block, T, Transformer

#: Tokens by which the memory of a cache grows at least, so that it is seldom copied.
ROOM = 256


def attention_layers(model: Transformer) -> list[Attention | LatentAttention]:
    """The attention of every block, first block first."""
    return [
        block.attention for block in model.blocks.values() if isinstance(block, Block)
    ]


@contextmanager
def attending(model: Transformer, attends: Sequence[Attend]) -> Iterator[None]:
    """In here the layers of ``model`` attend by ``attends``, and afterwards as before."""
    layers = attention_layers(model)
    before = [layer.attend for layer in layers]
    try:
        for layer, attend in zip(layers, attends, strict=True):
            layer.attend = attend
        yield
    finally:
        for layer, attend in zip(layers, before, strict=True):
            layer.attend = attend


@dataclass
class Reading:
    """What layers read in one forward pass, and by window what they attend to at once, found by the first of them."""

    spans: Sequence[Span]
    slots: T  # [new tokens], where they go among the tokens of all blocks
    batches: dict[int, list[SpanBatch | Span | PrefixGroup]] = field(
        default_factory=dict
    )


class SpanKeys(NamedTuple):
    """Keys and values of a text, ``[tokens, kv_heads, width]`` each, behind ``before`` tokens that are left out."""

    keys: T
    values: T
    before: int


class Pages:
    """One layer's part of every block: ``[parts, blocks, size, ...]``. Calls read what ``reading`` says."""

    reading: Reading

    def __init__(self, size: int) -> None:
        self.size = size
        self.store: T | None = None

    def copy(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Copy what is in the first of each pair of blocks into the second."""
        for old, new in blocks:
            store = self.room(new + 1)
            store[:, new] = store[:, old]

    def room(
        self,
        blocks: int,
        like: T | None = None,
        parts: int = 0,
        shape: Sequence[int] = (),
    ) -> T:
        """The store, with so many blocks at least; ``like``, ``parts`` and ``shape`` (of a block) of a new one."""
        if self.store is None:
            assert like is not None
            self.store = like.new_zeros(parts, blocks + ROOM // self.size, *shape)
        elif (held := self.store.shape[1]) < blocks:
            grown = self.store.new_zeros(
                len(self.store),
                blocks + max(ROOM // self.size, held // 8),
                *self.store.shape[2:],
            )
            grown[:, :held] = self.store
            self.store = grown
        return self.store


class KeyValuePages(Pages):
    """Softmax attention of each span's tokens to themselves and to all earlier ones of their text.

    ``freq``: by what keys and queries are rotated.
    """

    def __init__(self, size: int, freq: T | None = None) -> None:
        super().__init__(size)
        self.freq = freq

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T:
        """``[1, tokens, heads or kv_heads, head_dim]``; spans say where texts begin."""
        self.write(k, v)
        return self.attend(q, v.shape[-1], window)

    def attend(self, q: T, width: int, window: int) -> T:
        """What is found with ``q`` in all that is remembered, the first ``width`` numbers of it."""
        assert self.store is not None
        out = q.new_zeros(*q.shape[:3], width)  # a row may be filled up
        if window not in self.reading.batches:
            self.reading.batches[window] = self._pieces(q, window)
        for piece in self.reading.batches[window]:
            if isinstance(piece, SpanBatch):
                attended = attend_batch(
                    q[0, piece.rows], *self.gather(piece.blocks), piece
                )
                out[0, piece.rows] = attended[..., :width]
            elif isinstance(piece, PrefixGroup):
                attended = attend_prefixes(
                    q[0, piece.rows], piece, lambda span: self.read(span, 0)[:2]
                )
                out[0, piece.rows] = attended[..., :width]
            else:
                rows = slice(piece.first, piece.last)
                keys, values, before = self.read(piece, window)
                attended = attend_span(
                    q[0, rows], keys, values, piece.past - before, window
                )
                out[0, rows] = attended[..., :width]
        return out

    def _pieces(self, q: T, window: int) -> list[SpanBatch | Span | PrefixGroup]:
        """What is attended to at once: spans by themselves or in batches, and all those together that see others."""
        assert self.store is not None
        plain, others = (
            [s for s in self.reading.spans if bool(s.context) is sees]
            for sees in (False, True)
        )
        group = q.shape[2] // self.store.shape[3]
        pieces: list[SpanBatch | Span | PrefixGroup] = (
            [*batch_spans(plain, self.size, window, q, group)] if plain else []
        )
        return [*pieces, group_prefixes(others, self.freq, q)] if others else pieces

    def write(self, *new: T) -> None:
        """Put ``new``, ``[1, tokens, kv_heads, width]`` each, into their slots."""
        slots = self.reading.slots
        first = new[0]
        blocks = max(max(span.table) for span in self.reading.spans) + 1
        store = self.room(blocks, first, len(new), (self.size, *first.shape[2:]))
        for kept, each in zip(store, new, strict=True):
            kept.flatten(0, 1)[slots] = each[0, : len(slots)]

    def gather(self, blocks: T) -> tuple[T, T]:
        """Keys and values in ``blocks`` ``[texts, blocks]``: ``[texts, tokens, kv_heads, width]`` each."""
        assert self.store is not None
        kept = range(len(self.store))  # one part can be both
        gathered = [
            self.store[i]
            .index_select(0, blocks.flatten())
            .unflatten(0, blocks.shape)
            .flatten(1, 2)
            for i in kept
        ]
        return gathered[0], gathered[-1]

    def read(self, span: Span, window: int) -> SpanKeys:
        """Return the keys and values that any token of ``span`` sees."""
        assert self.store is not None
        end, (first, last) = (
            span.past + span.last - span.first,
            seen_blocks(span, self.size, window),
        )
        table = span.table[first:last]
        if table[-1] - table[0] == len(table) - 1 and all(
            b - a == 1 for a, b in pairwise(table)
        ):
            # side by side: nothing is copied
            rows = self.store[:, table[0] : table[-1] + 1]
        else:
            rows = self.store[:, torch.tensor(table, device=self.store.device)]
        tokens = rows.flatten(1, 2)[:, : end - first * self.size]
        return SpanKeys(tokens[0], tokens[-1], first * self.size)


class LatentPages(KeyValuePages):
    """Of latent attention (:mod:`weft.models.latent`): what all keys and values are made from, once for all heads."""

    @property
    def tokens(self) -> int:
        """Of earlier tokens, how many any text has: none if all that is read are whole beginnings."""
        return max(
            span.past + sum(tile.tokens for tile in span.context)
            for span in self.reading.spans
        )

    def keep(self, latents: T) -> None:
        """Remember ``latents``, ``[1, new tokens, 1, kv_rank + rope_dim]``."""
        self.write(latents)

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T:
        """``k`` are the new tokens' latent vectors, and ``v`` their first elements, which are not kept twice."""
        self.write(k)
        return self.attend(q, v.shape[-1], window)  # kernels take equal widths


class StatePages(Pages):
    """Linear attention of each span's tokens after those that the state in their text's last block sums up.

    A block holds the state behind its last token (the recurrent form). ``decay``: logarithms, one per head.
    """

    def __init__(self, size: int, decay: Sequence[float]) -> None:
        super().__init__(size)
        self.decay = decay

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T) -> T:
        """``[1, tokens, heads or kv_heads, head_dim]``."""
        dtype, group = wide(q.dtype), q.shape[2] // k.shape[2]
        heads_first = (
            q * q.shape[-1] ** -0.5,
            repeat_heads(k, group),
            repeat_heads(v, group),
        )
        # [heads, tokens, head_dim]
        qs, ks, vs = (x[0].to(dtype).transpose(0, 1) for x in heads_first)
        decay = torch.tensor(self.decay, dtype=dtype, device=q.device)
        spans = self.reading.spans
        store = self.room(
            max(max(s.table) for s in spans) + 1,
            qs,
            1,
            (q.shape[2], q.shape[3], v.shape[3]),
        )[0]
        out = torch.zeros(
            q.shape[2], q.shape[1], v.shape[3], dtype=dtype, device=q.device
        )
        for pieces in rounds(spans, self.size):
            # [texts, tokens]
            rows = torch.tensor(
                [[*range(p.first, p.last)] for p in pieces], device=q.device
            )
            past = torch.tensor([p.past for p in pieces], device=q.device)
            before, here = (
                torch.tensor(
                    [p.table[max(0, at(p)) // self.size] for p in pieces],
                    device=q.device,
                )
                for at in (lambda p: p.past - 1, lambda p: p.past)
            )
            positions = past[:, None] + torch.arange(rows.shape[1], device=q.device)
            # [texts, heads, tokens, head_dim]
            qr, kr, vr = (x[:, rows].transpose(0, 1) for x in (qs, ks, vs))
            # of whoever had the block before
            state = store[before].masked_fill((past == 0)[:, None, None, None], 0)
            new = forward(qr, kr, vr, positions, decay)
            earlier = (qr * state_to_tokens(positions, decay)) @ state
            out[:, rows] = (new + earlier).transpose(0, 1)
            kept = state * state_to_state(positions, decay)
            store[here] = local_state(kr, vr, positions, decay) + kept
        return out.transpose(0, 1)[None].to(q.dtype)


def layer_pages(model: Transformer, size: int) -> list[KeyValuePages | StatePages]:
    """Empty pages for blocks of ``size`` tokens, one object per layer as its mixer needs it."""

    def pages(layer: Attention | LatentAttention) -> KeyValuePages | StatePages:
        if isinstance(layer, LatentAttention):
            return LatentPages(size, model.freq[0])
        if layer.mixer == "softmax":
            return KeyValuePages(size, model.freq[layer.base])
        return StatePages(size, layer.decay)

    return [pages(layer) for layer in attention_layers(model)]


def slots(spans: Iterable[Span], size: int) -> list[int]:
    """Where the tokens of ``spans`` go among the tokens of all blocks."""
    return [
        table[at // size] * size + at % size
        for first, last, past, table, _ in spans
        for at in range(past, past + last - first)
    ]
