"""Limits on columns of documents: why a document is dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Limit(NamedTuple):
    """Range that a column's values must lie in.

    ``column``: name of the column. ``noun``: word for its values in reasons, such as "words". ``least``, ``most``: the
    smallest and the largest value that is kept; None for no limit.
    """

    column: str
    noun: str
    least: float | None = None
    most: float | None = None

    def reason(self, value: Any) -> str:
        """Return why a document with this value is dropped, or "" if it is kept.

        A missing value is dropped, as a document without it cannot be judged.
        """
        if self.least is None and self.most is None:
            return ""
        if value is None or value != value:  # NaN
            return f"no {self.noun}"
        if self.least is not None and value < self.least:
            return f"{self.noun} below {self.least:g}"
        if self.most is not None and value > self.most:
            return f"{self.noun} above {self.most:g}"
        return ""


def limit_reasons(
    limits: Sequence[Limit], columns: Mapping[str, Sequence[Any]]
) -> list[str]:
    """Return for each document why it is dropped, by the first of ``limits`` that it violates; "" if it violates none.

    ``columns``: values of the documents by name of the column.
    """
    rows = zip(*(columns[limit.column] for limit in limits), strict=True)
    return [_first_reason(limits, row) for row in rows]


def _first_reason(limits: Sequence[Limit], row: Sequence[Any]) -> str:
    for limit, value in zip(limits, row, strict=True):
        if reason := limit.reason(value):
            return reason
    return ""


def transposed(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return columns, a list of values for each name, from ``rows``, a dictionary of values for each document.

    All rows must have the same names.
    """
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
