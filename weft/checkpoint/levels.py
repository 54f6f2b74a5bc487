"""Levels of a run: the places where it keeps checkpoints, each with its interval of steps and number to keep."""

import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil
import torch.distributed as dist

from weft.checkpoint.address import open_storage
from weft.checkpoint.storage import LocalStorage, Storage, StorageError
from weft.checkpoint.store import (
    PLACES,
    checkpoint_places,
    committed_checkpoints,
    first_problem,
    new_name,
    prune,
    step_of,
)
from weft.errors import UsageError, WeftError
from weft.layout.mesh import from_all
from weft.paths import home_path, real_path
from weft.recipe import MEMORY, Checkpoint

#: Where the kernel keeps files in memory.
SHM = Path("/dev/shm")
#: Seconds after which what one host has written must be seen by the others.
VISIBLE_S = 5.0


@dataclass
class LevelStore:
    """Level of a run: a storage that gets a checkpoint at an interval of its own.

    Attributes:
        ``place``: storage that holds the level's checkpoints.
        ``every``: number of steps between two checkpoints; 0: none are due.
        ``keep``: number of newest checkpoints that are kept.
        ``in_memory``: whether the storage is a tmpfs of this host.
        ``taken``: names of the checkpoints in the storage, so that a save need not list them.
        ``last``: storage of the newest checkpoint; None if there is none.
        ``step``: step of the newest checkpoint; -1 if there is none.
    """

    place: Storage
    every: int
    keep: int
    in_memory: bool = False
    taken: set[str] = field(default_factory=set)
    last: Storage | None = None
    step: int = -1

    def due(self, step: int) -> bool:
        """Return whether the state after step number ``step`` must be saved at this level."""
        return bool(self.every) and step % self.every == 0

    def next_place(self, step: int) -> Storage:
        """Return an unused storage for the checkpoint of step number ``step``, and record it as the level's newest."""
        name = new_name(self.taken, step)
        self.taken.add(name)
        self.last, self.step = self.place / name, step
        return self.last

    def resume_from(self, checkpoint: Storage) -> None:
        """Record that the run resumed from ``checkpoint``.

        If that checkpoint lies at this level, it counts as the level's newest, so that its state is not saved here
        again.
        """
        if _path(self.place / checkpoint.name) == _path(checkpoint):
            self.last, self.step = checkpoint, step_of(checkpoint)


def _path(place: Storage) -> Storage | Path:
    return real_path(place.root) if isinstance(place, LocalStorage) else place


def levels_of(settings: Checkpoint, run: Path, apart: str = "") -> list[LevelStore]:
    """Return the checkpoint levels of a run, the fastest storage first. Nothing is created.

    ``settings``: the recipe's section ``[checkpoint]``; ``run``: the run's folder; ``apart``: name of a subfolder for
    this island's checkpoints, if islands share storages; "" without islands.
    """
    levels = []
    for level in settings.all_levels:
        place: Storage = LocalStorage(run / "checkpoints")
        if level.to == MEMORY:
            number = hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:12]
            place = LocalStorage(SHM / f"weft-{os.getuid()}-{number}")
        elif level.to:
            place = open_storage(level.to)
            if isinstance(place, LocalStorage):
                place = LocalStorage(home_path(place.root).absolute())
            place = place / apart if apart else place
        levels.append(LevelStore(place, level.every, level.keep, level.to == MEMORY))
    return levels


def check_levels(levels: Sequence[LevelStore], size: int, fresh: bool) -> None:
    """Check on one rank that ``levels``, the checkpoint levels of a run, can be used.

    Also sets ``taken`` of each level to the names of the checkpoints that its storage has. ``size``: approximate bytes
    of a checkpoint; ``fresh``: whether the run starts anew instead of resuming. Raises :class:`UsageError` if a level
    of a fresh run already holds checkpoints, and :class:`WeftError` if a level in memory has too little space or
    belongs to another user.
    """
    for level in levels:
        if level.in_memory:
            _check_memory(level, size)
        elif fresh and committed_checkpoints(level.place):
            raise UsageError(
                f"{level.place} already holds checkpoints; choose another checkpoint.to, or add --resume {level.place}"
            )
        level.taken = set() if fresh and level.in_memory else set(level.place.folders())


def _check_memory(level: LevelStore, size: int) -> None:
    folder = Path(str(level.place))
    if not SHM.is_dir():
        raise UsageError(
            f"checkpoint.levels to = {MEMORY!r} needs {SHM}, which this system does not have"
        )
    if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != os.getuid()):
        raise WeftError(
            f"{folder} belongs to someone else; remove it, or choose another run folder"
        )
    own_bytes = sum(level.place.list().values())
    free = (
        min(shutil.disk_usage(SHM).free, psutil.virtual_memory().available) + own_bytes
    )
    need = (level.keep + 1) * size  # the next one is there before the oldest goes
    if need > free:
        gib = f"{need / 2**30:.3g} GiB of {SHM}, where {free / 2**30:.3g} are free"
        raise WeftError(
            f"too little memory: {level.keep} checkpoints and the next one in memory need {gib}; lower that level's "
            "keep, make the tmpfs larger, or leave the level out"
        )


def check_hosts(levels: Sequence[LevelStore], ranks: int, local: int) -> None:
    """Check that all hosts of the run see the same storage of every level. Collective.

    ``levels``: the run's levels; ``ranks``: number of ranks in the run; ``local``: number of ranks on this host. Raises
    :class:`WeftError` on all ranks for a storage that only some hosts see, such as a local disk.
    """
    if all(from_all(ranks == local)):
        return
    problem, token = "", [secrets.token_hex(6)]
    if any(level.in_memory for level in levels):
        raise UsageError(
            f"checkpoint.levels to = {MEMORY!r} is of one host, and these {ranks} ranks are on several; leave it out"
        )
    dist.broadcast_object_list(token, src=0)
    for level in levels:
        name = f"probe-{token[0]}"
        if dist.get_rank() == 0:
            try:
                level.place.write(name, [b"-"])
            except StorageError as error:
                problem = str(error)
        if not (problem := first_problem(problem)) and not _is_visible(
            level.place, name
        ):
            problem = f"{level.place} is not the same folder on all hosts; checkpoints need a shared one, or s3://"
        problem = first_problem(problem)
        if dist.get_rank() == 0:
            level.place.delete([name])
        if problem:
            raise WeftError(problem)


def _is_visible(place: Storage, name: str) -> bool:
    """Return whether this host sees an object, which may take a moment on network file systems."""
    deadline = time.monotonic() + VISIBLE_S
    while not (visible := place.holds(name)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return visible


def open_levels(levels: Sequence[LevelStore], run: Path, fresh: bool) -> None:
    """Create the folders of ``levels`` that must exist before the first save, and write the list of their storages to
    the run's folder ``run``.

    ``fresh``: whether the run starts anew instead of resuming. Checkpoints that an earlier run left in a level in
    memory are then removed.
    """
    for level in levels:
        if level.in_memory:
            if fresh:  # of a run whose folder is gone
                level.place.clear()
            try:
                # weights are nobody else's business
                Path(str(level.place)).mkdir(mode=stat.S_IRWXU, exist_ok=True)
            except OSError as error:
                raise WeftError(
                    f"cannot make {level.place}: {error.strerror or error}"
                ) from None
    home = LocalStorage(run / "checkpoints")
    known = [
        place
        for place in checkpoint_places(run)
        if place not in (home, LocalStorage(run))
    ]
    own = [level.place for level in levels if level.place != home]
    listed = list(dict.fromkeys(own + known))
    if listed != known:
        draft = run / f".{PLACES}"
        try:
            draft.write_text(
                json.dumps({"places": list(map(str, listed))}, indent=1) + "\n"
            )
            draft.replace(run / PLACES)
        except OSError as error:
            raise WeftError(
                f"cannot write {run / PLACES}: {error.strerror or error}"
            ) from None


class Thinning:
    """Deletes the oldest checkpoints of a run in a background thread, because deleting may take many requests to the
    storage. How many checkpoints stay is the setting ``keep`` of each level.

    ``is_own(checkpoint)``: whether a checkpoint is of this run's model; checkpoints of other models are not deleted.
    ``protected`` (attribute): paths of further checkpoints that are not deleted, such as the one with the lowest
    validation loss. A failed deletion does not stop the run, but is reported by :meth:`problems`.
    """

    def __init__(self, is_own: Callable[[Storage], bool] = lambda place: True) -> None:
        self.protected: frozenset[str] = frozenset()
        self._thread, self._work = ThreadPoolExecutor(1), list[Future[object]]()
        self._is_own = cache(is_own)

    def start(self, level: LevelStore) -> None:
        """Start to delete the oldest checkpoints of ``level``, so that only ``level.keep`` of them stay."""

        def goes(place: Storage) -> bool:
            return str(_path(place)) not in self.protected and self._is_own(place)

        self._work.append(
            self._thread.submit(prune, level.place, level.keep, is_own=goes)
        )

    def problems(self) -> list[str]:
        """Return an error message for each deletion that has failed since the last call of this method.

        Does not wait.
        """
        done = [work for work in self._work if work.done()]
        self._work = [work for work in self._work if not work.done()]
        return [
            f"old checkpoints were not deleted: {error}"
            for work in done
            if (error := work.exception())
        ]

    def close(self, wait: bool = True) -> None:
        """Start no more deletions. ``wait``: whether to wait until the deletions under way have ended."""
        self._thread.shutdown(wait)
