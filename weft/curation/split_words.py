# ruff: noqa: RUF001 - marks of many scripts
"""Words and sentences of a text, by rules close to those of spaCy's English tokenizer, without a model."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

#: Marks that stand alone before or after a word. A dash, a slash or a full stop belongs to what follows it.
_MARK = r"[…,:;!?¿¡()\[\]{}<>_#*&。？！，、；：～·'\"`‘’‚“”„«»‹›「」『』（）〔〕【】《》〈〉]"
#: What is divided from the beginning of a text between white spaces.
_BEFORE = re.compile(rf"\.\.+|[§%=—–]|\+(?!\d)|[$£€¥]|{_MARK}")
#: What is divided from its end, with the ends of contractions: don't is "do" and "n't", it's is "it" and "'s".
_AFTER = re.compile(
    rf"(?:\.\.+|[—–]|(?<=\d)[+%$£€¥]|{_MARK}|(?<=[a-z\d%²)\]}}'\"’”`>_+-])\.|(?<=[A-Z][A-Z])\."
    r"|(?<=\w)(?:n['’]t|['’](?:s|re|ve|ll|d|m|S)))$"
)
#: What divides a word: dashes and commas between letters, assignments, slashes and colons before a letter.
_INSIDE = re.compile(
    r"(\.\.+|…|(?<=\d)[+\-*^](?=[\d-])|(?<=[a-z'\"’”])\.(?=[A-Z'\"‘“])"
    r"|(?<=[^\W\d_])(?:--+|[-–—~,])(?=[^\W\d_])|(?<=[A-Za-z\d])[:<>=/](?=[^\W\d_]))"
)
#: Addresses are not divided.
_ADDRESS = re.compile(r"(?:[a-z]+://|www\.)\S+|[\w.+-]+@[\w-]+\.[\w.-]+")
#: A word that keeps its full stops, as in "e.g.".
_DOTTED = re.compile(r"(?:[A-Za-z]\.){2,}")
#: Abbreviations whose full stop ends no sentence, as their lower-case letters.
_ABBREVIATIONS = frozenset((
    "mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "e.g", "i.e", "a.m", "p.m", "u.s", "inc", "co", "corp",
    "ltd", "gen", "rep", "sen", "gov", "adm", "jan", "feb", "aug", "sept", "oct", "nov", "dec",
))  # fmt: skip
#: The end of a sentence: its marks, what closes behind them, and a white space or the end of the text.
_SENTENCE_END = re.compile(r"(?<![.!?。！？])([.!?。！？]+)[\"'”’)\]]*(?=\s|$)")
#: The word before a mark.
_LAST_WORD = re.compile(r"\S*$")
#: Characters of the longest text between white spaces that is remembered, and at its end of the longest mark; what is
#: before a full stop is looked at as far.
_REMEMBERED, _MARK_LENGTH = 64, 32


def split_words(text: str) -> list[str]:
    """Return the words of ``text`` in order; punctuation marks are words of their own.

    Text between white spaces is split at leading and trailing marks, at English contractions, and at dashes between
    letters.
    """
    words: list[str] = []
    for chunk in text.split():
        divide = _words_of if len(chunk) <= _REMEMBERED else _divided
        words += divide(chunk)
    return words


def _divided(chunk: str) -> tuple[str, ...]:
    """Return the words of what stands between white spaces, in time proportional to its length."""
    before: list[str] = []
    after: list[str] = []
    start, end = 0, len(chunk)
    while start < end and (mark := _BEFORE.match(chunk, start)):
        before.append(mark[0])
        start = mark.end()
    while start < end and not _whole(chunk[max(start, end - _MARK_LENGTH) : end]):
        mark = _AFTER.search(chunk, max(start, end - _MARK_LENGTH), end)
        if mark is None or mark.start() <= start:
            break
        after.append(mark[0])
        end = mark.start()
    word = chunk[start:end]
    whole = _ADDRESS.fullmatch(word) or _whole(word)
    inside = [word] if whole else _INSIDE.split(word)
    return (*before, *filter(None, inside), *reversed(after))


_words_of = lru_cache(1 << 16)(_divided)


def _whole(chunk: str) -> bool:
    """Return whether the full stop at the end belongs to the word."""
    if not chunk.endswith("."):
        return False
    return chunk[:-1].lower() in _ABBREVIATIONS or bool(_DOTTED.fullmatch(chunk))


def is_symbol(word: str) -> bool:
    """Return whether ``word`` consists of punctuation marks and symbols only, without a letter or digit."""
    return not word.isalnum() and all(map(_is_mark, word))


@lru_cache(1 << 12)
def _is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] in "PSC"


def count_sentences(text: str) -> int:
    """Return the number of sentences of ``text``.

    A sentence ends with a mark before white space, except for the full stop of a usual abbreviation or of an initial.
    Text after the last mark counts as a sentence, too.
    """
    ends = 0
    last = 0
    for end in _SENTENCE_END.finditer(text):
        if end[1] == "." and _is_abbreviated(text, end.start()):
            continue
        ends, last = ends + 1, end.end()
    return ends + bool(text[last:].strip())


def _is_abbreviated(text: str, stop: int) -> bool:
    """Return whether the word before the full stop at ``stop`` is an abbreviation or an initial."""
    match = _LAST_WORD.search(text, max(0, stop - _MARK_LENGTH), stop)
    word = match[0] if match else ""
    return word.lstrip("\"'“‘([").lower() in _ABBREVIATIONS or _is_initial(word)


def _is_initial(word: str) -> bool:
    return len(word) == 1 and word.isupper() and word != "I"
