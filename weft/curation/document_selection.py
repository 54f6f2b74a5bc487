"""Selectors: settings of how many documents are kept, and what they say about groups."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from weft.curation.best_documents import kept_count, kept_per_group
from weft.section import Section

#: Groups that are named one by one.
_SHOWN = 12


class SelectionSettings(Section):
    """Settings of how many documents a selector keeps."""

    share: float | None = Field(
        None, ge=0, le=1, description="Share of the documents that is kept."
    )
    number: int | None = Field(
        None, ge=0, description="Number of documents that are kept, in place of share."
    )

    @model_validator(mode="after")
    def _either(self) -> SelectionSettings:
        if (self.share is None) == (self.number is None):
            raise ValueError("give either share or number: how many documents are kept")
        return self

    def count(self, documents: int) -> int:
        """Return how many of ``documents`` are kept."""
        return kept_count(documents, self.share, self.number)


def say_groups(name: str, what: str, groups: np.ndarray, kept: np.ndarray) -> str:
    """Print how many documents of each group are kept, to stderr, and return the line.

    ``name``: name of the operator; ``what``: what the groups are, such as a column; ``groups``: name of each
    document's group; ``kept``: whether each document is kept.
    """
    counts = kept_per_group(groups, kept)
    least = sorted(counts.items(), key=lambda item: (item[1][0], item[0]))
    shown = [f"{group or '(none)'} {some} of {every}" for group, (some, every) in least]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return say(name, f"kept by {what}: {', '.join(shown[:_SHOWN])}{more}")


def say(name: str, line: str) -> str:
    """Print a line of the operator ``name`` to stderr, and return it."""
    line = f"{name}: {line}"
    print(line, file=sys.stderr, flush=True)
    return line


def drop_reasons(kept: Sequence[Any] | np.ndarray, reason: str) -> list[str]:
    """Return "" for documents that are kept, and ``reason`` for the others."""
    return ["" if keep else reason for keep in kept]
