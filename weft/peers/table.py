"""The table of which peer has what: a replicated map that all peers write and merge without conflict.

It is a last-writer-wins map. Every write has a stamp of a hybrid logical clock, greater than all stamps that its writer
has seen. Of two entries for a key the one with the greater stamp stays. Merging takes the maximum per key, so all
tables end up equal in whatever order, however often and by whatever route they are merged.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class Stamp(NamedTuple):
    """Time of a write: milliseconds, a counter within the millisecond, and the writer, so that no two are equal."""

    time: int
    number: int
    writer: str


class Entry(NamedTuple):
    """A value and its stamp. The value None marks a removed entry."""

    stamp: Stamp
    value: Any

    @property
    def rank(self) -> tuple[Stamp, str]:
        """Order of entries: the greater one wins. Values are compared only if a writer has used a stamp twice."""
        return self.stamp, json.dumps(self.value, sort_keys=True)


class SharedTable:
    """The entries that this peer knows, which it merges with those of other peers.

    ``writer``: this peer's name in stamps; ``clock``: returns milliseconds, and need neither be right nor steady.
    """

    def __init__(
        self,
        writer: str,
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.entries: dict[str, Entry] = {}
        self.changes = 0
        self._changed: dict[str, int] = {}
        self._writer, self._clock, self._last = writer, clock, Stamp(0, 0, "")

    def write(self, key: str, value: Any) -> None:
        """Set a key, unless it already has this value."""
        if key not in self.entries or self.entries[key].value != value:
            now, last = self._clock(), self._last
            stamp = (
                Stamp(now, 0, self._writer)
                if now > last.time
                else Stamp(last.time, last.number + 1, self._writer)
            )
            self._put(key, Entry(stamp, value))

    def merge(self, entries: Mapping[str, Entry]) -> None:
        """Replace this table's entries by those of ``entries``, by key, whose stamps are greater, and add new keys."""
        for key, entry in entries.items():
            if key not in self.entries or self.entries[key].rank < entry.rank:
                self._put(key, entry)

    def since(self, changes: int) -> dict[str, Entry]:
        """Return the entries, by key, that this table has added or replaced after its first ``changes`` changes."""
        return {
            key: self.entries[key] for key, at in self._changed.items() if at > changes
        }

    def under(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """Yield the rest of each key that begins with ``prefix``, and the value. Removed entries are left out."""
        for key, entry in self.entries.items():
            if key.startswith(prefix) and entry.value is not None:
                yield key[len(prefix) :], entry.value

    def _put(self, key: str, entry: Entry) -> None:
        self.changes += 1
        self.entries[key], self._changed[key] = entry, self.changes
        self._last = max(self._last, entry.stamp)


def entries_to_json(entries: Mapping[str, Entry]) -> dict[str, Any]:
    return {key: [*entry.stamp, entry.value] for key, entry in entries.items()}


def entries_from_json(data: Any) -> dict[str, Entry]:
    """Parse entries that another peer has sent. Raises :class:`ValueError` if they are malformed."""
    entries = {}
    for key, (time_, number, writer, value) in dict(data).items():
        kinds = (
            isinstance(key, str),
            isinstance(time_, int),
            isinstance(number, int),
            isinstance(writer, str),
        )
        if not all(kinds):
            raise ValueError("an entry's key or stamp is malformed")
        entries[key] = Entry(Stamp(time_, number, writer), value)
    return entries
