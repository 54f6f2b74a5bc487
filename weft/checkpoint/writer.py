"""The process that writes: hash, data file, manifest, and on one rank the commit. No PyTorch, no collectives.

It gets jobs through a pipe and finds the bytes in shared memory. The committing rank's writer waits for the other
ranks' manifests to appear in storage, so a rank that fails never blocks another one's training, only the commit.
"""

import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from weft.checkpoint import format as layout
from weft.checkpoint.format import ROOT, Block, Tensor, digest
from weft.checkpoint.storage import Storage, StorageError
from weft.errors import WeftError
from weft.layout.dims import Box


@dataclass(frozen=True)
class Commit:
    """What the committing rank adds: the root's own contents, and the manifests that must be there first."""

    manifests: tuple[str, ...]
    meta: Mapping[str, Any]
    files: Mapping[str, bytes]  # other files, by name
    timeout: float


@dataclass(frozen=True)
class Job:
    """One rank's part of a save: ``memory`` holds the payload of ``file`` from its first byte on."""

    storage: Storage
    memory: str
    file: str
    manifest: str
    tensors: Mapping[str, Tensor]
    blocks: tuple[tuple[str, Box], ...]
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
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            with open(job.memory, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                report = write(job, memory)
        except OSError as error:
            report = Report(problem=f"the rank's memory is gone: {error}")
        pipe.send(report)
        if job.commit is not None:
            pipe.send(finish(job.storage, job.commit, abandoned=pipe.poll))
            if report.problem or pipe.poll():
                try:
                    pipe.recv()  # the word that gave this save up
                except (EOFError, OSError):
                    return


def write(job: Job, payload: mmap.mmap) -> Report:
    """Write one rank's data file and manifest."""
    begun = time.perf_counter()
    with memoryview(payload) as view, _caught(Report()) as report:
        head, spans = layout.header(job.blocks, job.tensors)
        digests = [digest(view[at - len(head) : at - len(head) + size]) for at, size in spans]
        report.seconds["hash"] = time.perf_counter() - begun
        begun = time.perf_counter()
        report.bytes = job.storage.write(job.file, [head, view[: sum(size for _, size in spans)]])
        blocks = [
            Block(name, box, job.file, at, size, xxh3)
            for (name, box), (at, size), xxh3 in zip(job.blocks, spans, digests, strict=True)
        ]
        job.storage.write(job.manifest, [layout.manifest(job.file, report.bytes, job.tensors, blocks)])
        report.seconds["write"] = time.perf_counter() - begun
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
        found[name] = layout.read_manifest(data, name)
        listed.append([name, len(data), digest(data)])
    files = {}
    for name, data in wanted.files.items():
        storage.write(name, [data])
        files[name] = [len(data), digest(data)]
    root = {**wanted.meta, **layout.index(found), "manifests": listed, "files": files}
    if not storage.create(ROOT, layout.seal(root)):
        raise StorageError(f"{storage}/{ROOT} exists: this checkpoint has been committed before")
