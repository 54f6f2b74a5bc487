"""MinHash: short signatures of documents, which are as often equal as the documents' sets of shingles overlap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.curation.shingles import HashedRuns, mix_bits, text_shingles

#: Value in the signature of a text without words. Such a text has no duplicate.
NO_WORDS = np.uint32(0xFFFFFFFF)
_ODD = np.uint64(0x9E3779B97F4A7C15)


def minimum_hashes(shingles: HashedRuns, hashes: int, seed: int) -> np.ndarray:
    """Return the MinHash signature (Broder 1997) of each text, uint32 ``[texts, hashes]``: its smallest shingle under
    each of ``hashes`` hash functions. ``shingles``: hashes of the shingles (runs of words) of each text.

    A hash function is ``(a x + b) mod 2^32`` with ``a`` odd, a permutation of 32 bits; ``a`` and ``b`` are drawn by
    ``seed``. ``x`` is the upper half of a shingle's hash.
    """
    random = np.random.default_rng(seed)
    factors = random.integers(0, 1 << 32, hashes, np.uint32) | np.uint32(1)
    shifts = random.integers(0, 1 << 32, hashes, np.uint32)
    values = (shingles.hashes >> np.uint64(32)).astype(np.uint32)
    filled = np.flatnonzero(np.diff(shingles.offsets))
    starts = shingles.offsets[:-1][filled]
    smallest = np.full((hashes, len(shingles.offsets) - 1), NO_WORDS)
    permuted = np.empty_like(values)
    for row in range(hashes if len(filled) else 0):
        np.multiply(values, factors[row], out=permuted)
        permuted += shifts[row]
        smallest[row, filled] = np.minimum.reduceat(permuted, starts)
    return smallest.T


def text_signatures(
    texts: Sequence[str], ngram: int, hashes: int, seed: int
) -> np.ndarray:
    """Return the MinHash signature of each text over its shingles of ``ngram`` words, uint32 ``[texts, hashes]``.
    ``seed``: seed of the hash functions.
    """
    signatures = np.full((len(texts), hashes), NO_WORDS)
    for block, shingles in text_shingles(texts, ngram):
        signatures[block] = minimum_hashes(shingles, hashes, seed)
    return signatures


def band_keys(signatures: np.ndarray, buckets: int) -> np.ndarray:
    """Return a uint64 key for each text and bucket, ``[texts, buckets]``, by which similar texts are found.

    ``signatures``: ``[texts, hashes]``; each bucket has an equal part of the hashes. Two texts have the same key in a
    bucket if all hashes of the bucket are equal; otherwise with a probability of 2^-64.
    """
    texts, hashes = signatures.shape
    bands = signatures.reshape(texts, buckets, hashes // buckets)
    keys = np.zeros(bands.shape[:2], np.uint64)
    for place in range(bands.shape[2]):
        keys = mix_bits(keys * _ODD + bands[:, :, place])
    return keys
