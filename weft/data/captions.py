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
    """Return the words and signs of ``caption``, in small letters."""
    return _WORD.findall(caption.lower())


@lru_cache(maxsize=1 << 16)
def caption_rows(caption: str, words: int, rows: int) -> np.ndarray:
    """Return the rows that the first ``words`` words of ``caption`` are made of, int64 ``[words, PIECES]``.

    A word is known by itself and by its pieces of three letters, so that words that are alike have rows in common
    (Bojanowski et al. 2017). Which of the ``rows`` rows of the table a piece has is a hash of it. Row 0 stands for no
    word, so that a caption of zeros says nothing.
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
    """Return :func:`caption_rows` of all ``captions``, int64 ``[captions, words, PIECES]``."""
    if not captions:
        return np.zeros((0, words, PIECES), np.int64)
    return np.stack([caption_rows(caption, words, rows) for caption in captions])
