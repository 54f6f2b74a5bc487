"""Passages: a document cut at the ends of sentences, so that each part fits a generator, and joined again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

#: White space behind the end of a sentence, a line break, or the place behind a full stop of Chinese or Japanese.
_SENTENCE_GAP = re.compile(
    r"(?:(?<=[.!?…])|(?<=[.!?…][\"'”\u2019)\]]))\s+|\s*\n\s*|(?<=[。\uff01\uff1f])(?=\S)"
)
_WORD_GAP = re.compile(r"\s+")
#: The end of a sentence with what may close it.
_SENTENCE_END = re.compile(
    r"[.!?…。\uff01\uff1f][\"'”\u2019)\]]*(?=\s|$)|[。\uff01\uff1f]"
)
#: A word, or a sign that belongs to none.
_WORD = re.compile(r"\w+|[^\w\s]")

#: Returns how many tokens a text has.
TokenCount = Callable[[str], int]


class Passage(NamedTuple):
    """A part of a document.

    Attributes:
        ``text``: the part, without white space at either end.
        ``gap``: the white space that follows it in the document.
    """

    text: str
    gap: str


class CutDocument(NamedTuple):
    """A document that is cut into passages.

    Attributes:
        ``lead``: the white space before the first passage.
        ``passages``: the passages in their order.
    """

    lead: str
    passages: list[Passage]

    def join(self, texts: Sequence[str]) -> str:
        """Join ``texts``, one for each passage, with the white space that the document has between its passages.

        The passages' own texts give the original document.
        """
        gaps = (passage.gap for passage in self.passages)
        parts = (text + gap for text, gap in zip(texts, gaps, strict=True))
        return self.lead + "".join(parts)


def cut_document(text: str, most: int, count: TokenCount) -> CutDocument:
    """Cut ``text`` into as few passages as possible, one after the other, of at most ``most`` tokens.

    Passages end where sentences or lines end. A sentence of more than ``most`` tokens is cut between words, and a word
    of more tokens at any character. ``count``: function that returns the number of tokens of a text.
    """
    body = text.lstrip()
    lead = text[: len(text) - len(body)]
    passages = list[Passage]()
    held = list[Passage]()
    size = 0
    for piece in _pieces(body.rstrip(), most, count):
        tokens = count(piece.text + piece.gap)
        if held and size + tokens > most:
            passages.append(_joined(held))
            held, size = [], 0
        held.append(piece)
        size += tokens
        # tokens of a whole are not quite the sum of its parts'
        while (
            len(held) > 1
            and size > most - len(held)
            and count(_joined(held).text) > most
        ):
            passages.append(_joined(held[:-1]))
            held = held[-1:]
            size = tokens
    if held:
        last = _joined(held)
        passages.append(last._replace(gap=body[len(body.rstrip()) :]))
    return CutDocument(lead, passages)


def word_count(text: str) -> int:
    """Return the number of words and punctuation marks of ``text``: an estimate of its tokens without a tokenizer."""
    return sum(1 for _ in _WORD.finditer(text))


def without_half_sentence(text: str) -> str:
    """Return ``text`` up to the end of its last complete sentence, or all of it if no sentence ends in it."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else text


def _joined(pieces: Sequence[Passage]) -> Passage:
    """Join successive pieces to one passage."""
    text = "".join(piece.text + piece.gap for piece in pieces)
    gap = pieces[-1].gap
    return Passage(text[: len(text) - len(gap)], gap)


def _pieces(text: str, most: int, count: TokenCount) -> Iterator[Passage]:
    """Yield sentences; in place of those that are too long, words; in place of words that are too long, parts."""
    for sentence in _split(text, _SENTENCE_GAP):
        if count(sentence.text) <= most:
            yield sentence
            continue
        for word in _split(sentence.text, _WORD_GAP):
            last = word.gap == ""
            gap = sentence.gap if last else word.gap
            yield from _parts(word.text, gap, most, count)


def _parts(word: str, gap: str, most: int, count: TokenCount) -> Iterator[Passage]:
    """Yield a word in halves of halves, until each has at most ``most`` tokens. The last is followed by ``gap``."""
    if len(word) < 2 or count(word) <= most:
        yield Passage(word, gap)
        return
    half = len(word) // 2
    yield from _parts(word[:half], "", most, count)
    yield from _parts(word[half:], gap, most, count)


def _split(text: str, gaps: re.Pattern[str]) -> Iterator[Passage]:
    """Yield what stands between the matches of ``gaps``, each with the match behind it."""
    begin = 0
    for match in gaps.finditer(text):
        if match.start() > begin:
            yield Passage(text[begin : match.start()], match.group())
            begin = match.end()
    if begin < len(text):
        yield Passage(text[begin:], "")
