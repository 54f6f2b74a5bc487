"""Columns of documents as arrays: numbers, names of groups, and vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.curation.documents import Documents
from weft.curation.hashed_ngrams import NgramSettings, ngram_vector
from weft.errors import UsageError, WeftError


def column_values(documents: Documents, name: str, setting: str) -> list[Any]:
    """Return the values of the column ``name`` of ``documents``. ``setting``: the setting that names the column, for
    error lines.

    Raises :class:`UsageError` if no earlier step has written the column.
    """
    if name not in documents.columns:
        known = ", ".join(documents.columns) or "none"
        raise UsageError(
            f"steps.{setting} = {name!r}: no earlier step has written this column; columns: {known}"
        )
    return documents.columns[name]


def number_column(documents: Documents, name: str, setting: str) -> np.ndarray:
    """Return the column ``name``, of numbers, as float64 ``[documents]``, with NaN where a document has no value.

    ``setting``: the setting that names the column, for error lines. Raises :class:`WeftError` if a value is not a
    number; the run counts this as an error of the document.
    """
    values = column_values(documents, name, setting)
    if wrong := [v for v in values if not isinstance(v, int | float | None)]:
        raise WeftError(
            f"steps.{setting} = {name!r}: the column holds {wrong[0]!r}, which is no number; name another column"
        )
    # as float() of a whole number of 400 digits raises an error
    largest = float(np.finfo(np.float64).max)
    numbers = [
        np.nan if v is None else max(-largest, min(v, largest)) if v == v else v
        for v in values
    ]
    return np.array(numbers, np.float64)


def group_column(documents: Documents, name: str, setting: str) -> np.ndarray:
    """Return the column ``name``, of groups such as classes, as texts ``[documents]``; "" where a document has no
    value.

    ``setting``: the setting that names the column, for error lines.
    """
    values = column_values(documents, name, setting)
    return np.array(["" if value is None else str(value) for value in values], np.str_)


def vector_column(documents: Documents, name: str, setting: str) -> np.ndarray:
    """Return the column ``name``, of vectors, as float32 ``[documents, width]``; NaN where a document has no vector.

    ``setting``: the setting that names the column, for error lines. Raises :class:`UsageError` if a value is not a list
    of finite numbers, or if the lists have different lengths.
    """
    values = column_values(documents, name, setting)
    width = next((len(v) for v in values if isinstance(v, list) and v), 0)
    vectors = np.full((len(values), width), np.nan, np.float32)
    for row, document, value in zip(vectors, documents.ids, values, strict=True):
        if value is None or (isinstance(value, list) and not value):
            continue
        row[:] = _vector(value, width, f"steps.{setting} = {name!r}: {document}")
    return vectors


def _vector(value: Any, width: int, where: str) -> np.ndarray:
    """Return ``value`` as a vector of ``width`` numbers. ``where``: what error lines begin with."""
    vector = finite_vector(value)
    if vector is None or len(vector) != width:
        raise UsageError(
            f"{where} has {str(value)[:40]!r} in this column; a vector is a list of finite numbers, for each document "
            f"of the same length ({width} here)"
        )
    return vector


def finite_vector(value: Any) -> np.ndarray | None:
    """Convert a list of finite numbers to float32 ``[numbers]``; return None if ``value`` is anything else."""
    try:
        vector = np.array(value, np.float32)
    except (TypeError, ValueError, OverflowError):
        return None
    return vector if vector.ndim == 1 and np.isfinite(vector).all() else None


def document_vectors(documents: Documents, embedding: str) -> np.ndarray:
    """Return a vector for each document, float32 ``[documents, width]``; NaN for documents without a vector.

    ``embedding``: name of the column with the vectors. If it is "", the vectors are hashed n-grams of the texts, of
    width 256.
    """
    if not embedding:
        vectors = np.zeros((len(documents), 256), np.float32)
        settings = NgramSettings(bits=8)
        for row, text in zip(vectors, documents.texts, strict=True):
            sparse = ngram_vector(text, settings)
            row[sparse.indices] = sparse.values
        return vectors
    return vector_column(documents, embedding, "embedding")


def joined_vectors(parts: Sequence[np.ndarray], setting: str) -> np.ndarray:
    """Join the vectors of all shards to one array ``[documents, width]``, with NaN for documents without a vector.

    ``parts``: vectors of each shard; the width does not matter if no document of the shard has a vector. ``setting``:
    the setting that names the column, for error lines. Raises :class:`UsageError` if shards have vectors of different
    lengths.
    """
    widths = sorted({part.shape[1] for part in parts if np.isfinite(part).any()})
    if len(widths) > 1:
        raise UsageError(
            f"steps.{setting}: the column has vectors of {widths[0]} and of {widths[-1]} numbers; write it by one model"
        )
    width = widths[0] if widths else 0
    empty = [np.full((len(part), width), np.nan, np.float32) for part in parts]
    filled = [
        part if part.shape[1] == width else nothing
        for part, nothing in zip(parts, empty, strict=True)
    ]
    return np.concatenate(filled)


def with_vector(vectors: np.ndarray) -> np.ndarray:
    """Return which documents have a vector, bool ``[documents]``. ``vectors``: ``[documents, width]``, NaN for a
    document without one.
    """
    return np.isfinite(vectors).all(axis=1) & (vectors.shape[1] > 0)
