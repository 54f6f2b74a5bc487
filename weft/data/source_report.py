"""Report on a source that was read: unread files and fields, and skipped records."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Names that a line lists at most.
_LISTED = 8


@dataclass
class SourceReport:
    """Counts of the records of a source, from which lines for the user are made.

    Attributes:
        ``records``: number of records that were read.
        ``unread``: number of records by name of a field that Weft does not use.
        ``left``: files, or splits of a data set, that are not read.
        ``skipped``: number of records that could not be read.
        ``first``: error of the first skipped record.
        ``empty``: number of records without text.
        ``turns``: number of turns, by role, that the data marks as learned although the recipe does not learn from
            them.
    """

    records: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    left: tuple[Path, ...] = ()
    skipped: int = 0
    first: str = ""
    empty: int = 0
    turns: Counter[str] = field(default_factory=Counter)

    def count(self, unread: Iterable[str]) -> None:
        """Count one record; ``unread`` are the names of its fields that Weft does not use."""
        self.records += 1
        self.unread.update(set(unread))

    def skip(self, error: object) -> None:
        """Count one more record that is skipped because of ``error``. The report shows the first such error."""
        self.skipped += 1
        self.first = self.first or str(error)

    def skip_counted(self, error: object) -> None:
        """Count the last record as skipped because of ``error``, after :meth:`count` has counted it as read."""
        self.records -= 1
        self.skip(error)

    def add(self, values: Mapping[str, Any]) -> None:
        """Add the counts of a report on a later part of the source. ``values``: the fields of that report by name."""
        self.records += values["records"]
        self.skipped += values["skipped"]
        self.empty += values["empty"]
        self.first = self.first or values["first"]
        self.unread.update(values["unread"])
        self.turns.update(values["turns"])

    def leave_out(self, read: Callable[[str], bool]) -> None:
        """Remove from :attr:`unread` the fields that the chat template uses. ``read``: returns, for a field's name,
        whether the template uses it.
        """
        self.unread = Counter(
            {name: count for name, count in self.unread.items() if not read(name)}
        )

    def lines(self) -> tuple[str, ...]:
        """Return the report as lines of text for the user."""
        lines = []
        if self.skipped:
            total = self.skipped + self.records
            lines.append(
                f"{self.skipped:,} of {total:,} records left out, as data.on_error = 'skip'; the first: {self.first}"
            )
        if self.unread:
            listed = [
                f"{name} ({count:,})"
                for name, count in self.unread.most_common(_LISTED)
            ]
            lines.append(
                f"fields that are not read, with how many records have them: {_joined(listed, self.unread)}"
            )
        if self.empty:
            lines.append(f"{self.empty:,} records without a text left out")
        if self.left:
            lines.append(
                f"files that are not read: {_joined([file.name for file in self.left[:_LISTED]], self.left)}"
            )
        if self.turns:
            said = ", ".join(
                f"{count:,} of the {role}'s" for role, count in self.turns.most_common()
            )
            lines.append(
                f"turns that it marks as learned and data.chat.learn leaves out: {said}"
            )
        return tuple(lines)


def _joined(listed: list[str], every: object) -> str:
    more = len(every) - len(listed)  # type: ignore[arg-type]
    return ", ".join(listed) + (f" and {more:,} more" if more > 0 else "")
