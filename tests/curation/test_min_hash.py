"""MinHash: signatures estimate the overlap of shingles, buckets match as the formula says, short texts are shingles."""

from __future__ import annotations

import math
import unicodedata
from itertools import pairwise

import numpy as np
import pytest

from weft.curation import shingles as module
from weft.curation.min_hash import NO_WORDS, band_keys, minimum_hashes, text_signatures
from weft.curation.shingles import (
    HashedRuns,
    hash_words,
    mix_bits,
    simplified,
    text_blocks,
    text_shingles,
    word_shingles,
)

#: Words of letters only, as every digit counts as 0.
WORDS = ["".join(chr(97 + i // 15**k % 15) for k in range(3)) for i in range(3000)]


def shingle_sets(texts: list[str], n: int = 5) -> list[set[int]]:
    return [
        set(run.hashes[a:b].tolist())
        for _, run in text_shingles(texts, n)
        for a, b in pairwise(run.offsets)
    ]


def plain_words(text: str) -> list[str]:
    """The words of a text, written without a second thought."""
    simple = "".join(
        c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn"
    )
    kept = "".join(
        "0" if c.isdecimal() else c.lower() if c.isalnum() else " " for c in simple
    )
    return kept.split()


TEXTS = [
    "def read_file(path):\n    return open(path).read()",
    "Élan vital: 12.5 €, naïve — “quoted”",
    "Straße größer ÅNGSTRÖM Ωmega",
    "",
    " \t\n!?",
    "x" * 1000 + " " + "y" * 129 + " " + "z" * 128,
    "a bb ccc dddd eeeee ffffff ggggggg hhhhhhhh iiiiiiiii " * 3,
    "\x00null\x00bytes\ud800surrogate",
]


def test_words_are_those_of_the_plain_way() -> None:
    for text in TEXTS[:-1]:
        assert simplified(text).decode().replace("\0", " ").split() == plain_words(text)
    assert simplified("日本語 テスト").decode().split("\0")  # every character a word
    assert len(hash_words(["日本語です", "สวัสดี"]).hashes) >= 5 + 4


def test_equal_words_have_equal_hashes_and_others_not() -> None:
    run = hash_words(TEXTS)
    by_word: dict[bytes, int] = {}
    for text, (a, b) in zip(TEXTS, pairwise(run.offsets), strict=True):
        words = [word for word in simplified(text).split(b"\0") if word]
        assert len(words) == b - a
        for word, value in zip(words, run.hashes[a:b].tolist(), strict=True):
            assert by_word.setdefault(word, value) == value
    assert len(set(by_word.values())) == len(by_word)


def test_hashes_do_not_depend_on_neighbours_or_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = text_signatures(TEXTS, 3, 12, seed=5)
    alone = np.concatenate([text_signatures([t], 3, 12, seed=5) for t in TEXTS])
    assert np.array_equal(together, alone)
    monkeypatch.setattr(module, "BLOCK_BYTES", 40)
    assert len(list(text_blocks(TEXTS))) > 3
    assert np.array_equal(together, text_signatures(TEXTS, 3, 12, seed=5))


def test_shingles_are_sequences_of_n_words() -> None:
    random = np.random.default_rng(0)
    texts = [
        " ".join(random.choice(WORDS[:20], size)) for size in (0, 1, 2, 4, 5, 6, 40, 3)
    ]
    for n in (1, 2, 5):
        expected = []
        for text in texts:
            words = text.split()
            grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
            expected.append(set(grams or ([tuple(words)] if words else [])))
        sets = shingle_sets(texts, n)
        assert [len(s) for s in sets] == [len(s) for s in expected]
        for i in range(len(texts)):
            for j in range(i):
                assert len(sets[i] & sets[j]) == len(expected[i] & expected[j])


def test_short_texts_are_one_shingle_and_never_part_of_a_longer_one() -> None:
    """datatrove skips them, so that equal short documents are all kept."""
    a, b, c, d, empty = shingle_sets(["one two", "One, two!", "one", "one two three four five", "?"])  # fmt: skip
    assert a == b and len(a) == 1 and len(d) == 1
    assert not a & c and not a & d and not empty
    signatures = text_signatures(["...", "one"], 5, 8, seed=1)
    assert (signatures[0] == NO_WORDS).all() and (signatures[1] != NO_WORDS).any()


def perturbed(
    random: np.random.Generator, words: np.ndarray, share: float
) -> np.ndarray:
    """The same words with a share of them replaced."""
    places = random.random(len(words)) < share
    return np.where(places, random.choice(WORDS, len(words)), words)


def jaccard(a: set[int], b: set[int]) -> float:
    return len(a & b) / len(a | b)


def planted(pairs: int, seed: int) -> tuple[list[str], list[str], np.ndarray]:
    """Pairs of texts, and the overlap of the shingles of each."""
    random = np.random.default_rng(seed)
    texts, others = [], []
    for _ in range(pairs):
        words = random.choice(WORDS, int(random.integers(150, 400)))
        texts.append(" ".join(words))
        others.append(" ".join(perturbed(random, words, random.uniform(0, 0.09))))
    overlaps = map(jaccard, shingle_sets(texts), shingle_sets(others))
    return texts, others, np.array(list(overlaps))


def test_estimates_overlap() -> None:
    """A single estimate has a standard deviation of at most 1 / (2 sqrt(112)): six of these are 3 / sqrt(112)."""
    texts, others, overlaps = planted(200, seed=1)
    equal = text_signatures(texts, 5, 112, 1) == text_signatures(others, 5, 112, 1)
    errors = equal.mean(axis=1) - overlaps
    assert np.abs(errors).max() < 3 / math.sqrt(112)
    # without bias: the mean's own standard deviation is smaller by sqrt(200)
    assert abs(errors.mean()) < 3 * 0.5 / math.sqrt(112 * 200)


def binomial_band(trials: int, p: np.ndarray, level: float = 0.99) -> tuple[int, int]:
    """Numbers of hits between which the sum of independent trials lies at this level. ``p``: probability of each."""
    distribution = np.ones(1)
    for each in p:
        distribution = np.convolve(distribution, [1 - each, each])
    sums = np.cumsum(distribution)
    low = int(np.searchsorted(sums, (1 - level) / 2))
    high = int(np.searchsorted(sums, (1 + level) / 2))
    assert 0 <= low <= high <= trials
    return low, high


def match_probability(jaccard: float, buckets: int, hashes: int) -> float:
    """Return the probability that two documents share a bucket, by the overlap ``jaccard`` of their shingles.

    ``hashes``: number of hash functions of a bucket.
    """
    return 1 - (1 - jaccard**hashes) ** buckets


def check_recall(pairs: int, seed: int) -> None:
    texts, others, overlaps = planted(pairs, seed)
    keys = [band_keys(text_signatures(t, 5, 112, 1), 14) for t in (texts, others)]
    matched = (keys[0] == keys[1]).any(axis=1)
    expected = np.array([match_probability(s, 14, 8) for s in overlaps])
    checked = 0
    for low in np.arange(0.5, 1.0, 0.1):
        in_bin = (overlaps >= low) & (overlaps < low + 0.1)
        least, most = binomial_band(int(in_bin.sum()), expected[in_bin])
        assert least <= matched[in_bin].sum() <= most, low
        checked += int(in_bin.sum())
    assert checked > pairs / 2


def test_recall_of_planted_near_duplicates_is_that_of_the_formula() -> None:
    check_recall(400, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_recall_of_many_near_duplicates(seed: int) -> None:
    """Each case has five bins of 99 %: a fresh seed may fail once in twenty; these do not."""
    check_recall(6000, seed=100 + seed)


def test_the_formula_is_that_of_the_table() -> None:
    table = {0.5: .053, 0.6: .211, 0.7: .565, 0.75: .772, 0.8: .924, 0.85: .988, 0.9: 1.0}  # fmt: skip
    for s, p in table.items():
        assert match_probability(s, 14, 8) == pytest.approx(p, abs=1e-3)
    assert match_probability(0.8, 9, 13) == pytest.approx(0.399, abs=1e-3)


def test_hash_functions_are_as_good_as_random_permutations() -> None:
    """Every shingle of a set is the smallest equally often: chi-square over 20 shingles and many functions."""
    values = mix_bits(np.arange(1, 21, dtype=np.uint64))
    each = [
        minimum_hashes(HashedRuns(values[i : i + 1], np.array([0, 1])), 10_000, 3)[0]
        for i in range(20)
    ]
    signatures = minimum_hashes(HashedRuns(values, np.array([0, 20])), 10_000, 3)[0]
    winners = np.bincount(np.argmin(each, axis=0), minlength=20)
    assert np.array_equal(np.min(each, axis=0), signatures)
    statistic = ((winners - 500) ** 2 / 500).sum()
    assert statistic < 43.8  # 99.9 % of chi-square with 19 degrees of freedom


def test_runs_of_no_texts() -> None:
    assert hash_words([]).offsets.tolist() == [0]
    assert word_shingles(hash_words(["", "?"]), 5).offsets.tolist() == [0, 0, 0]
    assert text_signatures([], 5, 8, 1).shape == (0, 8)
    assert band_keys(text_signatures([], 5, 8, 1), 2).shape == (0, 2)
