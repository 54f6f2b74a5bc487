"""Updates that a server has taken and that no checkpoint holds yet: written before clients hear that they were taken.

A client that hears it forgets what it would need to send the update again: what compression has left out, and its
control variate before the work. A server that is killed then would go back to a checkpoint without the update, and
disagree with its clients for ever. With the journal it follows the events since the checkpoint once more.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from weft.errors import WeftError
from weft.federated.federation_events import EVENTS_FILE
from weft.federated.plain_tensors import load_values, save_values
from weft.federated.policy import ClientUpdate, update_state
from weft.federated.virtual_clock import FederationEvent

#: Folder in the run's folder with the updates, each under the place of its event in the record of events.
JOURNAL = "federation/taken"


class TakenUpdate(NamedTuple):
    """An update that a policy has accepted, as the journal stores it.

    ``update``: the update as the policy gets it. ``loss``: mean loss of its steps. ``began``: time at which its work
    began. ``token``: token of its work order.
    """

    update: ClientUpdate
    loss: float
    began: float
    token: str


class FollowedEvent(NamedTuple):
    """An event since the last checkpoint, which a restarted server repeats.

    ``taken``: the update that arrived with the event; None if it brought no accepted update. ``begin`` and ``end``:
    position of the event in the record of events, in bytes.
    """

    event: FederationEvent
    taken: TakenUpdate | None
    begin: int
    end: int


@dataclass(frozen=True)
class UpdateJournal:
    """Files with accepted updates in the ``folder`` of a run, so that a restarted server need not have them computed
    again.
    """

    folder: Path

    def write(self, place: int, taken: TakenUpdate) -> None:
        """Store the accepted update ``taken``.

        ``place``: position of its event in the record of events, in bytes.
        """
        values = taken._asdict() | {"update": update_state(taken.update)}
        save_values(self._file(place), values)

    def forget(self, before: int) -> None:
        """Delete the updates of events before the position ``before`` (in bytes) in the record of events."""
        for path in (self.folder / JOURNAL).glob("*.safetensors"):
            with suppress(ValueError, FileNotFoundError):
                if int(path.stem) < before:
                    path.unlink()

    def since(self, place: int) -> list[FollowedEvent]:
        """Return the recorded events from the position ``place`` (in bytes) on.

        The list ends before the first event whose update is not stored.
        """
        events = list[FollowedEvent]()
        try:
            text = (self.folder / EVENTS_FILE).read_bytes()[place:]
        except OSError:
            return events
        for line in text.splitlines(keepends=True):
            try:
                event = FederationEvent(**json.loads(line))
            except (ValueError, TypeError):
                break  # written in part
            taken = None
            if event.kind == "update" and event.accepted:
                try:
                    taken = self._read(place)
                except WeftError:
                    break
            events.append(FollowedEvent(event, taken, place, place + len(line)))
            place += len(line)
        return events

    def _file(self, place: int) -> Path:
        return self.folder / JOURNAL / f"{place}.safetensors"

    def _read(self, place: int) -> TakenUpdate:
        values = load_values(self._file(place))
        return TakenUpdate(**values | {"update": ClientUpdate(**values["update"])})
