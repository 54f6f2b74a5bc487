"""Shingles: hashed word n-grams of simplified texts, by which documents are compared.

Texts are simplified first: small letters without accents, every digit is 0, and punctuation separates words. All texts
of a block are hashed at once, by numpy.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

#: Bytes of text that are hashed at once, so that arrays stay in the processor's cache.
BLOCK_BYTES = 1 << 18
#: Bytes of a word above which its hash is that of xxhash.
LONG_WORD = 128
#: Odd constants of the mixing: of splitmix64, and the golden ratio.
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
#: Masks of the first 0 to 8 bytes of a little-endian word.
_MASKS = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)
#: Scripts that write no spaces between words: every character counts as a word.
_NO_SPACES = (
    "CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"
)  # fmt: skip


class HashedRuns(NamedTuple):
    """Hashes of the words, or of the shingles, of each text in a list.

    Attributes:
        ``hashes``: uint64 values of all texts, one text after the other.
        ``offsets``: index in ``hashes`` at which each text begins, and the end of the last one, ``[texts + 1]``.
    """

    hashes: np.ndarray
    offsets: np.ndarray


def _byte_table() -> bytes:
    """Return what becomes of every byte of UTF-8: 0 for what separates words."""
    table = bytearray(256)
    for byte in range(256):
        letter = chr(byte)
        if byte >= 128:
            table[byte] = byte
        elif letter.isalpha():
            table[byte] = ord(letter.lower())
        elif letter.isdigit():
            table[byte] = ord("0")
    return bytes(table)


_BYTES = _byte_table()


class _Characters(dict[int, str]):
    """What becomes of characters outside ASCII, filled as they occur."""

    def __missing__(self, code: int) -> str:
        self[code] = simple = self.simple(chr(code))
        return simple

    @staticmethod
    def simple(character: str) -> str:
        category = unicodedata.category(character)
        if category == "Mn":
            return ""
        if category[0] in "ZPSC":
            return " "
        if category == "Nd":
            return "0"
        if unicodedata.name(character, "").startswith(_NO_SPACES):
            return f" {character} "
        return character.lower()


_CHARACTERS = _Characters()
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")


def simplified(text: str) -> bytes:
    """Return the words of ``text`` in UTF-8, with one or more zero bytes between them."""
    if not text.isascii():
        # accents become characters of their own, which are left out
        text = _BEYOND_ASCII.sub(
            lambda run: run[0].translate(_CHARACTERS),
            unicodedata.normalize("NFD", text),
        )
    return text.encode("utf-8", "surrogatepass").translate(_BYTES)


def mix_bits(values: np.ndarray) -> np.ndarray:
    """Return a hash of each of ``values``, uint64, by the final mixing of SplitMix64. Different values get different
    hashes.
    """
    values = values ^ (values >> np.uint64(30))
    values *= _FIRST
    values ^= values >> np.uint64(27)
    values *= _SECOND
    values ^= values >> np.uint64(31)
    return values


def text_blocks(texts: Sequence[str]) -> Iterator[slice]:
    """Divide ``texts`` into blocks of about :data:`BLOCK_BYTES` characters, and yield the slice of each block.

    A block has at least one text.
    """
    start = size = 0
    for index, text in enumerate(texts):
        if size and size + len(text) > BLOCK_BYTES:
            yield slice(start, index)
            start, size = index, 0
        size += len(text) + 1
    if start < len(texts):
        yield slice(start, len(texts))


def hash_words(texts: Sequence[str]) -> HashedRuns:
    """Return the hash of every word of each text, uint64, text after text."""
    clean = [simplified(text) for text in texts]
    lengths = np.fromiter(map(len, clean), np.int64, len(clean))
    joined = b"\0".join([b"", *clean, b"\0" * 8])
    is_word = np.frombuffer(joined, np.uint8) != 0
    edges = np.flatnonzero(is_word[1:] != is_word[:-1]) + 1
    starts, ends = edges[::2], edges[1::2]
    hashes = _hash_spans(joined, starts, ends - starts)
    text_starts = 1 + np.cumsum(lengths + 1) - (lengths + 1)
    offsets = np.searchsorted(starts, text_starts)
    return HashedRuns(hashes, np.append(offsets, len(starts)))


def _hash_spans(joined: bytes, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the hash of each span of bytes, which are read eight at a time."""
    eights = np.ndarray((len(joined) - 7,), "<u8", joined, strides=(1,))
    hashes = mix_bits(
        (eights[starts] & _MASKS[np.minimum(sizes, 8)])
        + sizes.astype(np.uint64) * _GOLDEN
    )
    rows = np.flatnonzero(sizes > 8)
    place = 8
    while len(rows) and place < LONG_WORD:
        left = np.minimum(sizes[rows] - place, 8)
        part = eights[starts[rows] + place] & _MASKS[left]
        hashes[rows] = mix_bits(hashes[rows] * _GOLDEN + part)
        place += 8
        rows = rows[sizes[rows] > place]
    for row in np.flatnonzero(sizes > LONG_WORD):
        span = joined[starts[row] : starts[row] + sizes[row]]
        hashes[row] = xxhash.xxh3_64_intdigest(span)
    return hashes


def word_shingles(words: HashedRuns, n: int) -> HashedRuns:
    """Return the hash of every run of ``n`` successive words of each text. A run that occurs twice has two entries.

    A text of fewer than ``n`` words has one shingle: all its words. A text without words has none.
    """
    hashes, offsets = words
    counts = np.diff(offsets)
    weights = mix_bits(np.arange(1, n + 1, dtype=np.uint64)) | np.uint64(1)
    padded = np.append(hashes, np.zeros(n, np.uint64))
    sums = np.zeros(len(hashes), np.uint64)
    for place, weight in enumerate(weights):
        sums += padded[place : place + len(hashes)] * weight
    # the last n - 1 words of a text begin no sequence of it
    begins = np.ones(len(hashes), bool)
    for back in range(1, n):
        begins[offsets[1:][counts >= back] - back] = False
    short = np.flatnonzero((counts > 0) & (counts < n))
    first = offsets[short]
    begins[first] = True
    sums[first] = counts[short].astype(np.uint64) * _GOLDEN
    for place in range(n - 1):
        long_enough = counts[short] > place
        at = first[long_enough]
        sums[at] += hashes[at + place] * weights[place]
    sizes = np.where(counts >= n, counts - n + 1, np.minimum(counts, 1))
    return HashedRuns(mix_bits(sums[begins]), np.append(0, np.cumsum(sizes)))


def text_shingles(texts: Sequence[str], n: int) -> Iterator[tuple[slice, HashedRuns]]:
    """Yield ``(slice, shingles)`` for each block of ``texts``, with hashes of all runs of ``n`` words of its texts."""
    for block in text_blocks(texts):
        yield block, word_shingles(hash_words(texts[block]), n)
