"""Block selectors: which cached tokens the new tokens of a pass attend to, in one layer and for each group of heads.

Without a selector each new token attends to all earlier tokens of its text. A selector leaves some of them out, so that
less is read, or less has to be kept. Selections depend on the text alone: neither on the pieces in which the text is
computed, nor on other texts in the same pass. A text that has lost its blocks is therefore computed again with equal
tokens, and texts may share blocks unless their selector remembers something about each text.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from weft.models.attention_backend import SpanKeys
from weft.models.queued_copy import queued_copy
from weft.models.spans import Span

T = torch.Tensor


class NewTokens(Protocol):
    """What a :class:`BlockSelector` may read of the new tokens of a forward pass. ``spans``: for each text, its new
    tokens. ``slots``: for each new token, its index in the cache, counted over the tokens of all blocks. ``prepared``:
    values that the selector of the first layer leaves here for the selectors of the other layers, under a key that no
    other kind of selector uses.
    """

    @property
    def spans(self) -> Sequence[Span]: ...

    @property
    def slots(self) -> T: ...

    @property
    def prepared(self) -> dict[Hashable, Any]: ...


class SelectedPages(Protocol):
    """What a :class:`BlockSelector` may read of its layer's cache. ``size``: tokens of a block; ``store``: keys and
    values, ``[2, blocks, size, kv_heads, width]``; ``reading``: the new tokens of the present forward pass.
    """

    size: int
    store: T | None

    @property
    def reading(self) -> NewTokens: ...

    def attend_spans(
        self, spans: Sequence[Span], q: T, out: T, window: int
    ) -> None: ...

    def read(self, span: Span, window: int) -> SpanKeys: ...


class KeyReads(NamedTuple):
    """Numbers of keys in attention, summed over new tokens and key heads. ``all``: keys that attention without a
    selector would use: those of all earlier tokens and of the new token itself. ``chosen``: keys that the new token
    attends to. ``read``: keys that were read from the cache; if tokens of one text choose different keys, all of these
    are read.
    """

    all: int = 0
    chosen: int = 0
    read: int = 0


class BlockSelector:
    """Base class of selectors, which choose the cached tokens that new tokens attend to in one layer. This class
    chooses all of them. The attribute ``reads`` counts keys (:class:`KeyReads`).
    """

    def __init__(self) -> None:
        self.reads = KeyReads()

    def attend(self, pages: SelectedPages, q: T, out: T, window: int) -> None:
        """Write the attention of the new tokens into ``out``.

        ``pages``: the cache of the layer, in which the new tokens' keys and values have been written already. ``q``:
        queries of the new tokens, ``[tokens, heads, width]``; ``out``: of the same shape. ``window``: the number of
        tokens that a token sees in this layer without a selector, itself included; 0: all.
        """
        pages.attend_spans(pages.reading.spans, q, out, window)

    def written(self, pages: SelectedPages) -> None:
        """Note that the keys and values of the pass's new tokens have been written to the cache ``pages``. By default
        nothing is done.
        """

    def copied(
        self, pages: SelectedPages, blocks: Sequence[tuple[int, int]]
    ) -> Sequence[tuple[int, int]]:
        """Note that blocks of the cache ``pages`` are about to be copied. ``blocks``: pairs of block numbers (from,
        to). Return the pairs that the cache itself is still to copy; by default all.
        """
        return blocks

    def loaded(self, pages: SelectedPages, blocks: Sequence[int]) -> None:
        """Note that whole blocks of the cache ``pages`` have got other contents, by a copy or from outside the cache. A
        selector that keeps data of each block updates it here; by default nothing is done. ``blocks``: numbers of
        the blocks.
        """

    def count(self, every: int, chosen: int, read: int) -> None:
        """Add numbers of keys to :attr:`reads`. ``every``, ``chosen``, ``read``: the fields of :class:`KeyReads`, in
        their order.
        """
        before = self.reads
        self.reads = KeyReads(
            before.all + every, before.chosen + chosen, before.read + read
        )


def seen_keys(spans: Sequence[Span]) -> int:
    """Return the number of pairs of a new token of ``spans`` and a key that it sees: all keys of its text up to its
    own.
    """
    total = 0
    for span in spans:
        tokens = span.last - span.first
        total += tokens * span.past + tokens * (tokens + 1) // 2
    return total


def padded_tables(spans: Sequence[Span], like: T) -> T:
    """Return the block tables of ``spans`` as one tensor ``[texts, blocks]`` on the device of ``like``. Shorter tables
    are padded with their last block.
    """
    width = max(len(span.table) for span in spans)
    tables = [
        [*span.table, *[span.table[-1]] * (width - len(span.table))] for span in spans
    ]
    return queued_copy(tables, like.device)


def gather_heads(store: T, blocks: T) -> T:
    """Return the keys and values in blocks that each key head chooses for itself: ``[parts, texts, kv_heads, tokens,
    width]``.

    ``store``: the cache of a layer, ``[parts, blocks, size, kv_heads, width]``; ``blocks``: numbers of the blocks,
    ``[texts, kv_heads, blocks]``.
    """
    heads = torch.arange(store.shape[3], device=store.device)[:, None]
    # [parts, texts, kv_heads, blocks, size, width]
    chosen = store.transpose(2, 3)[:, blocks, heads]
    return chosen.flatten(3, 4)
