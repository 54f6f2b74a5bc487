"""Choose the best documents by a score, with a floor for each group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

from weft.curation.duplicate_groups import id_ranks
from weft.errors import UsageError

#: Which end of the scores is kept.
Keep = Literal["high", "low", "random"]


def kept_count(documents: int, share: float | None, number: int | None) -> int:
    """Return how many of ``documents`` documents a selector keeps, at most all.

    ``share``: share of the documents to keep, rounded to the nearest whole number, halves up. ``number``: number to
    keep, used if ``share`` is None.
    """
    wanted = int(share * documents + 0.5) if share is not None else number or 0
    return min(wanted, documents)


def score_order(
    scores: np.ndarray, ids: Sequence[str], keep: Keep, seed: int = 0
) -> np.ndarray:
    """Return the indices of all documents in order of preference, the first to keep first, int64 ``[documents]``.

    ``scores``: float64 ``[documents]``; documents without a score (NaN) come last. ``keep``: "high" or "low" scores
    first, or "random" for an order that depends on ``seed`` and the ids only. Documents with equal scores are sorted by
    id.
    """
    ranks = id_ranks(ids)
    if keep == "random":
        drawn = [_drawn(name, seed) for name in ids]
        return np.lexsort((ranks, np.array(drawn, np.uint64)))
    missing = np.isnan(scores)
    key = np.where(missing, 0, -scores if keep == "high" else scores)
    return np.lexsort((ranks, key, missing))


def _drawn(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def choose_best(
    order: np.ndarray, count: int, groups: np.ndarray | None = None, floor: int = 0
) -> np.ndarray:
    """Return which documents are kept, bool ``[documents]``.

    Each group first keeps its best documents up to the floor, or all that it has. The rest of ``count`` is filled with
    the best of all remaining documents.

    ``order``: indices of the documents, the best first. ``groups``: name of each document's group, ``[documents]``;
    None: the documents form no groups. ``floor``: fewest documents of a group. Raises :class:`UsageError` if the floors
    alone are more than ``count``.
    """
    kept = np.zeros(len(order), bool)
    if groups is not None and floor:
        kept[order[_places(groups[order]) < floor]] = True
    if (least := int(kept.sum())) > count:
        raise UsageError(
            f"steps.floor = {floor}: the groups' floors are {least} documents, and {count} are kept; lower the floor "
            "or keep more"
        )
    others = order[~kept[order]]
    kept[others[: count - least]] = True
    return kept


def _places(groups: np.ndarray) -> np.ndarray:
    """Return for each element how many elements of its group stand before it."""
    order = np.argsort(groups, kind="stable")
    in_order = groups[order]
    starts = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])
    sizes = np.diff(np.r_[starts, len(groups)])
    places = np.empty(len(groups), np.int64)
    places[order] = np.arange(len(groups)) - np.repeat(starts, sizes)
    return places


def kept_per_group(groups: np.ndarray, kept: np.ndarray) -> dict[str, tuple[int, int]]:
    """Return for each group ``(kept, all)``: how many of its documents are kept, and how many it has.

    ``groups``: name of each document's group; ``kept``: whether each document is kept; both ``[documents]``.
    """
    return {
        str(name): (int(kept[groups == name].sum()), int((groups == name).sum()))
        for name in np.unique(groups)
    }
