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
    """Interface to the new tokens of a pass, which a :class:`weft.models.paged.Reading` describes.

    ``spans``: for each text, its new tokens. ``slots``: for each new token, its place among the tokens of all blocks.
    ``prepared``: what the first layer's selector has prepared for those of the other layers.
    """

    @property
    def spans(self) -> Sequence[Span]: ...

    @property
    def slots(self) -> T: ...

    @property
    def prepared(self) -> dict[Hashable, Any]: ...


class SelectedPages(Protocol):
    """Interface to the cache of a layer that has a selector, a :class:`weft.models.paged.KeyValuePages`.

    ``size``: tokens of a block; ``store``: keys and values, ``[2, blocks, size, kv_heads, width]``; ``reading``: the
    new tokens of the present pass.
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
    """How many keys attention has had to do with, summed over new tokens and key heads.

    ``all``: keys of all earlier tokens and of the new token itself; ``chosen``: those that the new token attends to;
    ``read``: those that were read. Where tokens of one text choose different keys, all are read.
    """

    all: int = 0
    chosen: int = 0
    read: int = 0


class BlockSelector:
    """Chooses the cached tokens that new tokens attend to in one layer. This one chooses all.

    The attribute ``reads`` counts keys.
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
        """Note that the keys and values of the pass's new tokens have been written."""

    def copied(
        self, pages: SelectedPages, blocks: Sequence[tuple[int, int]]
    ) -> Sequence[tuple[int, int]]:
        """Note that blocks are to be copied, pairs of numbers of blocks (from, to), before the copies. Return the pairs
        that the cache is to copy itself.
        """
        return blocks

    def loaded(self, pages: SelectedPages, blocks: Sequence[int]) -> None:
        """Note that whole blocks have got other contents: by a copy, or from outside the cache."""

    def count(self, every: int, chosen: int, read: int) -> None:
        """Add to the keys that have been counted, in the order of :class:`KeyReads`."""
        before = self.reads
        self.reads = KeyReads(
            before.all + every, before.chosen + chosen, before.read + read
        )


def seen_keys(spans: Sequence[Span]) -> int:
    """Return how many keys the new tokens of ``spans`` see in all, each new token those up to itself."""
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
