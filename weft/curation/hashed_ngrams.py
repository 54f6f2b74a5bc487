"""Hashed n-grams: a text as a sparse vector of fixed width, without a vocabulary (Weinberger et al. 2009)."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import xxhash
from pydantic import Field, model_validator

from weft.section import Section

_WORD = re.compile(r"\w+|[^\w\s]")
#: Odd factors of the rolling hash and of the mixing of its bits (splitmix64).
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIXERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class NgramSettings(Section):
    """Settings of turning a text into a vector: lengths of the n-grams of words and characters, and number of hashed
    features.
    """

    words: int = Field(
        2, ge=0, le=5, description="Number of words of the longest n-gram of words."
    )
    characters: int = Field(
        4,
        ge=0,
        le=8,
        description="Number of bytes of the longest n-gram of characters.",
    )
    bits: int = Field(
        18,
        ge=8,
        le=26,
        description="Number of bits of an n-gram's hash: there are 2^bits features.",
    )
    most_characters: int = Field(
        20_000,
        ge=1,
        description="Largest number of characters that are read of a document, from its start.",
    )

    @model_validator(mode="after")
    def _some(self) -> NgramSettings:
        if not self.words and self.characters < 2:
            raise ValueError(
                "words = 0 and characters below 2 leave no n-gram; raise one of them"
            )
        return self


class SparseVector(NamedTuple):
    """Sparse vector whose Euclidean norm is 1.

    ``indices``: int64, in increasing order: the places of the values that are not 0. ``values``: float32, one for each
    index. The vector of a text without n-grams has no values, and norm 0.
    """

    indices: np.ndarray
    values: np.ndarray


def ngram_vector(text: str, settings: NgramSettings) -> SparseVector:
    """Return ``text`` as a vector of norm 1, whose values are proportional to log(1 + count) of each hashed n-gram.
    ``settings``: which n-grams, and number of hash values.
    """
    text = text[: settings.most_characters]
    characters = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    words = np.array([_hash(word) for word in _WORD.findall(text)], np.uint64)
    grams = [
        _ngrams(characters.astype(np.uint64), size, np.uint64(size))
        for size in range(2, settings.characters + 1)
    ]
    grams += [
        _ngrams(words, size, np.uint64(100 + size))
        for size in range(1, settings.words + 1)
    ]
    if not grams:
        return SparseVector(np.zeros(0, np.int64), np.zeros(0, np.float32))
    features = np.concatenate(grams) >> np.uint64(64 - settings.bits)
    indices, counts = np.unique(features, return_counts=True)
    values = np.log1p(counts)
    length = np.linalg.norm(values) or 1.0
    return SparseVector(indices.astype(np.int64), (values / length).astype(np.float32))


@lru_cache(1 << 16)
def _hash(word: str) -> int:
    return xxhash.xxh64_intdigest(word.encode("utf-8", "replace"))


def _ngrams(items: np.ndarray, size: int, salt: np.uint64) -> np.ndarray:
    """Return a hash of 64 bits for each run of ``size`` items. ``salt``: makes runs of another kind other hashes."""
    count = len(items) - size + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    hashes = np.full(count, salt, np.uint64)
    for k in range(size):
        hashes = hashes * _FACTOR + items[k : k + count]
    for mixer, shift in zip(_MIXERS, (30, 27), strict=True):
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * mixer
    return hashes ^ (hashes >> np.uint64(31))
