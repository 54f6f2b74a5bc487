"""Reads the ring buffers of a run: their binary form, and their content in words.

A ring is a head, which has the number of bytes of names; the names, a line of JSON each (the rank, its groups, lines of
code); and a ring buffer of records of 64 bytes. The rank writes without locks. Any process can read it at any time: it
reads the numbers of the records twice, and leaves out those that have changed in between. Times are nanoseconds of the
machine's monotonic clock.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.net.process import look_at
from weft.paths import real_path

#: Records of a ring, and bytes of its head and names.
RECORDS, HEAD, NAMES = 1 << 13, 64, 1 << 17
MAGIC = b"weftrng1"
KINDS = (
    "step", "wait", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather",
    "scatter", "barrier", "send", "recv",
)  # fmt: skip
STEP = 0
#: ``number`` counts the rank's records from 1; ``sequence`` counts a group's collectives, or its messages from one rank
#: to another. ``enter``: time of the call; ``begin``: when a wait for its end begins; ``leave``: of that end (0: not
#: yet). ``step``: the one that the rank was in, or 0. ``size``: bytes; of a step, the nanoseconds for which the main
#: thread was ready to run and had no processor. ``peer``: a rank of the world, or -1. ``group`` and ``place`` are
#: numbers of names.
RECORD = np.dtype([
    ("number", "<i8"), ("enter", "<i8"), ("begin", "<i8"), ("leave", "<i8"), ("size", "<i8"), ("sequence", "<u4"),
    ("step", "<u4"), ("peer", "<i4"), ("group", "<u2"), ("place", "<u2"), ("kind", "u1"), ("failed", "u1"),
    ("unused", "V6"),
])  # fmt: skip
SIZE, TIME = HEAD + NAMES + RECORDS * RECORD.itemsize, struct.Struct("<q")


def rings_of(run: Path) -> Path:
    """Return the folder on this machine that holds the trace files (rings) of the ranks of a run.

    ``run``: the run's own folder.
    """
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return (
        base
        / f"weft-{os.getuid()}"
        / hashlib.sha256(str(real_path(run)).encode()).hexdigest()[:16]
    )


class TracedGroup(NamedTuple):
    """A process group that occurs in a trace.

    ``name``: its name, such as ``dp``. ``id``: a unique text that is equal on all its ranks. ``ranks``: its global
    ranks.
    """

    name: str
    id: str
    ranks: tuple[int, ...]


class Trace(NamedTuple):
    """Content of a rank's trace file.

    ``about``: a dictionary that tells the rank, the number of its view (``epoch``; a view is a set of ranks), the
    process and the machine. ``groups``: the process groups that occur. ``places``: the source lines that occur, such as
    ``weft/train/step.py:164``. ``records``: the recorded events (:data:`RECORD`) in the order of their begin. A record
    refers to its process group by an index in ``groups``, and to its source line by an index in ``places``.
    """

    about: dict[str, Any]
    groups: list[TracedGroup]
    places: list[str]
    records: np.ndarray[Any, Any]

    @property
    def steps(self) -> np.ndarray[Any, Any]:
        return self.records[self.records["kind"] == STEP]

    @property
    def calls(self) -> np.ndarray[Any, Any]:
        """Records of all events except steps: collectives, messages and other waits."""
        return self.records[self.records["kind"] != STEP]


def read_ring(path: Path) -> Trace:
    """Read the trace file (ring) ``path``, even while its rank writes to it. Raises ``ValueError`` for other files."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
    ):
        if memory[: len(MAGIC)] != MAGIC or len(memory) != SIZE:
            raise ValueError(f"{path} is not a ring")
        return parse(memory)


def parse(ring: mmap.mmap) -> Trace:
    """Parse a trace file (ring) that is mapped into memory, and return its content."""
    records = np.frombuffer(ring[HEAD + NAMES :], RECORD)
    after = np.frombuffer(ring[HEAD + NAMES :], RECORD)["number"]
    names = ring[HEAD : HEAD + TIME.unpack_from(ring, len(MAGIC))[0]]
    records = records[(records["number"] == after) & (after > 0)]
    about, groups, places = dict[str, Any](), [TracedGroup("?", "?", ())], ["?"]
    for line in map(json.loads, names.splitlines()):
        about |= line.get("about", {})
        if given := line.get("group"):
            groups.append(
                TracedGroup(
                    given["name"],
                    given["id"],
                    tuple(given.get("ranks") or range(*given["range"])),
                )
            )
        places += [line["place"]] if "place" in line else []
    return Trace(about, groups, places, records[np.argsort(records["number"])])


def newest_traces(run: Path) -> dict[int, Trace]:
    """Return the traces of the ranks of the run in folder ``run``, by rank.

    They are those of the last view, the set of ranks that took part most recently.
    """
    rings = dict[tuple[int, int], Trace]()
    for path in rings_of(run).glob("*-*.ring"):
        with suppress(OSError, ValueError, KeyError):  # it has just ended, or is none
            ring = read_ring(path)
            rings[ring.about["epoch"], ring.about["rank"]] = ring
    if not rings:
        return {}
    # an earlier run had more views, perhaps
    last = max(rings.values(), key=lambda ring: ring.about["started"]).about
    same = [
        ring
        for ring in rings.values()
        if ring.about["epoch"] == last["epoch"] and ring.about["rank"] < last["world"]
    ]
    return {ring.about["rank"]: ring for ring in same}


def process_of(trace: Trace) -> str:
    """Return in a word whether the process that wrote a trace is running, stopped or gone."""
    state = look_at(trace.about["pid"], trace.about["created"]).state
    return state if state in ("gone", "stopped") else "running"


def collective_text(trace: Trace, record: Any) -> str:
    """Return a text that describes ``record``, the record of a collective in ``trace``, such as ``all_reduce 812 of dp
    (weft/train/step.py:164)``.
    """
    group, peer = trace.groups[record["group"]], int(record["peer"])
    kind = KINDS[record["kind"]]
    way = {"send": f" to rank {peer}", "recv": f" from rank {peer}"}.get(kind, "")
    return f"{kind} {record['sequence']}{way} of {group.name} ({trace.places[record['place']]})"


def held_in(trace: Trace) -> Any:
    """Return the record of the collective in which the rank of ``trace`` waits.

    If a failed collective has ended the rank, the record of that collective is returned. Returns None if the rank
    computes.
    """
    calls = trace.calls
    waits = calls[
        (calls["begin"] > 0) & ((calls["leave"] == 0) | (calls["failed"] > 0))
    ]
    if not len(waits):
        return None
    last = waits[-1]
    # What came after a wait that failed is how the rank ends; after one that is still going on, other threads' doing.
    return (
        last
        if last["leave"] == 0 or not (calls["enter"] > last["leave"] + 2e9).any()
        else None
    )


def standing(trace: Trace, now: int) -> str:
    """Return a text on the collective in which the rank of ``trace`` waits, or on the last one that it left.

    The text is the end of a sentence whose subject is the rank, such as "left all_reduce 812 ...". ``now``: present
    time in nanoseconds of the monotonic clock.
    """
    ago = lambda ns: f"{max(0, now - int(ns)) / 1e9:.1f} s ago"  # noqa: E731
    if (inside := held_in(trace)) is not None:
        return f"went into {collective_text(trace, inside)} {ago(inside['begin'])}"
    if not len(trace.calls):
        return "has been in no collective"
    last = trace.calls[-1]
    what, when = ("left", last["leave"]) if last["leave"] else ("began", last["enter"])
    return f"{what} {collective_text(trace, last)} {ago(when)}, in step {last['step']}"
