"""Selectors: settings of how many documents are kept, and what they say about groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from weft.curation.best_documents import kept_count, kept_per_group
from weft.section import Section

#: Groups that are named one by one.
_SHOWN = 12


class SelectionSettings(Section):
    """Settings that say how many documents a selector keeps: a share of all documents, or a number."""

    share: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of the documents that is kept, from 0 to 1. Set either this or 'number'.",
    )
    number: int | None = Field(
        None,
        ge=0,
        description="Number of documents that are kept. Set either this or 'share'.",
    )

    @model_validator(mode="after")
    def _either(self) -> SelectionSettings:
        if (self.share is None) == (self.number is None):
            raise ValueError("give either share or number: how many documents are kept")
        return self

    def count(self, documents: int) -> int:
        """Return how many of ``documents`` documents are kept by these settings."""
        return kept_count(documents, self.share, self.number)


def kept_line(what: str, groups: np.ndarray, kept: np.ndarray) -> str:
    """Return a line for the user about how many documents of each group are kept.

    ``what``: name of the grouping in the line, such as a column's name. ``groups``: name of each document's group;
    ``kept``: whether each document is kept; both ``[documents]``.
    """
    counts = kept_per_group(groups, kept)
    least = sorted(counts.items(), key=lambda item: (item[1][0], item[0]))
    shown = [f"{group or '(none)'} {some} of {every}" for group, (some, every) in least]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return f"kept by {what}: {', '.join(shown[:_SHOWN])}{more}"


def drop_reasons(
    kept: Sequence[Any] | np.ndarray, reason: str, known: np.ndarray | None = None
) -> list[str]:
    """Return for each document why it is dropped: ``reason``, or "" if it is kept.

    ``known``: whether each document has a vector; without one, the reason is "no vector". None: all have one.
    """
    if known is None:
        known = np.ones(len(kept), bool)
    return [
        "" if keep else reason if has else "no vector"
        for keep, has in zip(kept, known, strict=True)
    ]
