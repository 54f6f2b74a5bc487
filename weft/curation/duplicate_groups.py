"""Groups of documents that are duplicates of each other, and which document of a group is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from weft.curation.column_values import number_column
from weft.curation.data_operators import Decision
from weft.curation.documents import Documents
from weft.section import Section


class SurvivorSettings(Section):
    """Settings that decide which document of a group of duplicates is kept."""

    keep: Literal["longest", "first", "best"] = Field(
        "longest",
        description=(
            "Which document of a group of duplicates is kept: the longest, the first by id, or the "
            "one with the highest value of the column 'score'. Equals are decided by id."
        ),
    )
    score: str = Field(
        "",
        description="Column whose highest value decides, with keep = 'best', which document is kept.",
    )

    @model_validator(mode="after")
    def _score_is_named(self) -> SurvivorSettings:
        if (self.keep == "best") != bool(self.score):
            raise ValueError(
                "keep = 'best' and score go together: name the column of the score"
            )
        return self


def survivor_scores(documents: Documents, settings: SurvivorSettings) -> np.ndarray:
    """Return a score for each document, float64 ``[documents]``. Of a group of duplicates the document with the highest
    score survives. ``settings``: say whether the score is the length, the order, or a column.

    A document without a score has -inf. Raises the errors of :func:`weft.curation.column_values.number_column`.
    """
    if settings.keep == "first":
        return np.zeros(len(documents))
    if settings.keep == "longest":
        return np.fromiter(map(len, documents.texts), np.float64, len(documents))
    scores = number_column(documents, settings.score, "score")
    return np.where(np.isnan(scores), -np.inf, scores)


def equal_neighbours(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of indices ``(left, right)`` of equal keys, which connect all indices with the same key to a chain.

    ``keys``: one value for each index, ``[n]``, or a row of values, ``[n, values]``.
    """
    columns = keys if keys.ndim > 1 else keys[:, None]
    order = np.lexsort(columns.T)
    in_order = columns[order]
    same = (in_order[1:] == in_order[:-1]).all(axis=1)
    return order[:-1][same], order[1:][same]


def connected_groups(count: int, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the group of each of ``count`` documents, int64 ``[count]``. The smallest index in a group is its number.

    ``left`` and ``right``: indices of the documents of each pair of duplicates. Groups are the connected components.
    """
    labels = np.arange(count)
    while len(left):
        ends = labels[left], labels[right]
        apart = ends[0] != ends[1]
        left, right = left[apart], right[apart]
        low = np.minimum(*ends)[apart]
        high = np.maximum(*ends)[apart]
        np.minimum.at(labels, high, low)
        while True:  # until every label is a root
            roots = labels[labels]
            if np.array_equal(roots, labels):
                break
            labels = roots
    return labels


def choose_survivors(
    groups: np.ndarray, scores: np.ndarray, ids: Sequence[str]
) -> np.ndarray:
    """Return, for each document, the index of the document that is kept of its group, int64 ``[documents]``.

    A group keeps the document with the highest score; of equal scores, the first by id. ``groups``: number of each
    document's group, ``[documents]``; ``scores``: ``[documents]``.
    """
    order = np.lexsort((id_ranks(ids), -scores, groups))
    is_first = np.diff(groups[order], prepend=-1) != 0
    survivors = np.empty(len(groups), np.int64)
    survivors[order] = order[is_first][np.cumsum(is_first) - 1]
    return survivors


def id_ranks(ids: Sequence[str]) -> np.ndarray:
    """Return the rank of each of ``ids`` in the sorted order of all: 0 for the first, in the order of ``ids``,
    ``[ids]``.
    """
    ranks = np.empty(len(ids), np.int64)
    ranks[sorted(range(len(ids)), key=ids.__getitem__)] = np.arange(len(ids))
    return ranks


def survivor_decisions(
    ids: Sequence[Sequence[str]], survivors: np.ndarray, word: str, copies: str
) -> list[Decision]:
    """Return the decisions that drop all documents but the survivors, one for each shard.

    The decisions add two columns. ``duplicate_of`` is the id of the survivor, "" for survivors. The column with the
    name ``copies`` is the number of documents in the document's group.

    ``ids``: ids of the documents of every shard. ``survivors``: index, over all shards, of the survivor of each
    document. ``word``: word for duplicates in the reasons.
    """
    names = flat_ids(ids)
    sizes = np.bincount(survivors, minlength=len(names))[survivors].tolist()
    is_kept = survivors == np.arange(len(names))
    of = [
        "" if kept else names[survivor]
        for kept, survivor in zip(is_kept, survivors, strict=True)
    ]
    # kinds of reasons are counted by what stands before ": "
    reasons = [f"{word} of another document: {name}" if name else "" for name in of]
    columns = {"duplicate_of": of, copies: sizes}
    return split_decisions(ids, columns, reasons)


def split_decisions(
    ids: Sequence[Sequence[str]],
    columns: Mapping[str, list[Any]],
    reasons: Sequence[str],
) -> list[Decision]:
    """Split columns and reasons, which hold the documents of all shards one after another, into one decision per shard.

    ``ids``: ids of the documents of every shard, which give the shards' sizes. ``reasons``: why each document is
    dropped; "" if it is kept.
    """
    edges = np.cumsum([0, *map(len, ids)]).tolist()
    return [
        Decision(
            {name: values[start:end] for name, values in columns.items()},
            list(reasons[start:end]),
        )
        for start, end in pairwise(edges)
    ]


def flat_ids(ids: Sequence[Sequence[str]]) -> list[str]:
    """Return the ids of all shards as one list, in the order of the shards. ``ids``: ids of the documents of every
    shard.
    """
    return [name for shard in ids for name in shard]


def joined_summaries(
    summaries: Sequence[Mapping[str, np.ndarray]], name: str
) -> np.ndarray:
    """Return the array ``name`` of all shards, joined in the order of the shards. ``summaries``: the arrays of each
    shard by name.
    """
    return np.concatenate([summary[name] for summary in summaries])
