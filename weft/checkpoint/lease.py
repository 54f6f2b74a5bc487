"""Lease of a run's folder or of a place with its checkpoints, so that only one run at a time uses it.

A run that uses a place has an object under ``lease/`` there, and replaces it by a new one every few seconds. Whoever
wants the place creates its own object first and looks for others afterwards, so that of two runs that come at the same
time at least one sees the other. Whether the holder of an object is alive is known at once if it is a process of this
machine; a holder elsewhere is alive as long as it renews its object. Objects are created and deleted, never changed,
as storage has only immutable ones.
"""

import hashlib
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from weft.checkpoint.storage import LocalStorage, Storage, StorageError
from weft.errors import WeftError
from weft.net.process import look_at, machine_id, started_at

FOLDER = "lease"

#: Seconds between two renewals, and seconds without one after which a holder elsewhere is taken to be dead.
BEAT, PATIENCE = 10.0, 60.0


class PlaceInUse(WeftError):
    """Error of leasing a run's folder or a checkpoint storage that another living run uses."""


class Lease:
    """Lease of a run's storages (its folder, and where it keeps checkpoints), so that no other run uses them.

    A thread renews a small object in each leased storage until :meth:`close`. ``beat``: seconds between two renewals;
    ``patience``: seconds without a renewal after which a lease of another machine counts as abandoned; ``run``: secret
    that the ranks of one run share. A rank takes over a lease of another rank of its own run at once. The attribute
    ``lost`` is an error message once another run has taken over a leased storage, and empty before.
    """

    def __init__(
        self, beat: float = BEAT, patience: float = PATIENCE, run: str = ""
    ) -> None:
        self.beat, self.patience, self.lost = beat, patience, ""
        pid = os.getpid()
        self._run = hashlib.sha256(run.encode()).hexdigest()[:16] if run else ""
        about = {
            "machine": machine_id("pid"),
            "host": platform.node(),
            "pid": pid,
            "started": started_at(pid),
        }
        self._about = json.dumps(about | {"run": self._run}).encode()
        self._held: dict[Storage, str] = {}  # the name of the object in each place
        self._new_folders: list[Path] = []  # folders that were not there before
        self._renewed, self._renewing, self._end = (
            time.monotonic(),
            threading.Lock(),
            threading.Event(),
        )
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def take(self, places: Sequence[Storage], new: bool = False) -> None:
        """Lease all storages in ``places``, or none of them if one cannot be leased, and start to renew the leases.

        ``new``: the first storage must not exist yet. Raises :class:`PlaceInUse` if another living run has leased a
        storage, :class:`StorageError` if a folder cannot be created, and with ``new`` :class:`FileExistsError` if the
        first exists.
        """
        try:
            for number, place in enumerate(dict.fromkeys(places)):
                self._take(place, new and not number)
        except BaseException:
            self.close()
            raise
        self._end.clear()
        self._thread = threading.Thread(
            target=self._live, name="weft-lease", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise :class:`WeftError` if another run has leased one of this run's storages in the meantime.

        That can happen if this process was stopped for longer than the lease's ``patience``, so that the lease was not
        renewed.
        """
        # stopped as a whole until now
        if self._held and time.monotonic() > self._renewed + self.patience:
            self._renew_all()
        if self.lost:
            raise WeftError(self.lost)

    def close(self) -> None:
        """Give up all leases, and remove those folders that :meth:`take` created if they are empty."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(5)
        for place, name in self._held.items():
            with suppress(StorageError):  # then it ends with this process
                place.delete([name])
        for folder in reversed(self._new_folders):
            with suppress(OSError):  # not empty
                folder.rmdir()
        self._held, self._new_folders, self._thread = {}, [], None

    def _take(self, place: Storage, new: bool) -> None:
        if isinstance(place, LocalStorage):
            self._make(place.root.absolute(), new)
        name = self._held[place] = _create(
            place, f"{secrets.token_hex(6)}-000001", self._about
        )
        for other in _leases(place).values():
            if other == name:
                continue
            if not self._is_kin(place, other) and (
                about := _living(place, other, self.beat, self.patience)
            ):
                raise PlaceInUse(
                    f"{place} is in use by {about}; stop that run or wait for its end, or choose another place"
                )
            place.delete([other])

    def _is_kin(self, place: Storage, name: str) -> bool:
        """Return whether the holder of an object is, or was, another rank of this run."""
        return bool(self._run) and _holder(place, name).get("run") == self._run

    def _make(self, folder: Path, new: bool) -> None:
        """Make a folder, and note what of the path to it was made here: another run's is not ours to remove."""
        missing = [p for p in reversed(folder.parents) if not p.exists()]
        for path in [*missing, folder]:
            try:
                path.mkdir()
                self._new_folders.append(path)
            except FileExistsError as error:
                if not path.is_dir():
                    raise StorageError(
                        f"cannot make {folder}: {path} is not a folder"
                    ) from error
                if new and path == folder:
                    raise
            except OSError as error:
                raise StorageError(
                    f"cannot make {folder}: {error.strerror or error}"
                ) from None

    def _live(self) -> None:
        while not self._end.wait(self.beat):
            self._renew_all()

    def _renew_all(self) -> None:
        with self._renewing:
            for place in list(self._held):
                # of a moment, or a full disk: it is tried again
                with suppress(StorageError):
                    self._renew(place)
            self._renewed = time.monotonic()

    def _renew(self, place: Storage) -> None:
        old = self._held[place]
        token, _, number = old.removeprefix(f"{FOLDER}/").partition("-")
        if not place.holds(old) and (others := _leases(place)):
            other = _words(_holder(place, next(iter(others.values()))))
            self.lost = f"{place} was taken over by another run ({other}), so that this one has to end"
            return
        self._held[place] = _create(
            place, f"{token}-{int(number) + 1:06d}", self._about
        )
        place.delete([old])


def _create(place: Storage, name: str, data: bytes) -> str:
    """Create an object under ``lease/`` and return its full name."""
    path = f"{FOLDER}/{name}"
    try:
        place.create(path, data)
    except StorageError:  # another run may just have removed the empty folder
        place.create(path, data)
    return path


def _leases(place: Storage) -> dict[str, str]:
    """Return the name of every holder's newest object, by the holder's token.

    The place is listed twice: a listing during a renewal may contain neither the old nor the new object.
    """
    names = {*place.list(f"{FOLDER}/"), *place.list(f"{FOLDER}/")}
    return {name.partition("-")[0]: name for name in sorted(names)}


def _living(place: Storage, name: str, beat: float, patience: float) -> str:
    """Who the holder of an object is, in words, if it is alive, else an empty string.

    For a holder on another machine this waits up to ``patience`` seconds for the next renewal.
    """
    about = _holder(place, name)
    words = _words(about)
    if about.get("machine") == machine_id("pid"):
        return (
            words
            if look_at(about["pid"], float(about["started"])).state != "gone"
            else ""
        )
    deadline, holder = time.monotonic() + patience, name.partition("-")[0]
    while (now := _leases(place).get(holder)) == name:
        if time.monotonic() > deadline:
            return ""
        time.sleep(min(1.0, beat / 4))
    return words if now is not None else ""


def _holder(place: Storage, name: str) -> dict[str, Any]:
    """Return what an object says of its holder; nothing if it was just renewed, or was not written by Weft."""
    try:
        about = json.loads(place.read(name))
        return about if about.keys() >= {"machine", "host", "pid", "started"} else {}
    except (StorageError, ValueError, AttributeError):
        return {}


def _words(holder: dict[str, Any]) -> str:
    return f"process {holder['pid']} on {holder['host']}" if holder else "another run"
