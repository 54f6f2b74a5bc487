"""The process that writes: hash, data file, manifest, and on one rank the commit. No PyTorch, no collectives.

It gets jobs through a pipe and finds the rank's shares in shared memory; it cuts them into blocks while it writes, so
that training never waits for that. The committing rank's writer waits for the other ranks' manifests to appear in
storage, so a rank that fails never blocks another one's training, only the commit.
"""

import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from weft.checkpoint import format as layout
from weft.checkpoint.format import ROOT, StoredBlock, digest
from weft.checkpoint.pack import elements, within
from weft.checkpoint.storage import Storage, StorageError
from weft.errors import WeftError
from weft.layout.dims import Box, Tensor


@dataclass(frozen=True)
class Commit:
    """What the committing rank adds: the root's own contents, and the manifests that must be there first."""

    manifests: tuple[str, ...]
    meta: Mapping[str, Any]
    files: Mapping[str, bytes]  # other files, by name
    timeout: float


@dataclass(frozen=True)
class WriteTask:
    """One rank's part of a save: ``memory`` holds ``shares`` (tensor and box), one after the other, each row-major."""

    storage: Storage
    memory: str
    file: str
    manifest: str
    tensors: Mapping[str, Tensor]
    shares: tuple[tuple[str, Box], ...]
    commit: Commit | None


@dataclass
class Report:
    """How a job went: seconds per stage, bytes, and what was wrong, if anything."""

    seconds: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    committed: bool = False
    problem: str = ""


def main() -> None:
    """Entry point of the process: the number of the pipe's handle is its argument."""
    serve(Connection(int(sys.argv[1])))


def serve(pipe: Connection) -> None:
    """Do jobs until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which then waits for this process
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(5)
    memory = _Mapped()
    with suppress(EOFError, OSError):  # the rank has ended
        while True:
            job = pipe.recv()
            if not isinstance(job, WriteTask):  # the word that gave the last save up
                continue
            try:
                report = write(job, memory.of(job.memory))
            except OSError as error:
                report = Report(problem=f"the rank's memory is gone: {error}")
            pipe.send(report)
            if job.commit is not None:
                pipe.send(finish(job.storage, job.commit, abandoned=pipe.poll))


class _Mapped:
    """The rank's memory, mapped once: the same is used for one save after another."""

    def __init__(self) -> None:
        self._which: tuple[int, int] | None = None
        self._memory: mmap.mmap | None = None

    def of(self, path: str) -> mmap.mmap:
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            if self._memory is None or self._which != (about.st_dev, about.st_ino):
                flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
                self._memory = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
                self._which = about.st_dev, about.st_ino
        return self._memory


class Payload:
    """The chunks of a data file: its head, then block after block, cut from the shares and hashed on the way.

    Can be iterated again, should the first try to send it fail.
    """

    def __init__(self, job: WriteTask, memory: mmap.mmap) -> None:
        self._job, self._memory = job, memory
        self._cut = [
            (name, box, list(layout.tiles(box, job.tensors[name].shape, job.tensors[name].itemsize)))
            for name, box in job.shares
        ]
        self.head, self._spans = layout.header(((n, b) for n, _, boxes in self._cut for b in boxes), job.tensors)
        self.nbytes = len(self.head) + sum(size for _, size in self._spans)
        self.blocks: list[StoredBlock] = []  # of the last iteration
        self.seconds: dict[str, float] = {}

    def __iter__(self) -> Iterator[bytes | memoryview]:
        self.blocks, spans, offset = [], iter(self._spans), 0
        self.seconds = dict.fromkeys(("cut", "hash"), 0.0)
        clock = time.perf_counter
        yield self.head
        scratch = np.empty(max((size for _, size in self._spans), default=0), np.uint8)
        for name, outer, boxes in self._cut:
            share = elements(self._memory, outer, self._job.tensors[name].itemsize, offset)
            offset += share.nbytes
            for box in boxes:
                at, size = next(spans)
                begun = clock()
                block = share[within(box, outer)]
                if not block.flags.c_contiguous:
                    block, whole = scratch[:size].view(share.dtype).reshape(block.shape), block
                    np.copyto(block, whole)
                data = block.reshape(-1).view(np.uint8).data
                hashed = clock()
                xxh3 = digest(data)
                self.seconds["cut"] += hashed - begun
                self.seconds["hash"] += clock() - hashed
                self.blocks.append(StoredBlock(name, box, self._job.file, at, size, xxh3))
                yield data


def write(job: WriteTask, memory: mmap.mmap) -> Report:
    """Write one rank's data file and manifest."""
    begun = time.perf_counter()
    with _caught(Report()) as report:
        payload = Payload(job, memory)
        report.bytes = job.storage.write(job.file, payload)
        described = layout.manifest(job.file, report.bytes, job.tensors, payload.blocks)
        job.storage.write(job.manifest, [described])
        report.seconds |= payload.seconds
        report.seconds["write"] = time.perf_counter() - begun - sum(payload.seconds.values())
    return report


def finish(storage: Storage, wanted: Commit, abandoned: Callable[[], bool]) -> Report:
    """Commit once all ranks have written, unless the save is ``abandoned`` before."""
    begun = time.perf_counter()
    with _caught(Report()) as report:
        commit(storage, wanted, abandoned)
        report.committed = True
        report.seconds["commit"] = time.perf_counter() - begun
    return report


@contextmanager
def _caught(report: Report) -> Iterator[Report]:
    try:
        yield report
    except WeftError as error:
        report.problem = str(error)
    except Exception as error:  # a bug here must reach the rank, not a log that nobody reads
        report.problem = f"{type(error).__name__}: {error}"


def commit(storage: Storage, wanted: Commit, abandoned: Callable[[], bool] = lambda: False) -> None:
    """Create the root once every manifest is there. Raises :class:`WeftError` if one does not come in time."""
    deadline = time.monotonic() + wanted.timeout
    pause = 0.005
    while missing := set(wanted.manifests) - set(storage.list("manifest/")):
        if abandoned():
            raise StorageError("another rank could not write its part")
        if time.monotonic() > deadline:
            ranks = ", ".join(sorted(missing))
            raise StorageError(f"no commit: after {wanted.timeout:g} s these were still missing: {ranks}")
        time.sleep(pause)
        pause = min(0.2, pause * 1.5)
    found, listed = {}, []
    for name in wanted.manifests:
        data = storage.read(name)
        described = layout.Manifest(data, name)
        found[name] = described.tensors, list(described)
        listed.append([name, len(data), digest(data)])
    files = {}
    for name, data in wanted.files.items():
        storage.write(name, [data])
        files[name] = [len(data), digest(data)]
    root = {**wanted.meta, **layout.index(found), "manifests": listed, "files": files}
    if not storage.create(ROOT, layout.seal(root)):
        raise StorageError(f"{storage}/{ROOT} exists: this checkpoint has been committed before")
