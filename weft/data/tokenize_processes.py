"""Processes that tokenize pieces of a source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from weft.data.line_processes import LineProcesses
from weft.data.source_piece import SourcePiece
from weft.plugins import loaded

if TYPE_CHECKING:
    from weft.recipe import Source


class TokenizeProcesses(LineProcesses):
    """Worker processes that tokenize pieces of ``source`` into ``folder``, each one piece at a time.

    ``opening``: ids that begin every document. ``count``: number of processes. Leaving the context ends the processes
    at once.
    """

    def __init__(
        self, folder: Path, source: Source, opening: Sequence[int], count: int
    ) -> None:
        task = {
            "folder": str(folder),
            "source": source.model_dump(mode="json"),
            "opening": [*opening],
            # which may bring the place that the source is read from
            "plugins": sorted(loaded) if "://" in (source.path or "") else [],
        }
        super().__init__("weft.data.tokenize_worker", task, count)

    def tokenize(self, piece: SourcePiece) -> Future[None]:
        """Begin to tokenize ``piece`` when a process is free. Return a future that is done when all its tokens are
        written, and that raises :class:`WeftError` if that fails.
        """
        return self.submit(json.dumps(asdict(piece)), str(piece.files[0]))
