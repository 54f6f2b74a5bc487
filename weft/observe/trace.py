"""Tracing: writes the begin and end of every collective to a file (:mod:`.rings`) that outlives the process."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import shutil
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from weft.net import lost
from weft.net.process import machine_id, started_at
from weft.observe import rings
from weft.observe.collective_hooks import install
from weft.observe.rings import (
    HEAD,
    KINDS,
    MAGIC,
    NAMES,
    RECORD,
    RECORDS,
    SIZE,
    TIME,
    Trace,
)
from weft.paths import real_path

_NEW, _KIND = (
    struct.Struct("<qqqqIIiHHBB"),
    {name: number for number, name in enumerate(KINDS)},
)
_FIELDS: Mapping[str, Any] = RECORD.fields or {}
_BEGIN, _LEAVE, _SIZE, _FAILED = (
    _FIELDS[name][1] for name in ("begin", "leave", "size", "failed")
)
DAY_S = 24 * 3600
_HERE = str(Path(__file__).parent)
_WEFT, _TORCH = (
    str(Path(_HERE).parent) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
)


class Ring:
    """Writer of a rank's trace file ``path``, a ring buffer of records of collectives, messages, waits and steps.

    ``about``: facts about the rank that are written first. ``step``: number of the present step, or 0 between steps.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.step = path, 0
        self._numbers, self._sequences = (
            itertools.count(1),
            defaultdict[Any, Iterator[int]](lambda: itertools.count(1)),
        )
        self._groups, self._places = (
            dict[str, tuple[int, list[int]]](),
            dict[tuple[str, int], int](),
        )
        # 2: a file of Weft, 1: of neither Weft nor PyTorch
        self._files = dict[str, int]()
        self._naming, self._named = threading.Lock(), {"group": 0, "place": 0}
        self._thread, self._since, self._waking = threading.get_ident(), 0, 0
        self._schedule: int | None = None
        # of this thread, whoever reads it; not on every system
        with contextlib.suppress(OSError):
            self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        # where there is no room for a file, nobody else sees it
        self._map = mmap.mmap(-1, SIZE)
        new = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with new.open("w+b") as file:
                # what is short now fails here, and not in a write later on
                os.posix_fallocate(file.fileno(), 0, SIZE)
                self._map = mmap.mmap(file.fileno(), SIZE)
        except OSError:
            new.unlink(missing_ok=True)
        self._map[: len(MAGIC)] = MAGIC
        self._name("about", about)
        if new.exists():
            new.replace(path)

    def read(self) -> Trace:
        return rings.parse(self._map)

    def enter(
        self,
        kind: str,
        group: dist.ProcessGroup,
        tensors: Sequence[Any],
        peer: int | None = None,
    ) -> int:
        """Record the begin of a collective, or of a message to or from rank ``peer`` of the group.

        Returns the record's number. ``kind``: name of the collective, ``send`` or ``recv``. ``tensors``: the tensors
        that are sent or received.
        """
        index, ranks = self._group(group)
        sequence = next(self._sequences[index if peer is None else (index, kind, peer)])
        peer = -1 if peer is None else ranks[peer]
        return self.write(
            kind,
            index,
            max(map(_bytes, tensors[:2]), default=0),
            sequence,
            peer,
            self._place(),
        )

    def write(
        self,
        kind: str,
        group: int = 0,
        size: int = 0,
        sequence: int = 0,
        peer: int = -1,
        place: int = 0,
    ) -> int:
        """Record an event of ``kind`` that begins now, and return the record's number.

        ``group`` and ``place``: numbers of its process group and source line in this file. ``size``: bytes.
        ``sequence``: number of the event among those of the group. ``peer``: the other global rank of a message, -1 for
        other events.
        """
        number, now = next(self._numbers), time.monotonic_ns()
        at = self._at(number)
        TIME.pack_into(self._map, at, 0)  # until the rest is there
        _NEW.pack_into(
            self._map,
            at + 8,
            now,
            0,
            0,
            size,
            sequence,
            self.step,
            peer,
            group,
            place,
            _KIND[kind],
            0,
        )
        TIME.pack_into(self._map, at, number)
        return number

    def wait(self, number: int) -> None:
        """Record that from now on the rank only waits for the end of the event whose record has this ``number``."""
        if threading.get_ident() == self._thread:
            self._since = self._delay()
        TIME.pack_into(self._map, self._at(number) + _BEGIN, time.monotonic_ns())

    def leave(self, number: int, failed: bool = False, size: int = -1) -> None:
        """Record that the event whose record has this ``number`` has ended or, with ``failed``, has failed.

        ``size``: number of bytes that the event has moved, if it was not known at the begin; -1 keeps the earlier
        number.
        """
        if threading.get_ident() == self._thread and self._since:
            self._waking, self._since = self._waking + self._delay() - self._since, 0
        at = self._at(number)
        if TIME.unpack_from(self._map, at)[0] != number:
            return  # it began so long ago that it has been written over
        if size >= 0:
            TIME.pack_into(self._map, at + _SIZE, size)
        self._map[at + _FAILED] = failed
        TIME.pack_into(self._map, at + _LEAVE, time.monotonic_ns())

    def __del__(self) -> None:
        if self._schedule is not None:
            os.close(self._schedule)

    def starved(self) -> int:
        """Return the nanoseconds for which the main thread was ready to run but had no processor, so far.

        Delays at the end of waits do not count.
        """
        return self._delay() - self._waking

    def _delay(self) -> int:
        """Return the nanoseconds of :meth:`starved` with those at the ends of waits."""
        return (
            int(os.pread(self._schedule, 64, 0).split()[1])
            if self._schedule is not None
            else 0
        )

    def _at(self, number: int) -> int:
        return HEAD + NAMES + number % RECORDS * RECORD.itemsize

    def _group(self, group: dist.ProcessGroup) -> tuple[int, list[int]]:
        """Return a group's number in this ring, and its ranks in the world."""
        if (entry := self._groups.get(group.group_name)) is None:
            ranks, name = dist.get_process_group_ranks(group), group.group_desc
            even = range(
                ranks[0], ranks[-1] + 1, ranks[1] - ranks[0] if len(ranks) > 1 else 1
            )
            short = (
                {"range": [even.start, even.stop, even.step]}
                if list(even) == ranks
                else {"ranks": ranks}
            )
            said = {"name": name, "id": group.group_name, **short}
            self._groups[group.group_name] = entry = self._name("group", said), ranks
        return entry

    def _place(self) -> int:
        """Return the number of the name of the Weft line that makes this call, or else of the nearest line outside
        PyTorch.
        """
        nearest = sys._getframe(3)
        frame: FrameType | None = nearest
        while frame is not None:
            file = frame.f_code.co_filename
            if (whose := self._files.get(file)) is None:
                # which hands on
                own = file.startswith(_WEFT) and not file.startswith(
                    (_HERE, _WEFT + "layout", _WEFT + "net")
                )
                self._files[file] = whose = (
                    2 if own else 0 if file.startswith((_TORCH, _HERE)) else 1
                )
            if whose == 2:
                nearest = frame
                break
            if whose and self._files[nearest.f_code.co_filename] == 0:
                nearest = frame
            frame = frame.f_back
        line = nearest.f_code.co_filename, nearest.f_lineno
        if (number := self._places.get(line)) is None:
            name = f"{os.path.relpath(line[0], Path(_WEFT).parent)}:{line[1]}"
            self._places[line] = number = self._name("place", name)
        return number

    def _name(self, kind: str, value: Any) -> int:
        """Write a name; return its number from 1, or 0 if there is no room."""
        line = json.dumps({kind: value}).encode() + b"\n"
        with self._naming:
            used = TIME.unpack_from(self._map, len(MAGIC))[0]
            if used + len(line) > NAMES:
                return 0
            self._map[HEAD + used : HEAD + used + len(line)] = line
            TIME.pack_into(self._map, len(MAGIC), used + len(line))
            self._named[kind] = number = self._named.get(kind, 0) + 1
        return number


def _bytes(given: Any) -> int:
    """Return the bytes of a tensor, or of nested lists of tensors; 0 of anything else."""
    return (
        sum(map(_bytes, given))
        if isinstance(given, list)
        else getattr(given, "nbytes", 0)
    )


_ring: Ring | None = None
_uninstall: Callable[[], None] = lambda: None  # noqa: E731


def start_tracing(folder: Path, rank: int, epoch: int = 0) -> Ring:
    """Trace the collectives, messages and steps of this process from now on, as ``rank`` of the run in ``folder``.

    ``epoch``: number of the run's present view (set of ranks). All process groups must exist. The trace files of the
    previous view stay, as they show how it ended; older ones are removed.
    """
    global _ring, _uninstall
    end_tracing()
    place = rings.rings_of(folder)
    for old in place.glob("*-*.ring"):
        if old.name.partition("-")[0] not in (str(epoch - 1), str(epoch)):
            old.unlink(missing_ok=True)
    _ring = Ring(place / f"{epoch}-{rank}.ring", {
        "rank": rank, "epoch": epoch, "world": dist.get_world_size(), "run": str(real_path(folder)),
        "machine": machine_id("net"), "pid": os.getpid(), "created": started_at(os.getpid()), "started": time.time(),
    })  # fmt: skip
    _sweep(place)
    _uninstall = install(_ring)
    lost.witness = lambda ranks: _standings(folder, ranks)
    return _ring


def _standings(run: Path, ranks: Sequence[int]) -> str:
    """Return the positions of these ranks in words, as far as their rings are on this machine."""
    # whatever is wrong with them, what this is said of matters more
    with contextlib.suppress(Exception):
        traces, now = rings.newest_traces(run), time.monotonic_ns()
        return "; ".join(
            f"rank {rank} {rings.standing(traces[rank], now)}"
            for rank in ranks
            if rank in traces
        )
    return ""


def end_tracing() -> None:
    """Stop tracing, and keep the rank's trace file."""
    global _ring, _uninstall
    if _ring is not None:
        _uninstall()
        lost.witness = None
        _ring = None  # it closes when no thread is in a collective any more


def stop(everyone: bool = False) -> None:
    """Stop tracing at the successful end of a run, and remove this rank's trace file.

    With ``everyone``, the files of all ranks of the run on this machine are removed.
    """
    path = _ring.path if _ring else None
    end_tracing()
    if path and everyone:
        shutil.rmtree(path.parent, ignore_errors=True)
    elif path:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # by the last rank that leaves


def _sweep(place: Path) -> None:
    """Remove rings of runs that ended badly, if the run's folder is gone or the rings are older than a day."""
    for folder in place.parent.iterdir():
        with contextlib.suppress(OSError, ValueError):
            paths = list(folder.glob("*-*.ring"))
            late = all(
                time.time() - path.stat().st_mtime > DAY_S for path in paths or [folder]
            )
            traces = list(map(rings.read_ring, paths))
            # A folder without rings may be that of a run which is about to make them.
            here = not traces or any(
                Path(ring.about.get("run", "/")).exists() for ring in traces
            )
            if (late or not here) and all(
                rings.process_of(ring) == "gone" for ring in traces
            ):
                shutil.rmtree(folder)


@contextlib.contextmanager
def step(number: int) -> Iterator[None]:
    """Record the time within this context as training step ``number`` (from 1) of the main thread."""
    if (ring := _ring) is None:
        yield
        return
    ring.step, starved = number, ring.starved()
    record = ring.write("step", sequence=number)
    try:
        yield
    finally:
        ring.step = 0
        if ring is _ring:
            ring.leave(record, size=ring.starved() - starved)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Record the time within this context as a wait for something other than a collective.

    Reports about slow ranks then count this time as waiting, not as computing.
    """
    ring, number = _ring, 0
    if ring is not None:
        ring.wait(number := ring.write("wait", place=ring._place()))
    try:
        yield
    finally:
        if ring is not None and ring is _ring:
            ring.leave(number)
