"""Attention that remembers: what stands in for a layer's ``attend`` while a model reads texts piece by piece.

A block calls ``attend(q, k, v, cu_seqlens)``, with its window if it has one, and does not know whether earlier tokens
are remembered; training never does. Generation makes one such object per layer (:func:`layer_pages`) and lets the
layers use them for the time of one forward pass (:func:`attending`). What they remember lies in blocks of ``size``
tokens, which a table per text lists (:mod:`weft.generate.pool`; PagedAttention, Kwon et al. 2023): keys and values of
softmax layers, what these are made from of latent ones, and of linear layers the state behind the last token of every
block. So a text can begin from blocks of another one, whatever its layers are. Anything else with this signature can
take their place, such as keys and values of several ranks (:mod:`weft.generate.spread`). Keys arrive already rotated to
their positions.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from weft.models.attention import Attend, attend_forward, repeat_heads, wide
from weft.models.latent import LatentAttention
from weft.models.linear_attention import forward, local_state, state_to_state, state_to_tokens
from weft.models.segments import earlier_keys, windowed
from weft.models.transformer import Attention, Block, T, Transformer

#: Tokens by which the memory of a cache grows at least, so that it is seldom copied.
ROOM = 256


def attention_layers(model: Transformer) -> list[Attention | LatentAttention]:
    """The attention of every block, first block first."""
    return [block.attention for block in model.blocks.values() if isinstance(block, Block)]


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


class Span(NamedTuple):
    """New tokens of one text, ``first:last`` of a packed row, behind ``past`` others in the blocks of its ``table``."""

    first: int
    last: int
    past: int
    table: Sequence[int]


class Pages:
    """One layer's part of every block: ``[parts, blocks, size, ...]``. ``spans`` are what the next call reads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.store: T | None = None
        self.spans: list[Span] = []
        self.slots: T | None = None  # [new tokens], where they go among the tokens of all blocks

    def copy(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Copy what is in the first of each pair of blocks into the second."""
        for old, new in blocks:
            store = self.room(new + 1)
            store[:, new] = store[:, old]

    def room(self, blocks: int, like: T | None = None, parts: int = 0, shape: Sequence[int] = ()) -> T:
        """The store, with so many blocks at least; ``like``, ``parts`` and ``shape`` (of a block) of a new one."""
        if self.store is None:
            assert like is not None
            self.store = like.new_zeros(parts, blocks + ROOM // self.size, *shape)
        elif (held := self.store.shape[1]) < blocks:
            grown = self.store.new_zeros(
                len(self.store), blocks + max(ROOM // self.size, held // 8), *self.store.shape[2:]
            )
            grown[:, :held] = self.store
            self.store = grown
        return self.store


class KeyValuePages(Pages):
    """Softmax attention of each span's tokens to themselves and to all earlier ones of their text."""

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T:
        """``[1, tokens, heads or kv_heads, head_dim]``; spans say where texts begin."""
        self.write(k, v)
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        for span in self.spans:
            rows, (keys, values, before) = slice(span.first, span.last), self.read(span, window)
            out[0, rows] = attend_span(q[0, rows], keys, values, span.past - before, window)
        return out

    def write(self, *new: T) -> None:
        """Put ``new``, ``[1, tokens, kv_heads, width]`` each, into their slots."""
        first, blocks = new[0], max(max(span.table) for span in self.spans) + 1
        store = self.room(blocks, first, len(new), (self.size, *first.shape[2:]))
        for kept, each in zip(store, new, strict=True):
            kept.flatten(0, 1)[self.slots] = each[0]

    def read(self, span: Span, window: int) -> tuple[T, T, int]:
        """Keys and values that any of a span's tokens sees, ``[tokens, kv_heads, width]``, and how many come before."""
        assert self.store is not None
        end = span.past + span.last - span.first
        first = max(0, span.past - window + 1) // self.size if window else 0
        table = span.table[first : -(-end // self.size)]
        if table[-1] - table[0] == len(table) - 1 and all(b - a == 1 for a, b in pairwise(table)):
            found = self.store[:, table[0] : table[-1] + 1]  # side by side: nothing is copied
        else:
            found = self.store[:, torch.tensor(table, device=self.store.device)]
        tokens = found.flatten(1, 2)[:, : end - first * self.size]
        return tokens[0], tokens[-1], first * self.size


def attend_span(q: T, k: T, v: T, past: int, window: int) -> T:
    """Attention of a text's last tokens, ``[tokens, heads or kv_heads, width]``, with ``past`` keys before them."""
    if len(q) > 1:
        a, b = past, past + len(q)
        earlier = earlier_keys(a, b, 0, a, window) if a else []
        pieces = [*windowed(a, b, window), *(s._replace(joins=True) for s in earlier)]
        return attend_forward(q, k, v, [s._replace(q0=s.q0 - a, q1=s.q1 - a) for s in pieces])[0]
    if window:
        k, v = k[-window:], v[-window:]
    # One token sees every key. The query heads that share a key head can then be so many queries of it, and the keys
    # are read once for all of them: [1, kv_heads, group, width].
    shared = q.reshape(1, k.shape[1], -1, q.shape[2])
    out = F.scaled_dot_product_attention(shared, k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    return out.reshape(*q.shape[:2], -1)


class LatentPages(KeyValuePages):
    """Of latent attention (:mod:`weft.models.latent`): what all keys and values are made from, once for all heads."""

    @property
    def tokens(self) -> int:
        """Of earlier tokens, how many any text has: none if all that is read are whole beginnings."""
        return max(span.past for span in self.spans)

    def keep(self, latents: T) -> None:
        """Remember ``latents``, ``[1, new tokens, 1, kv_rank + rope_dim]``."""
        self.write(latents)

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T:
        """``k`` are the new tokens' latent vectors, and ``v`` their first elements, which are not kept twice."""
        self.write(k)
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        for span in self.spans:
            rows, (latents, _, before) = slice(span.first, span.last), self.read(span, window)
            mean = attend_span(q[0, rows], latents, latents, span.past - before, window)  # kernels take equal widths
            out[0, rows] = mean[..., : v.shape[-1]]
        return out


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
        heads_first = (q * q.shape[-1] ** -0.5, repeat_heads(k, group), repeat_heads(v, group))
        qs, ks, vs = (x[0].to(dtype).transpose(0, 1) for x in heads_first)  # [heads, tokens, head_dim]
        decay = torch.tensor(self.decay, dtype=dtype, device=q.device)
        store = self.room(max(max(s.table) for s in self.spans) + 1, qs, 1, (q.shape[2], q.shape[3], v.shape[3]))[0]
        out = torch.empty(q.shape[2], q.shape[1], v.shape[3], dtype=dtype, device=q.device)
        for pieces in rounds(self.spans, self.size):
            rows = torch.tensor([[*range(p.first, p.last)] for p in pieces], device=q.device)  # [texts, tokens]
            past = torch.tensor([p.past for p in pieces], device=q.device)
            before, here = (
                torch.tensor([p.table[max(0, at(p)) // self.size] for p in pieces], device=q.device)
                for at in (lambda p: p.past - 1, lambda p: p.past)
            )
            positions = past[:, None] + torch.arange(rows.shape[1], device=q.device)
            qr, kr, vr = (x[:, rows].transpose(0, 1) for x in (qs, ks, vs))  # [texts, heads, tokens, head_dim]
            state = store[before].masked_fill((past == 0)[:, None, None, None], 0)  # of whoever had the block before
            made = forward(qr, kr, vr, positions, decay) + (qr * state_to_tokens(positions, decay)) @ state
            out[:, rows] = made.transpose(0, 1)
            store[here] = local_state(kr, vr, positions, decay) + state * state_to_state(positions, decay)
        return out.transpose(0, 1)[None].to(q.dtype)


def rounds(spans: Iterable[Span], size: int) -> Iterator[list[Span]]:
    """Spans cut where blocks end, as lists of equally long pieces of different texts, in the order of each text."""
    pieces: list[tuple[int, Span]] = []
    for span in spans:
        first, past, turn = span.first, span.past, 0
        while first < span.last:
            count = min(size - past % size, span.last - first)
            pieces.append((turn, Span(first, first + count, past, span.table)))
            first, past, turn = first + count, past + count, turn + 1
    order = sorted(pieces, key=lambda p: (p[0], p[1].last - p[1].first))
    for _, alike in groupby(order, key=lambda p: (p[0], p[1].last - p[1].first)):
        yield [piece for _, piece in alike]


def layer_pages(model: Transformer, size: int) -> list[KeyValuePages | StatePages]:
    """Empty pages for blocks of ``size`` tokens, one object per layer as its mixer needs it."""

    def pages(layer: Attention | LatentAttention) -> KeyValuePages | StatePages:
        if isinstance(layer, LatentAttention):
            return LatentPages(size)
        return KeyValuePages(size) if layer.mixer == "softmax" else StatePages(size, layer.decay)

    return [pages(layer) for layer in attention_layers(model)]


class Part(NamedTuple):
    """What is read of a text ``ids``: all from ``past`` on; logits behind its last ``rows`` tokens are wanted."""

    ids: Sequence[int]
    past: int
    table: Sequence[int]
    rows: int = 1


class Row(NamedTuple):
    """Pieces of texts behind one another, which one forward pass reads without padding."""

    ids: list[int]
    positions: list[int]
    spans: list[Span]
    wanted: list[int]  # the places whose logits are wanted


def pack(parts: Iterable[Part]) -> Row:
    """The new tokens of all ``parts``."""
    row = Row([], [], [], [])
    for text, past, table, rows in parts:
        first = len(row.ids)
        row.ids.extend(text[past:])
        row.positions.extend(range(past, len(text)))
        row.spans.append(Span(first, len(row.ids), past, table))
        row.wanted.extend(range(len(row.ids) - rows, len(row.ids)))
    return row


def slots(spans: Iterable[Span], size: int) -> list[int]:
    """Where the tokens of ``spans`` go among the tokens of all blocks."""
    return [
        table[at // size] * size + at % size
        for first, last, past, table in spans
        for at in range(past, past + last - first)
    ]


class PagedReader:
    """Reads pieces of many texts in one forward pass of ``model``, ``depth`` of which may be under way at once."""

    depth = 1

    def __init__(self, model: Transformer, size: int = 16) -> None:
        self.model, self.size, self.pages = model, size, layer_pages(model, size)

    def start(self, parts: Sequence[Part], copies: Sequence[tuple[int, int]] = ()) -> Callable[[], T]:
        """Begin to :meth:`read`; what is returned waits for the logits."""
        found = self.read(parts, copies)
        return lambda: found

    def read(self, parts: Sequence[Part], copies: Sequence[tuple[int, int]] = ()) -> T:
        """Logits ``[rows of all parts, vocab]``. ``copies``: blocks to copy into others before anything else."""
        if self.model.shape.kind:  # a plugin's model cannot remember: it reads all again
            parts = [part._replace(past=0) for part in parts]
        row, device = pack(parts), self.model.mesh.device
        numbers = torch.tensor([row.ids, row.positions, slots(row.spans, self.size)], device=device)
        for pages in self.pages:
            pages.copy(copies)
            pages.spans, pages.slots = row.spans, numbers[2]
        documents = torch.tensor([0, *(span.last for span in row.spans)], dtype=torch.int32)
        with attending(self.model, self.pages):
            only = torch.tensor(row.wanted, dtype=torch.int64, device=device)
            return self.model(numbers[:1], numbers[1:2], documents, only=only)[0]
