"""Texts that a generator has written, kept on disk by what they depend on, so that none is written twice."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from weft.errors import WeftError, why_unwritten

#: Seconds that a process waits for others that write.
PATIENCE_S = 60.0
#: Most keys of a query.
_MANY = 500


class KeptText(NamedTuple):
    """A text that was written before, and whether it was cut off at the largest number of tokens."""

    text: str
    cut: bool


class TextStore:
    """Generated texts by key in a file in ``folder``, which several processes of this host may read and write.

    A text is on disk as soon as :meth:`put` returns, even if the process is killed afterwards. Raises
    :class:`WeftError` if the file cannot be written, or is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "texts.sqlite"
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                self.file, timeout=PATIENCE_S, isolation_level=None
            )
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS texts (key BLOB PRIMARY KEY, text TEXT, cut INTEGER) WITHOUT ROWID"
            )

    def get(self, keys: Iterable[bytes]) -> dict[bytes, KeptText]:
        """Return the stored texts of ``keys``, by key; keys without a stored text are left out."""
        wanted, kept = list(keys), dict[bytes, KeptText]()
        with self._explained():
            for begin in range(0, len(wanted), _MANY):
                part = wanted[begin : begin + _MANY]
                marks = ",".join("?" * len(part))
                rows = self._database.execute(
                    f"SELECT key, text, cut FROM texts WHERE key IN ({marks})", part
                )
                kept |= {key: KeptText(text, bool(cut)) for key, text, cut in rows}
        return kept

    def put(self, key: bytes, text: str, cut: bool) -> None:
        """Store a text under ``key``. If there is a text under ``key`` already, nothing is changed.

        ``cut``: whether the text was cut off at the largest number of tokens.
        """
        with self._explained():
            self._database.execute(
                "INSERT OR IGNORE INTO texts VALUES (?, ?, ?)", (key, text, cut)
            )

    def close(self) -> None:
        """Close the file; the store cannot be used any more."""
        self._database.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise WeftError(
                f"{self.file} cannot be used: {error}; set cache to a folder on a local disk with room, or remove the "
                "file if it is damaged"
            ) from None
        except OSError as error:
            raise WeftError(
                f"{self.file} cannot be written: {why_unwritten(error, 'set cache to another folder')}"
            ) from None
