"""A step's row in parts: what the cache reads and writes for the tokens of one part (:mod:`weft.models.weave`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.generate.packed_row import PackedRow
from weft.models.paged import Pages, Reading
from weft.models.spans import Span
from weft.models.token_parts import TokenPart


def can_be_cut(row: PackedRow) -> bool:
    """Return whether ``row``, the packed tokens of a step, may be computed in parts, one after the other. This is
    possible if no text in the row has an adapter or attends to another text.
    """
    return not any(row.adapters) and not any(span.context for span in row.spans)


class PartReadings:
    """Tells the caches which tokens come next, when the row of a step is computed in parts. Call it with a part before
    that part is computed. ``pages``: the cache of each layer. ``spans``: the new tokens of each text in the row.
    ``slots``: indices ``[tokens]`` among the tokens of all cache blocks, to which the row's new tokens are written.
    """

    def __init__(
        self, pages: Sequence[Pages], spans: Sequence[Span], slots: torch.Tensor
    ) -> None:
        self.pages, self.spans, self.slots = pages, spans, slots
        self.readings: dict[TokenPart, Reading] = {}

    def __call__(self, part: TokenPart) -> None:
        """Let all pages read the tokens of ``part``."""
        if part not in self.readings:
            slots = self.slots[part.first : part.last]
            self.readings[part] = Reading(spans_within(self.spans, part), slots)
        for pages in self.pages:
            pages.reading = self.readings[part]


def spans_within(spans: Sequence[Span], part: TokenPart) -> list[Span]:
    """Return the tokens of each text that lie in ``part`` of the row, numbered from the part's first token. Tokens of
    the text in earlier parts count as computed already, because their keys and values are in the cache by then.
    """
    cut = []
    for span in spans:
        first, last = max(span.first, part.first), min(span.last, part.last)
        if first < last:
            past = span.past + first - span.first
            at = first - part.first, last - part.first
            cut.append(Span(*at, past, span.table, prompt=span.prompt))
    return cut
