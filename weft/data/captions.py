"""Captions as a diffusion transformer reads them: words, and pieces of words, as rows of a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import xxhash

#: Rows that a word is the mean of: its own, and those of its first pieces of three letters.
PIECES = 8
_WORD = re.compile(r"\w+|[^\w\s]")


def caption_words(caption: str) -> list[str]:
    """Return the words and punctuation marks of ``caption`` in order, in lower case."""
    return _WORD.findall(caption.lower())


@lru_cache(maxsize=1 << 16)
def caption_rows(caption: str, words: int, rows: int) -> np.ndarray:
    """Return indices of embedding rows for the first ``words`` words of ``caption``, int64 ``[words, PIECES]``.

    A word is looked up as a whole and by its pieces of three letters, so that similar words share rows (Bojanowski et
    al. 2017). A hash of each piece gives its row in a table of ``rows`` rows. Row 0 is padding: a caption without words
    has only zeros.
    """
    numbers = np.zeros((words, PIECES), np.int64)
    for place, word in enumerate(caption_words(caption)[:words]):
        ends = f"<{word}>"
        parts = [word, *(ends[at : at + 3] for at in range(len(ends) - 2))]
        for at, part in enumerate(parts[:PIECES]):
            numbers[place, at] = 1 + xxhash.xxh32_intdigest(part.encode()) % max(
                1, rows - 1
            )
    return numbers


def captions_as_rows(captions: Sequence[str], words: int, rows: int) -> np.ndarray:
    """Return :func:`caption_rows` of all ``captions``, int64 ``[captions, words, PIECES]``.

    ``rows``: number of rows of the embedding table.
    """
    if not captions:
        return np.zeros((0, words, PIECES), np.int64)
    return np.stack([caption_rows(caption, words, rows) for caption in captions])
