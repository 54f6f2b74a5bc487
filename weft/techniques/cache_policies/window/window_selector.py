"""Spans without the blocks that a window hides."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.models.block_selector import BlockSelector, SelectedPages, seen_keys
from weft.models.spans import Span

T = torch.Tensor


class WindowSelector(BlockSelector):
    """Lets each token see the first block of its text, ``blocks`` blocks before its own, and its own. ``tokens``: the
    window in tokens. Attention runs as if the text consisted of the visible blocks alone. Keys have been rotated before
    they are cached, so that any attention backend can compute this.
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
        """Cut ``span``, the new tokens of a text, into pieces, and yield each with a table that has only the blocks
        that it sees. ``size``: tokens of a block; ``window``: the layer's own window in tokens, 0 if it has none. If
        the layer's own window is not larger than the policy's, ``span`` is yielded unchanged. In a layer with a larger
        window of its own, the first block is visible only within the policy's window.
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
