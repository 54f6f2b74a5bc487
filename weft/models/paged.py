"""Attention with a cache: replaces a layer's ``attend`` while a model reads texts piece by piece.

A block calls ``attend(q, k, v, cu_seqlens)``, with its window if it has one, and does not know whether earlier tokens
are cached; in training none are. An engine makes one such object per layer (:func:`layer_pages`), and lets the layers
use these during one forward pass (:func:`attending`). Their memory is in blocks of ``size`` tokens, which a table per
text lists (PagedAttention, Kwon et al. 2023): keys and values of softmax layers, latent vectors of latent layers, and
for linear layers the state after the last token of every block. Whatever its layers are, a text can therefore begin
with blocks of another text. Other objects with the same signature can take the place of these, such as keys and values
that are spread over ranks (:mod:`weft.parallel.striped`). Keys arrive rotated to their positions.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import torch

from weft.errors import UsageError
from weft.models.attention import Attend, repeat_heads
from weft.models.attention_backend import (
    GATHERED,
    AttentionBackend,
    BackendPiece,
    DecodeRows,
    SpanKeys,
    read_span,
)
from weft.models.block_selector import BlockSelector
from weft.models.borrowed_keys import (
    BorrowingGroup,
    LentBlocks,
    attend_borrowing,
    group_borrowing,
)
from weft.models.latent import LatentAttention
from weft.models.linear_attention import (
    forward,
    local_state,
    state_to_state,
    state_to_tokens,
)
from weft.models.numbers import wide
from weft.models.shared_prefixes import PrefixGroup, attend_prefixes, group_prefixes
from weft.models.spans import Span, rounds
from weft.models.transformer import Attention, Block, T, Transformer

#: The least tokens by which the memory of a cache grows, so that it is seldom copied.
ROOM = 256


def attention_layers(model: Transformer) -> list[Attention | LatentAttention]:
    """Return the attention modules of all blocks, first block first."""
    return [
        block.attention for block in model.blocks.values() if isinstance(block, Block)
    ]


@contextmanager
def attending(
    model: Transformer, attends: Sequence[Attend], part: slice = slice(None)
) -> Iterator[None]:
    """Return a context in which each layer of ``model`` calls an attention function from ``attends`` in place of its
    own, first layer first. Such a function attends to cached keys, for example. ``part``: the layers for which this
    holds; all by default.
    """
    layers = attention_layers(model)[part]
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
    """The tokens that one forward pass of generation computes, which are the new tokens of several texts.

    Attributes:
        ``spans``: for each text, its new tokens.
        ``slots``: for each new token, its place in the cache: number of its block times tokens of a block, plus its
            index in the block.
        ``batches``: for each size of attention window in tokens, a list of groups of spans. The attention of a group is
            computed in one call. A size is added when a layer first needs it.
        ``rows``: for a step in which each text computes one token, these texts as tensors on the device, so that no
            backend reads anything on the host; None: backends read ``spans``.
        ``prepared``: values that the first layer's selector has left for the selectors of the other layers, under a key
            that no other kind of selector uses.
    """

    spans: Sequence[Span]
    slots: T  # [new tokens], where they go among the tokens of all blocks
    batches: dict[int, list["Piece"]] = field(default_factory=dict)
    rows: DecodeRows | None = None
    prepared: dict[Hashable, Any] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> int:
        """Number of blocks that the cache must have for this pass.

        It is one more than the highest block number of any text.
        """
        return max((max(span.table) for span in self.spans), default=-1) + 1


#: What one call of attention computes.
Piece: TypeAlias = "BackendPiece | PrefixGroup | BorrowingGroup"


class Pages:
    """The cache of one layer, a tensor ``[parts, blocks, size, ...]`` whose blocks are assigned to texts.

    A block has room for ``size`` tokens. ``parts`` is the number of tensors kept per token, such as 2 for keys and
    values. A text's table lists the numbers of its blocks, in order.

    Attributes:
        ``size``: tokens of a block.
        ``reading``: the tokens that the current forward pass computes.
        ``layer``: number of the layer among those of this rank.
        ``lent``: blocks of texts that lie in the cache of another engine. Such a block has a negative number in the
            text's table, and is found here by that number.
        ``store``: the tensor; None until the first block is needed.
        ``spare``: number of blocks behind the texts' blocks that the tensor always has, for tokens of no text.
        ``reserved``: the fewest blocks that the tensor gets.
        ``growing``: lock that is held while the tensor is replaced by a larger one.
        ``written``: function that is called when the layer has written keys and values of a pass's new tokens; None: no
            function is called.
    """

    reading: Reading
    layer: int = 0
    written: Callable[[], None] | None = None

    def loaded(self, blocks: Sequence[int]) -> None:
        """Note that whole blocks have got other contents from outside the cache, such as from host memory. By default
        nothing is done. ``blocks``: numbers of the blocks.
        """

    def __init__(self, size: int) -> None:
        self.size = size
        self.lent: LentBlocks = {}
        self.growing = Lock()  # held while the memory of the cache is replaced
        self.store: T | None = None
        self.spare = self.reserved = 0

    def copy(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Copy blocks of the cache.

        ``blocks``: pairs of numbers of blocks; the first block of a pair is copied over the second.
        """
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
        """Return the tensor of the cache, enlarged if it has fewer than ``blocks`` blocks. The first call allocates the
        tensor, and needs the other arguments. ``like``: a tensor of the cache's type and device; ``parts``: number of
        tensors kept per token, such as 2 for keys and values; ``shape``: shape of what a block keeps of one part,
        ``[size, ...]``.
        """
        blocks += self.spare
        if self.store is None:
            assert like is not None
            least = blocks + ROOM // self.size
            self.store = self._allocate(like, parts, least, shape)
        elif (held := self.store.shape[1]) < blocks:
            parts, _, *shape = self.store.shape
            # recorded passes are recorded anew, so that the memory seldom grows
            more = held if self.spare else held // 8
            least = blocks + max(ROOM // self.size, more)
            with self.growing:
                grown = self._allocate(self.store, parts, least, shape)
                grown[:, :held] = self.store
                self.store = grown
        return self.store

    def _allocate(self, like: T, parts: int, least: int, shape: Sequence[int]) -> T:
        """Memory for all reserved blocks, or for ``least`` blocks if the host does not promise as much."""
        count = max(least, self.reserved)
        try:
            return untouched_zeros(like, (parts, count, *shape))
        except MemoryError:
            return untouched_zeros(like, (parts, least, *shape))


def untouched_zeros(like: T, shape: Sequence[int]) -> T:
    """Return a tensor of zeros of this ``shape``, of the type and on the device of ``like``. In the host's memory,
    pages that were never written take no memory and no time.
    """
    if like.device.type != "cpu":
        return like.new_zeros(*shape)
    raw = torch.from_numpy(np.zeros(prod(shape) * like.itemsize, np.uint8))
    return raw.view(like.dtype).view(*shape)


class KeyValuePages(Pages):
    """Cache of softmax attention: each new token attends to itself and to the earlier tokens of its text. ``size``:
    tokens of a block. ``freq``: frequencies of rotary embedding, for queries that attend to a cached prefix of another
    text as if it stood at other positions. Such queries are rotated further; with None they are not. The attribute
    ``backend`` computes the attention; if it does not support the cache, keys and values are gathered first. The
    attribute ``selector`` chooses the tokens to which new tokens attend; None: all of their text.
    """

    backend: AttentionBackend = GATHERED
    selector: BlockSelector | None = None

    def __init__(self, size: int, freq: T | None = None) -> None:
        super().__init__(size)
        self.freq = freq
        # the tokens of all blocks, in each part of the store that was written last
        self._shown: T | None = None
        self._tokens: list[T] = []

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T:
        """Attend with ``[1, tokens, heads or kv_heads, head_dim]``; spans say where texts begin."""
        self.write(k, v)
        return self.attend(q, v.shape[-1], window)

    def attend(self, q: T, width: int, window: int) -> T:
        """Compute the attention of the new tokens' queries to the cached keys and values.

        ``q``: ``[1, tokens, heads, head_dim]``; ``width``: elements of a value. Cached values may be padded to more;
        only the first ``width`` elements of each result are returned. ``window``: the number of tokens that a token
        sees, itself included; 0: all.
        """
        # a row may be filled up, and nothing writes the results of tokens of no text
        whole = len(self.reading.slots) == q.shape[1]
        out = (q.new_empty if whole else q.new_zeros)(*q.shape[:3], width)
        if self.selector is None:
            self.attend_spans(self.reading.spans, q[0], out[0], window)
        else:
            self.selector.attend(self, q[0], out[0], window)
        return out

    def attend_spans(self, spans: Sequence[Span], q: T, out: T, window: int) -> None:
        """Write the attention of the tokens of ``spans`` into ``out``. All layers with an equal window must be called
        with equal spans during a pass, so that what is prepared for one layer serves the others.

        ``q``: queries of all new tokens of the pass, ``[tokens, heads, width]``; ``out``: ``[tokens, heads, value
        elements]``; ``window``: the number of tokens that a token sees, itself included; 0: all.
        """
        assert self.store is not None
        width = out.shape[-1]
        takes = self.backend.takes(q, self.store, width)
        backend = self.backend if takes else GATHERED
        if window not in self.reading.batches:
            self.reading.batches[window] = self._pieces(spans, backend, q, window)
        for piece in self.reading.batches[window]:
            if isinstance(piece, PrefixGroup):
                attended = attend_prefixes(
                    q[piece.rows], piece, lambda span: self.read(span, 0)[:2]
                )
                out[piece.rows] = attended[..., :width]
            elif isinstance(piece, BorrowingGroup):
                attended = attend_borrowing(
                    q[piece.rows], piece, self.layer, window, self.read
                )
                out[piece.rows] = attended[..., :width]
            else:
                backend.attend(q, self.store, piece, window, out)

    def _pieces(
        self, spans: Sequence[Span], backend: AttentionBackend, q: T, window: int
    ) -> list[Piece]:
        """Groups for one call each: those of ``backend``, all spans together that see other texts, and all spans
        together that begin with lent blocks.
        """
        assert self.store is not None
        if self.reading.rows is not None:
            return [backend.group_rows(self.reading.rows, self.store, window, q)]
        others = [span for span in spans if span.context]
        borrowing = [span for span in spans if span.table[0] < 0]
        plain = [span for span in spans if not span.context and span.table[0] >= 0]
        pieces: list[Piece] = []
        if plain:
            pieces += backend.group(plain, self.store, window, q)
        if others:
            pieces.append(group_prefixes(others, self.freq, q))
        if borrowing:
            pieces.append(group_borrowing(borrowing, self.lent, self.size, q.device))
        return pieces

    def write(self, *new: T) -> None:
        """Write tensors of the new tokens, such as keys and values, into the tokens' slots of the cache.

        Each tensor is ``[1, tokens, kv_heads, width]``.
        """
        slots = self.reading.slots
        first = new[0]
        shape = (self.size, *first.shape[2:])
        store = self.room(self.reading.blocks, first, len(new), shape)
        if store is not self._shown:
            self._shown = store
            self._tokens = [part.flatten(0, 1) for part in store]
        for kept, each in zip(self._tokens, new, strict=True):
            kept.index_copy_(0, slots, each[0, : len(slots)])
        if self.selector is not None:
            self.selector.written(self)
        if self.written is not None:
            self.written()

    def copy(self, blocks: Iterable[tuple[int, int]]) -> None:
        if self.selector is None:
            super().copy(blocks)
            return
        own = self.selector.copied(self, [*blocks])
        super().copy(own)
        if own:
            self.loaded([new for _, new in own])

    # a connection's thread calls it between passes, and selectors keep what passes have made in inference mode
    @torch.inference_mode()
    def loaded(self, blocks: Sequence[int]) -> None:
        if self.selector is not None:
            self.selector.loaded(self, blocks)

    def read(self, span: Span, window: int) -> SpanKeys:
        """Return the keys and values that any token of ``span`` sees.

        ``window``: the number of tokens that a token sees, itself included; 0: all.
        """
        assert self.store is not None
        return read_span(self.store, span, window)


class LatentPages(KeyValuePages):
    """Cache of latent attention (:mod:`weft.models.latent`): per token, one latent vector for all heads."""

    @property
    def tokens(self) -> int:
        """The largest number of tokens that any text of the forward pass has in the cache from earlier passes.

        It is 0 if no text has any.
        """
        spans = self.reading.spans
        return max(
            (span.past + sum(tile.tokens for tile in span.context) for span in spans),
            default=0,
        )

    def keep(self, latents: T) -> None:
        """Write the latent vectors of new tokens into the cache: ``[1, new tokens, 1, kv_rank + rope_dim]``."""
        self.write(latents)

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T:
        """Attend to latent vectors ``k``, whose first elements are ``v`` and are not kept twice."""
        self.write(k)
        return self.attend(q, v.shape[-1], window)  # kernels take equal widths


class StatePages(Pages):
    """Cache of linear attention. A block stands for ``size`` tokens of a text, and holds the recurrent state after the
    last of these tokens that is computed. ``decay``: logarithms of the decay per token, one per head.
    """

    def __init__(self, size: int, decay: Sequence[float]) -> None:
        super().__init__(size)
        self.decay = decay

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T) -> T:
        """Attend with ``[1, tokens, heads or kv_heads, head_dim]``."""
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
        state_shape = (q.shape[2], q.shape[3], v.shape[3])
        store = self.room(self.reading.blocks, qs, 1, state_shape)[0]
        out = qs.new_zeros(*qs.shape[:2], v.shape[3])
        for pieces in rounds(spans, self.size):
            # [texts, tokens]
            rows = torch.tensor(
                [[*range(p.first, p.last)] for p in pieces], device=q.device
            )
            past = torch.tensor([p.past for p in pieces], device=q.device)
            before, here = (
                [p.table[max(0, p.past - back) // self.size] for p in pieces]
                for back in (1, 0)
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
    """Return an empty cache for each layer of ``model``, of the kind that the layer's attention needs.

    ``size``: tokens of a cache block.
    """

    def pages(layer: Attention | LatentAttention) -> KeyValuePages | StatePages:
        if isinstance(layer, LatentAttention):
            return LatentPages(size, model.freq[0])
        if layer.mixer == "softmax":
            return KeyValuePages(size, model.freq[layer.base])
        return StatePages(size, layer.decay)

    every = [pages(layer) for layer in attention_layers(model)]
    for number, each in enumerate(every):
        each.layer = number
    return every


def check_serves(backend: AttentionBackend, model: Transformer, size: int) -> None:
    """Raise :class:`UsageError` if ``backend`` can attend in no layer of ``model``. ``size``: tokens of a cache
    block.
    """
    for layer in attention_layers(model):
        if isinstance(layer, Attention) and layer.mixer == "softmax":
            kv_heads, width = layer.kv_last - layer.kv_first, layer.head_dim
            like = model.norm.scale
            q = like.new_empty(1, model.shape.heads, width)
            if backend.takes(q, like.new_empty(2, 1, size, kv_heads, width), width):
                return
    raise UsageError(
        f"--attention {backend.name} needs {backend.needs}, which this model or machine lacks; leave it out"
    )


def slots(spans: Iterable[Span], size: int) -> list[int]:
    """Return the index of each token of ``spans`` in the cache, counted over the tokens of all blocks.

    ``size``: tokens of a cache block.
    """
    return [
        table[at // size] * size + at % size
        for first, last, past, table, *_ in spans
        for at in range(past, past + last - first)
    ]
