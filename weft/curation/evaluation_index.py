"""Index of evaluation sets: the word n-grams of their examples, to look for in documents."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.curation.shingles import hash_words, text_blocks, text_shingles, word_shingles
from weft.data.files import TABLES, format_of, read_records
from weft.data.reading import open_file, reading
from weft.errors import UsageError
from weft.paths import home_path


class EvaluationIndex(NamedTuple):
    """Sorted n-grams of evaluation sets, with which training documents are compared.

    Attributes:
        ``names``: name of each set.
        ``grams``: for each length n in words, two arrays: the sorted uint64 hashes of the n-grams, and booleans
            ``[hashes, sets]`` that say which sets contain the n-gram.
        ``skipped``: number of texts of each set that are too short to be looked for.
    """

    names: tuple[str, ...]
    grams: dict[int, tuple[np.ndarray, np.ndarray]]
    skipped: tuple[int, ...]


class OverlapCounts(NamedTuple):
    """Overlaps of documents with evaluation sets.

    Attributes:
        ``hits``: for each document, the number of positions at which an n-gram of any set begins, ``[documents]``.
        ``sets``: whether each document has n-grams of each set, bool ``[documents, sets]``.
    """

    hits: np.ndarray
    sets: np.ndarray


def evaluation_files(path: str) -> list[Path]:
    """Return the sorted files of the evaluation set at ``path``, which is a file, a folder or a glob.

    Raises :class:`UsageError` if there is none.
    """
    place = home_path(path)
    if place.is_dir():
        files = [f for f in place.rglob("*") if f.is_file() and f.name[0] != "."]
    else:
        names = [str(place)] if place.is_file() else glob.glob(str(place))
        files = [Path(name) for name in names if Path(name).is_file()]
    if not files:
        raise UsageError(
            f"evaluation set {path}: there is no such file; give a file, a folder or a glob"
        )
    return sorted(files)


def evaluation_texts(path: str) -> Iterator[str]:
    """Yield the texts of the evaluation set ``path``: every string of its records, or a whole file of plain text."""
    for file in evaluation_files(path):
        with reading(file, "an evaluation set"):
            if format_of(file) in (*TABLES, ".json"):
                for _, record in read_records(file):
                    yield from _strings(record)
            else:
                with open_file(file) as stream:
                    yield stream.read().decode()


def _strings(value: Any) -> Iterator[str]:
    """Yield every text inside a record."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from _strings(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _strings(member)


def files_digest(paths: Sequence[str]) -> str:
    """Return a digest of the contents of all files of the evaluation sets ``paths``."""
    digest = blake2b(digest_size=16)
    for path in paths:
        for file in evaluation_files(path):
            with file.open("rb") as stream:
                content = blake2b(stream.read()).digest()
            digest.update(f"{path} {file.name} ".encode() + content)
    return digest.hexdigest()


def set_names(paths: Sequence[str]) -> tuple[str, ...]:
    """Return a name for each evaluation set in ``paths``: its file or folder name, or its path if another set has this
    name.
    """
    short = [Path(path).name.split(".")[0] or path for path in paths]
    return tuple(
        name if short.count(name) == 1 else path
        for name, path in zip(short, paths, strict=True)
    )


def build_evaluation_index(
    paths: Sequence[str], ngram: int, least_words: int
) -> EvaluationIndex:
    """Read evaluation sets, and return the index of their n-grams.

    ``paths``: file, folder or glob of each set. ``ngram``: number of words of an n-gram. Shorter texts are indexed as a
    whole, and texts of fewer than ``least_words`` words are skipped. Raises :class:`UsageError` for a set in which all
    texts are skipped.
    """
    least = min(least_words, ngram)
    hashes: dict[int, list[np.ndarray]] = {}
    owners: dict[int, list[np.ndarray]] = {}
    skipped = []
    for number, path in enumerate(paths):
        by_length: dict[int, list[str]] = {}
        for text in evaluation_texts(path):
            size = min(len(hash_words([text]).hashes), ngram)
            by_length.setdefault(size, []).append(text)
        skipped.append(sum(len(by_length.pop(size, ())) for size in range(least)))
        if not by_length:
            raise UsageError(
                f"evaluation set {path}: none of its {skipped[-1]} texts has {least} words; set least_words lower, or "
                "check the file"
            )
        for length, texts in by_length.items():
            for _, grams in text_shingles(texts, length):
                hashes.setdefault(length, []).append(grams.hashes)
                owners.setdefault(length, []).append(np.full(len(grams.hashes), number))
    index = {}
    for length, parts in hashes.items():
        values, places = np.unique(np.concatenate(parts), return_inverse=True)
        sets = np.zeros((len(values), len(paths)), bool)
        sets[places, np.concatenate(owners[length])] = True
        index[length] = values, sets
    return EvaluationIndex(set_names(paths), index, tuple(skipped))


def count_overlaps(texts: Sequence[str], index: EvaluationIndex) -> OverlapCounts:
    """Return how many n-grams each of ``texts`` shares with the evaluation sets of ``index``, and with which sets."""
    hits = np.zeros(len(texts), np.int64)
    in_sets = np.zeros((len(texts), len(index.names)), bool)
    for block in text_blocks(texts):
        words = hash_words(texts[block])
        for length, (values, sets) in index.grams.items():
            grams = word_shingles(words, length)
            places = np.searchsorted(values, grams.hashes).clip(max=len(values) - 1)
            matches = np.flatnonzero(values[places] == grams.hashes)
            # index of the text in which each match stands
            rows = block.start + np.searchsorted(grams.offsets, matches, "right") - 1
            np.add.at(hits, rows, 1)
            np.logical_or.at(in_sets, rows, sets[places[matches]])
    return OverlapCounts(hits, in_sets)
