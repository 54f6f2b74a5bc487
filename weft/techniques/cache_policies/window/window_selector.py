"""Spans without the blocks that a window hides."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.models.block_selector import BlockSelector, SelectedPages, seen_keys
from weft.models.spans import Span

T = torch.Tensor


class WindowSelector(BlockSelector):
    """Lets each token see the first block of its text, ``blocks`` blocks before its own, and its own. ``tokens``: the
    window in tokens.

    Where blocks are hidden, the text is attended to as if it consisted of the others alone. Keys have been rotated
    already, so that any attention backend can do that.
    """

    def __init__(self, tokens: int, blocks: int) -> None:
        super().__init__()
        self.tokens, self.blocks = tokens, blocks

    def attend(self, pages: SelectedPages, q: T, out: T, window: int) -> None:
        spans = pages.reading.spans
        key = "window", window
        prepared = pages.reading.prepared
        if key not in prepared:
            prepared[key] = [
                piece
                for span in spans
                for piece in self.visible(span, pages.size, window)
            ]
        pieces: list[Span] = prepared[key]
        chosen = seen_keys(pieces)
        self.count(seen_keys(spans), chosen, chosen)
        pages.attend_spans(pieces, q, out, window)

    def visible(self, span: Span, size: int, window: int) -> Iterator[Span]:
        """Yield pieces of ``span`` whose tables have the visible blocks only.

        ``size``: tokens of a block; ``window``: the layer's own window, 0 if it has none. A layer whose own window is
        the smaller one needs no other. A layer with a larger one of its own has no attention sinks.
        """
        end = span.past + span.last - span.first
        sinks = 0 if window else 1
        # up to here a token sees all of the text
        whole = (self.blocks + sinks + 1) * size
        if 0 < window <= self.tokens or end <= whole:
            yield span
            return
        first, past = span.first, span.past
        while past < end:
            block = past // size
            stop = whole if past < whole else (block + 1) * size
            count = min(stop, end) - past
            hidden = max(0, block - self.blocks - sinks) if past >= whole else 0
            own = block + 1 if past >= whole else -(-(past + count) // size)
            table = [*span.table[:sinks], *span.table[sinks + hidden : own]]
            yield Span(first, first + count, past - hidden * size, table)
            first, past = first + count, past + count
