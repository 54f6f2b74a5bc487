"""The record of all that happened at a server: a file in the run's folder that a virtual clock can follow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from weft.errors import WeftError
from weft.federated.virtual_clock import FederationEvent
from weft.federated.written_file import writing_file

#: The file, with an event as a line of JSON.
EVENTS_FILE = "federation.jsonl"


class EventLog:
    """Appends a server's events to a file in ``folder``.

    ``keep``: number of bytes to keep of the file that an earlier process has written; events after them are deleted.
    """

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self.path = folder / EVENTS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        if self._file.tell() < keep:
            raise WeftError(
                f"{self.path} has lost events that the checkpoint knows of; train on from the checkpoint as a new run"
            )
        self._file.truncate(keep)

    @property
    def size(self) -> int:
        """Size of the file of events in bytes, after the last event."""
        return self._file.seek(0, 2)

    def write(self, event: FederationEvent) -> None:
        """Append ``event`` to the file as a line, and flush the file, so that a crash loses no event."""
        with writing_file(self.path):
            self._file.write(json.dumps(asdict(event)).encode() + b"\n")
            self._file.flush()

    def cut(self, keep: int) -> None:
        """Delete all but the first ``keep`` bytes of the file of events."""
        self._file.truncate(keep)

    def close(self) -> None:
        """Close the file of events."""
        with writing_file(self.path):
            self._file.close()


def read_events(folder: Path) -> Iterator[FederationEvent]:
    """Yield the events of the run in ``folder``. Raises :class:`WeftError` if there are none or one is damaged."""
    path = folder / EVENTS_FILE
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise WeftError(
            f"cannot read {path}: {error.strerror}; a server of federated training writes it"
        ) from None
    for number, line in enumerate(lines, 1):
        try:
            yield FederationEvent(**json.loads(line))
        except (ValueError, TypeError):
            raise WeftError(f"line {number} of {path} is no event") from None
