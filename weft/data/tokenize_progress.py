"""Show the progress of a tokenization on the standard error: files, bytes per second, and the time that is left."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from weft.data.source_piece import SourcePiece

#: Seconds before the first line, and between lines in a terminal and in a file.
FIRST, TERMINAL, FILE = 2.0, 0.5, 15.0


class TokenizeProgress:
    """Progress line of a tokenization. A terminal shows one line that is rewritten; other outputs get a new line each
    time.

    ``name``: what the line calls the source. ``files``: number of its files. ``size``: bytes of its files.
    """

    every = TERMINAL

    def __init__(self, name: str, files: int, size: int) -> None:
        self.name, self.size = name, size
        self.number, self.total = 0, files
        self.done = self.skipped = 0
        self._last_file = ""
        self._begun = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = self._begun + FIRST
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the last line, if any line has been written."""
        if self._shown:
            self._write(0, "\n")

    def skip(self, piece: SourcePiece) -> None:
        """Count a piece that an earlier run has tokenized already."""
        self.skipped += piece.size
        self._count(piece)

    def add(self, piece: SourcePiece) -> None:
        """Count a piece that is done, and show the progress."""
        self._count(piece)
        self.show()

    def _count(self, piece: SourcePiece) -> None:
        self.done += piece.size
        for stamp in piece.stamps:
            self.number += stamp.file != self._last_file
            self._last_file = stamp.file

    def show(self, ahead: int = 0) -> None:
        """Write the progress line, if enough time has passed since the last one.

        ``ahead``: bytes that are tokenized but not counted by :meth:`add` yet.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (TERMINAL if self._terminal else FILE)
        self._write(ahead, "" if self._terminal else "\n")
        self._shown = True

    def _write(self, ahead: int, end: str) -> None:
        line = self.line(time.monotonic() - self._begun, ahead)
        sys.stderr.write(("\r\x1b[K" if self._terminal else "") + line + end)
        sys.stderr.flush()

    def line(self, seconds: float, ahead: int = 0) -> str:
        """Return the text of the progress line after ``seconds`` of work. ``ahead``: as for :meth:`show`."""
        done = self.done + ahead
        rate = (done - self.skipped) / max(seconds, 1e-9)
        left = max(0, self.size - done)
        rest = f", {_clock(left / rate)} left" if rate and left else ""
        again = f" ({self.skipped / 1e6:,.0f} MB done before)" if self.skipped else ""
        return (
            f"weft: {self.name}: tokenized {done / 1e6:,.0f} of {self.size / 1e6:,.0f} MB{again}, "
            f"file {self.number:,} of {self.total:,}, {rate / 1e6:.1f} MB/s{rest}"
        )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
