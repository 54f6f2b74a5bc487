"""Paragraphs that several documents share: where they stand, and texts without them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import xxhash

from weft.curation.shingles import simplified

#: Where a part of a text ends, by what parts are: at empty lines, or at the end of every line.
_ENDS = {"paragraph": re.compile(r"\n[^\S\n]*\n\s*"), "line": re.compile(r"\n\s*")}


class ParagraphTable(NamedTuple):
    """Paragraphs of a list of documents, one document after the other.

    Attributes:
        ``rows``: three numbers for each paragraph, uint64 ``[paragraphs, 3]``. The first is a hash of its words, the
            second the index of its first character in its document. The third is the index behind the paragraph and the
            white space that follows it.
        ``offsets``: index in ``rows`` of each document's first paragraph, and the end, int64 ``[documents + 1]``.
    """

    rows: np.ndarray
    offsets: np.ndarray


def paragraph_spans(
    text: str, unit: Literal["paragraph", "line"]
) -> Iterator[tuple[int, int]]:
    """Yield ``(start, end)``, indices of characters, of every paragraph or line (``unit``) of ``text``. The spans cover
    all of the text.
    """
    start = 0
    for gap in _ENDS[unit].finditer(text):
        yield start, gap.end()
        start = gap.end()
    if start < len(text):
        yield start, len(text)


def paragraph_table(
    texts: Sequence[str], unit: Literal["paragraph", "line"], least_words: int
) -> ParagraphTable:
    """Return the paragraphs or lines (``unit``) of ``texts`` that have at least ``least_words`` words."""
    rows: list[tuple[int, int, int]] = []
    offsets = [0]
    for text in texts:
        for start, end in paragraph_spans(text, unit):
            words = simplified(text[start:end]).replace(b"\0", b" ").split()
            if len(words) >= max(least_words, 1):
                key = xxhash.xxh3_64_intdigest(b" ".join(words))
                rows.append((key, start, end))
        offsets.append(len(rows))
    table = np.array(rows, np.uint64).reshape(-1, 3)
    return ParagraphTable(table, np.array(offsets, np.int64))


def is_repeated(
    keys: np.ndarray,
    document_ranks: np.ndarray,
    starts: np.ndarray,
    least_documents: int,
) -> np.ndarray:
    """Return whether each paragraph repeats an earlier one of any document, bool ``[paragraphs]``.

    Arguments:
        ``keys``: hashes of the paragraphs of all documents, uint64 ``[paragraphs]``.
        ``document_ranks``: rank of the document of each paragraph, ``[paragraphs]``. Of equal paragraphs, the one in
            the document with the lowest rank is no repetition.
        ``starts``: index of each paragraph's first character in its document, ``[paragraphs]``.
        ``least_documents``: a paragraph counts as repeated only if it occurs in at least so many documents.
    """
    order = np.lexsort((starts, document_ranks, keys))
    is_new_key = np.diff(keys[order], prepend=keys[order][:1] + np.uint64(1)) != 0
    is_new_document = is_new_key | (np.diff(document_ranks[order], prepend=-1) != 0)
    run = np.cumsum(is_new_key) - 1
    documents = np.bincount(run, weights=is_new_document)[run] if len(run) else run
    repeated = np.empty(len(keys), bool)
    repeated[order] = ~is_new_key & (documents >= least_documents)
    return repeated


def without_spans(text: str, spans: Sequence[int]) -> str:
    """Return ``text`` without the characters of ``spans``.

    ``spans``: start and end of each span, one after another as a flat list, in rising order.
    """
    edges = [0, *spans, len(text)]
    pieces = [
        text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]
    return "".join(pieces)
