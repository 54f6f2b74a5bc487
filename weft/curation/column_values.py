"""Columns of documents as arrays: numbers, names of groups, and vectors."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.curation.documents import Documents
from weft.curation.hashed_ngrams import NgramSettings, ngram_vector
from weft.errors import UsageError


def column_values(documents: Documents, name: str, setting: str) -> list[Any]:
    """Return the values of the column ``name``. ``setting``: the setting that names the column, for error lines.

    Raises :class:`UsageError` if no earlier step has written the column.
    """
    if name not in documents.columns:
        known = ", ".join(documents.columns) or "none"
        raise UsageError(
            f"steps.{setting} = {name!r}: no earlier step has written this column; columns: {known}"
        )
    return documents.columns[name]


def number_column(documents: Documents, name: str, setting: str) -> np.ndarray:
    """Return a column of numbers as float64 ``[documents]``, with NaN where a document has no value.

    Raises :class:`UsageError` if a value is no number.
    """
    values = column_values(documents, name, setting)
    if wrong := [v for v in values if not isinstance(v, int | float | None)]:
        raise UsageError(
            f"steps.{setting} = {name!r}: the column holds {wrong[0]!r}, which is no number; name another column"
        )
    return np.array([np.nan if v is None else v for v in values], np.float64)


def group_column(documents: Documents, name: str, setting: str) -> np.ndarray:
    """Return a column of groups, such as classes, as an array of texts ``[documents]``; "" without a value."""
    values = column_values(documents, name, setting)
    return np.array(["" if value is None else str(value) for value in values], np.str_)


def vector_column(documents: Documents, name: str, setting: str) -> np.ndarray:
    """Return a column of vectors as float32 ``[documents, width]``.

    Raises :class:`UsageError` if a value is no list of numbers, or if the lists have different lengths.
    """
    values = column_values(documents, name, setting)
    remedy = "an embedding is a list of numbers, for each document of the same length"
    for document, value in zip(documents.ids, values, strict=True):
        if value is None or not len(value) or len(value) != len(values[0]):
            shown = "nothing" if value is None else f"{len(value)} numbers"
            raise UsageError(
                f"steps.{setting} = {name!r}: the column holds {shown} for {document}; {remedy}"
            )
    try:
        vectors = np.array(values, np.float32).reshape(len(values), -1)
    except (TypeError, ValueError):
        raise UsageError(
            f"steps.{setting} = {name!r}: the column holds {values[0]!r:.60}; {remedy}"
        ) from None
    if not np.isfinite(vectors).all():
        raise UsageError(
            f"steps.{setting} = {name!r}: the column holds infinite numbers or NaN; {remedy}"
        )
    return vectors


def document_vectors(documents: Documents, embedding: str) -> np.ndarray:
    """Return a vector for each document as float32 ``[documents, width]``: the column ``embedding``.

    Without a column, where ``embedding`` is "", the vectors are the hashed n-grams of the texts, of width 256.
    """
    if not embedding:
        vectors = np.zeros((len(documents), 256), np.float32)
        settings = NgramSettings(bits=8)
        for row, text in zip(vectors, documents.texts, strict=True):
            sparse = ngram_vector(text, settings)
            row[sparse.indices] = sparse.values
        return vectors
    if not len(documents):  # nobody knows the width
        return np.zeros((0, 0), np.float32)
    return vector_column(documents, embedding, "embedding")
