"""Semantic duplicates: documents whose vectors point nearly the same way, and the one that is kept of them."""

from __future__ import annotations

import numpy as np

from weft.curation.k_means import unit_rows

#: Vectors that are compared with all that are kept at once. It is fixed, so that results are.
BLOCK_VECTORS = 512


def semantic_survivors(
    vectors: np.ndarray, labels: np.ndarray, ranks: np.ndarray, eps: float
) -> np.ndarray:
    """Return for each document the index of the document that is kept in its place; its own index if it is kept itself.

    The documents of a cluster are processed one after another. A document is dropped if its cosine with a kept document
    is above 1 - ``eps``. ``vectors``: ``[documents, width]``. ``labels``: index of each document's cluster,
    ``[documents]``. ``ranks``: a number for each document, ``[documents]``; within a cluster, documents with lower
    numbers are processed first. After SemDeDup (Abbas et al. 2023), with one difference: only kept documents can drop
    others, so every dropped document is similar to a kept one.
    """
    survivors = np.arange(len(vectors))
    order = np.lexsort((ranks, labels))
    for members in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        if len(members) > 1:
            survivors[members] = members[_survivors(unit_rows(vectors[members]), eps)]
    return survivors


def _survivors(vectors: np.ndarray, eps: float) -> np.ndarray:
    """Return the index of the survivor of each vector of a cluster, whose order is that of survival."""
    survivors = np.arange(len(vectors))
    kept = np.zeros(0, np.int64)
    for start in range(0, len(vectors), BLOCK_VECTORS):
        block = vectors[start : start + BLOCK_VECTORS]
        if len(kept):
            cosines = block @ vectors[kept].T
            nearest = cosines.argmax(axis=1)
            is_like = cosines.max(axis=1) > 1 - eps
            survivors[start : start + len(block)][is_like] = kept[nearest[is_like]]
        left = np.flatnonzero(survivors[start : start + len(block)] >= start)
        cosines = block[left] @ block[left].T
        is_kept = np.zeros(len(left), bool)
        for row in range(len(left)):
            before = np.flatnonzero(is_kept[:row])
            near = before[cosines[row, before].argmax()] if len(before) else row
            if near != row and cosines[row, near] > 1 - eps:
                survivors[start + left[row]] = start + left[near]
            else:
                is_kept[row] = True
        kept = np.append(kept, start + left[is_kept])
    return survivors
