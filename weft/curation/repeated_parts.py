"""Repetition inside a text: lines, paragraphs and n-grams of words (Rae et al. 2021, 2112.11446, table A1)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from weft.curation.split_words import split_words

#: Sizes of the n-grams of which the most frequent one counts, and of those of which all repetitions count.
TOP_SIZES, ALL_SIZES = (2, 3, 4), (5, 6, 7, 8, 9, 10)


class Repeated(NamedTuple):
    """Number and total length of the parts of a text (such as lines) that are equal to an earlier part.

    ``parts``: number of repeated parts. ``characters``: their total length in characters.
    """

    parts: int
    characters: int


def count_repeated(parts: Sequence[str]) -> Repeated:
    """Return number and total length of the ``parts`` of a text that are equal to an earlier part."""
    known: set[str] = set()
    lengths: list[int] = []
    for part in parts:
        if part in known:
            lengths.append(len(part))
        known.add(part)
    return Repeated(len(lengths), sum(lengths))


def top_gram_characters(words: Sequence[str], size: int) -> int:
    """Return the number of characters of the most frequent n-gram of ``size`` words, times its frequency.

    Of several equally frequent n-grams the first in the text counts. Returns 0 if there are fewer words.
    """
    grams = Counter(" ".join(words[i : i + size]) for i in range(len(words) - size + 1))
    if not grams:
        return 0
    ((gram, count),) = grams.most_common(1)
    return len(gram) * count


def repeated_gram_characters(words: Sequence[str], size: int) -> int:
    """Return the number of characters in repeated n-grams of ``size`` words, counting overlapping characters once.

    An n-gram is repeated if it occurs earlier in the text.
    """
    known: set[str] = set()
    characters, at = 0, 0
    while at + size <= len(words):
        gram = "".join(words[at : at + size])
        if gram in known:
            characters += len(gram)
            at += size
        else:
            known.add(gram)
            at += 1
    return characters


def repetition_statistics(text: str) -> dict[str, float]:
    """Return shares of repeated lines, paragraphs and n-grams of ``text``, by name of the column.

    Paragraphs are divided by empty lines. Shares of characters are relative to the length of the text.
    """
    paragraphs = re.split(r"\n{2,}", text.strip())
    lines = re.split(r"\n+", text)
    words = split_words(text)
    size = max(1, len(text))
    of_paragraphs, of_lines = count_repeated(paragraphs), count_repeated(lines)
    shares = {
        "repeated_paragraphs": of_paragraphs.parts / len(paragraphs),
        "repeated_paragraph_characters": of_paragraphs.characters / size,
        "repeated_lines": of_lines.parts / len(lines),
        "repeated_line_characters": of_lines.characters / size,
    }
    for n in TOP_SIZES:
        shares[f"top_{n}_gram_characters"] = top_gram_characters(words, n) / size
    for n in ALL_SIZES:
        shares[f"repeated_{n}_gram_characters"] = (
            repeated_gram_characters(words, n) / size
        )
    return shares
