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
    """Time of a write to a shared table. No two writes have equal stamps.

    ``time``: milliseconds by the clock of the peer that has written. ``number``: counter of that peer's writes within
    the millisecond. ``writer``: public key of that peer.
    """

    time: int
    number: int
    writer: str


class Entry(NamedTuple):
    """Value of a key in a shared table, with the stamp of its write. The value None marks a removed key."""

    stamp: Stamp
    value: Any

    @property
    def rank(self) -> tuple[Stamp, str]:
        """Sort key of this entry among entries for the same key of the table. The entry with the greatest sort key is
        kept.

        The stamp decides. Values are compared only if a writer has used a stamp twice.
        """
        return self.stamp, json.dumps(self.value, sort_keys=True)


class SharedTable:
    """Table of keys and values that all peers write, and merge with the tables of other peers.

    Each write gets a stamp: a time, a number and the writer's name. If two tables have different values for a key, the
    one with the newer stamp stays.

    Attributes:
        ``entries``: the value and stamp of each key.
        ``changes``: number of changes so far.

    Args:
        ``writer``: name of this peer in its stamps.
        ``clock``: function that returns milliseconds; the clocks of peers may differ and jump.
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
        """Set ``key`` to ``value`` (JSON), unless it has this value already. The value None removes the key."""
        if key not in self.entries or self.entries[key].value != value:
            now, last = self._clock(), self._last
            stamp = (
                Stamp(now, 0, self._writer)
                if now > last.time
                else Stamp(last.time, last.number + 1, self._writer)
            )
            self._put(key, Entry(stamp, value))

    def merge(self, entries: Mapping[str, Entry]) -> None:
        """Take over the given ``entries``, by key, that are newer than this table's entries, or whose keys are new."""
        for key, entry in entries.items():
            if key not in self.entries or self.entries[key].rank < entry.rank:
                self._put(key, entry)

    def since(self, changes: int) -> dict[str, Entry]:
        """Return the entries, by key, that were added or replaced after the first ``changes`` changes of this table."""
        return {
            key: self.entries[key] for key, at in self._changed.items() if at > changes
        }

    def under(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """Yield each present key that begins with ``prefix``, without the prefix, and its value."""
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
    """Parse entries of a shared table that another peer has sent as the JSON value ``data``.

    Returns the entries by key. Raises :class:`ValueError` if they are malformed.
    """
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
