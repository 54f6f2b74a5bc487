"""Write checkpoints in a process of its own: hash, data file, manifest, and on one rank the commit.

The process gets tasks through a pipe and the rank's shares through shared memory, and cuts the shares into blocks as it
writes. The writer of the committing rank waits for the other ranks' manifests to appear in storage, so a failed rank
blocks the commit but never training. This file needs no PyTorch and no collectives.
"""

from __future__ import annotations

import mmap
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.checkpoint import format as layout
from weft.checkpoint.boxes import ROOT, checksum
from weft.checkpoint.format import StoredBlock
from weft.checkpoint.pack import Elements, elements, index_within
from weft.checkpoint.storage import Storage, StorageError
from weft.checkpoint.write_task import Commit, Report, WriteTask
from weft.errors import WeftError
from weft.net.child_pipe import parent_pipe

if TYPE_CHECKING:
    from weft.layout.dims import Box, Tensor


def run_writer(pipe_handle: int, memory_handle: int) -> None:
    """Run the tasks that arrive through the pipe, until the pipe is closed.

    ``pipe_handle`` and ``memory_handle``: inherited file descriptors of the pipe and of the memory shared with the
    rank. The data of a task are in that memory before the task arrives.
    """
    # Ctrl-C is for the rank, which then waits for this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(5)
    pipe = parent_pipe(pipe_handle)
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    memory = mmap.mmap(memory_handle, 0, flags=flags, prot=mmap.PROT_READ)
    with suppress(EOFError, OSError):  # the rank has ended
        while True:
            task = pipe.recv()
            # the message by which the last save was given up
            if not isinstance(task, WriteTask):
                continue
            pipe.send(write_share(task, memory))
            if task.commit is not None:
                pipe.send(commit_report(task.storage, task.commit, abandoned=pipe.poll))


class DataFile:
    """Data file of a checkpoint that is written in chunks: first the head, then the bytes of the boxes.

    Iterating yields the chunks and computes the digests of the boxes.

    Args:
        ``name``: name of the file.
        ``boxes``: pairs of a tensor's name and a box, in the order of the file.
        ``tensors``: descriptions of the tensors, by name.
        ``contents``: function that yields the bytes of each box; it is called again if an attempt to write has failed.
    """

    def __init__(
        self,
        name: str,
        boxes: Sequence[tuple[str, Box]],
        tensors: Mapping[str, Tensor],
        contents: Callable[[], Iterable[memoryview]],
    ) -> None:
        self.name, self.tensors, self._boxes, self._contents = (
            name,
            tensors,
            boxes,
            contents,
        )
        self.head, self._spans = layout.file_head(boxes, tensors)
        self.nbytes = len(self.head) + sum(size for _, size in self._spans)
        self.blocks: list[StoredBlock] = []  # of the last iteration
        self.hashing = 0.0  # seconds of it

    def __iter__(self) -> Iterator[bytes | memoryview]:
        self.blocks, self.hashing = [], 0.0
        yield self.head
        for (tensor, box), (at, size), data in zip(
            self._boxes, self._spans, self._contents(), strict=True
        ):
            begun = time.perf_counter()
            self.blocks.append(
                StoredBlock(tensor, box, self.name, at, size, checksum(data))
            )
            self.hashing += time.perf_counter() - begun
            yield data

    def write(self, storage: Storage, manifest: str) -> int:
        """Write the file to ``storage``, then its manifest under the name ``manifest``.

        Returns the size of the data file in bytes.
        """
        size = storage.write(self.name, self)
        storage.write(
            manifest, [layout.manifest_json(self.name, size, self.tensors, self.blocks)]
        )
        return size


def write_whole(
    storage: Storage,
    boxes: Sequence[tuple[str, Box]],
    tensors: Mapping[str, Tensor],
    contents: Callable[[], Iterable[memoryview]],
    meta: Mapping[str, Any],
    files: Mapping[str, bytes],
) -> None:
    """Write a checkpoint with a single data file to the new storage ``storage``.

    ``boxes``: pairs of a tensor's name and a box, in the order of the data file; ``tensors``: descriptions of the
    tensors, by name; ``contents``: function that yields the bytes of each box, called again after a failed attempt;
    ``meta``: contents of the root file beside the index of tensors; ``files``: contents of further files, by name. If
    anything interrupts the writing, even Ctrl-C, ``storage`` is cleared.
    """
    attempt = secrets.token_hex(6)
    manifest, named = (
        f"manifest/{attempt}-00000.json",
        {f"files/{attempt}/{name}": files[name] for name in files},
    )
    try:
        DataFile(f"data/{attempt}-00000.safetensors", boxes, tensors, contents).write(
            storage, manifest
        )
        commit(storage, Commit((manifest,), meta, named, timeout=0))
    except BaseException:
        storage.clear()  # it was not there before, or empty
        raise


def write_share(task: WriteTask, memory: mmap.mmap) -> Report:
    """Write the data file and the manifest of one rank as ``task`` describes them. Returns a report, also of a failure.

    ``memory``: shared memory that holds the elements of ``task.shares``.
    """

    def shares() -> Iterator[Elements]:
        offset = 0
        for name, box in task.shares:
            share = elements(memory, box, task.tensors[name].itemsize, offset)
            offset += share.nbytes
            yield share

    return write_elements(task, shares)


def write_elements(
    task: WriteTask, shares_of: Callable[[], Iterable[Elements]]
) -> Report:
    """Write the data file and the manifest of one rank as ``task`` describes them. Returns a report, also of a failure.

    ``shares_of``: function that yields the elements of each of ``task.shares``; called again after a failed attempt.
    """
    begun = time.perf_counter()
    with _caught(Report()) as report:
        shares = [(name, box, task.tensors[name]) for name, box in task.shares]
        cuts = [
            (name, box, list(layout.cut_blocks(box, t.shape, t.itemsize)))
            for name, box, t in shares
        ]
        boxes = [(name, tile) for name, _, tiles in cuts for tile in tiles]
        file = DataFile(
            task.file,
            boxes,
            task.tensors,
            lambda: _blocks(cuts, shares_of(), report.seconds),
        )
        report.bytes = file.write(task.storage, task.manifest)
        report.seconds["hash"] = file.hashing
        report.seconds["write"] = (
            time.perf_counter() - begun - sum(report.seconds.values())
        )
    return report


def _blocks(
    cuts: Sequence[tuple[str, Box, Sequence[Box]]],
    shares: Iterable[Elements],
    seconds: dict[str, float],
) -> Iterator[memoryview]:
    """Iterate over the bytes of blocks, cut from ``shares``. Each is valid until the next is requested."""
    seconds["cut"], scratch = 0.0, np.empty(0, np.uint8)
    for (_, outer, tiles), share in zip(cuts, shares, strict=True):
        for tile in tiles:
            begun = time.perf_counter()
            block = share[index_within(tile, outer)]
            if not block.flags.c_contiguous:
                if block.nbytes > scratch.nbytes:
                    scratch = np.empty(block.nbytes, np.uint8)
                copied = scratch[: block.nbytes].view(share.dtype).reshape(block.shape)
                np.copyto(copied, block)
                block = copied
            seconds["cut"] += time.perf_counter() - begun
            yield block.reshape(-1).view(np.uint8).data


def commit_report(
    storage: Storage, wanted: Commit, abandoned: Callable[[], bool]
) -> Report:
    """Commit a checkpoint as :func:`commit` does, and return a report with the duration or the problem of the commit.

    ``storage``: storage of the checkpoint; ``wanted``: the manifests to wait for and the contents of the root file;
    ``abandoned()``: returns whether another rank has failed, so that waiting is useless.
    """
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
    except (
        Exception
    ) as error:  # a bug here must reach the rank, not a log that nobody reads
        report.problem = f"{type(error).__name__}: {error}"


def commit(
    storage: Storage, wanted: Commit, abandoned: Callable[[], bool] = lambda: False
) -> None:
    """Create the root file of the checkpoint in ``storage`` as soon as every manifest of ``wanted`` is there.

    ``abandoned()``: returns whether another rank has failed, so that waiting is useless. Raises :class:`StorageError`
    if it returns True, if a manifest is missing after ``wanted.timeout`` seconds, or if the checkpoint has a root file
    already.
    """
    deadline = time.monotonic() + wanted.timeout
    pause = 0.005
    while missing := set(wanted.manifests) - set(storage.list("manifest/")):
        if abandoned():
            raise StorageError("another rank could not write its part")
        if time.monotonic() > deadline:
            ranks = ", ".join(sorted(missing))
            raise StorageError(
                f"no commit: after {wanted.timeout:g} s these were still missing: {ranks}"
            )
        time.sleep(pause)
        pause = min(0.2, pause * 1.5)
    manifests, listed = {}, []
    for name in wanted.manifests:
        data = storage.read(name)
        described = layout.Manifest(data, name)
        manifests[name] = described.tensors, list(described)
        listed.append([name, len(data), checksum(data)])
    files = {}
    for name, data in wanted.files.items():
        storage.write(name, [data])
        files[name] = [len(data), checksum(data)]
    root = {
        **wanted.meta,
        **layout.root_index(manifests),
        "manifests": listed,
        "files": files,
    }
    if not storage.create(ROOT, layout.seal(root)):
        raise StorageError(
            f"{storage}/{ROOT} exists: this checkpoint has been committed before"
        )
