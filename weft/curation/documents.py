"""Documents of a shard, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Documents:
    """Documents of one shard, held as columns of equal length.

    Attributes:
        ``ids``: name of each document, unique in the pipeline, such as "stdlib:json/decoder.py".
        ``texts``: text of each document.
        ``columns``: further values of each document by name of the column. A value is a number, a text, a boolean, a
            list of these, or None.
    """

    ids: list[str]
    texts: list[str]
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, indices: Sequence[int]) -> Documents:
        """Return a new shard with the documents at the ``indices`` of this one, in the order of ``indices``."""
        return Documents(
            [self.ids[i] for i in indices],
            [self.texts[i] for i in indices],
            {
                name: [values[i] for i in indices]
                for name, values in self.columns.items()
            },
        )

    def with_columns(self, columns: dict[str, list[Any]]) -> Documents:
        """Return the same documents with more columns. A column of the same name is replaced."""
        return replace(self, columns=self.columns | columns)
