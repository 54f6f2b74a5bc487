"""Staging of a save: the pieces that a rank writes, and a process that writes them from shared memory."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weft.checkpoint.boxes import replica_share, volume
from weft.layout.dims import Box, extents
from weft.layout.parts import TORCH_DTYPES, Part
from weft.net.child_pipe import PipeEnd, RunningProcess, call_in_child, open_child

if TYPE_CHECKING:
    from weft.checkpoint.write_task import Report, WriteTask


@dataclass(frozen=True)
class SavedPiece:
    """Box of a tensor that this rank writes in a save, and its place in the staging memory.

    The staging memory holds the copy of the state that the writer process writes. ``name``: name of the tensor;
    ``box``: its elements; ``offset``: the byte of the staging memory at which they begin; ``size``: their bytes.
    """

    name: str
    box: Box
    offset: int
    size: int


def plan_pieces(locals_: Mapping[str, Part]) -> list[SavedPiece]:
    """Return the boxes of tensors that this rank writes in a save, in their order in the staging memory.

    ``locals_``: this rank's parts of tensors, by name. Replicas of a part write different boxes of it.
    """
    pieces, at = [], 0
    for name in sorted(locals_):
        local = locals_[name]
        own_share = replica_share(
            local.box,
            local.tensor.itemsize,
            local.replica,
            local.replicas,
            zlib.crc32(name.encode()),
        )
        if own_share is not None:
            size = volume(own_share) * local.tensor.itemsize
            pieces.append(SavedPiece(name, own_share, at, size))
            at += size
    return pieces


def elements_of(piece: SavedPiece, part: Part, memory: mmap.mmap) -> torch.Tensor:
    """Return a tensor that views the elements of ``piece`` in the staging memory.

    ``part``: the rank's part of the tensor of which ``piece`` is a box; ``memory``: the staging memory, shared with the
    writer process.
    """
    dtype = TORCH_DTYPES[part.tensor.dtype]
    flat = torch.frombuffer(
        memory, dtype=dtype, count=volume(piece.box), offset=piece.offset
    )
    return flat.view(extents(piece.box))


class WriterProcess:
    """Process that writes one rank's checkpoints (:mod:`.writer`), and the memory that it shares with the rank.

    The memory is a nameless file, which vanishes when both processes have ended. ``size``: bytes of the memory;
    ``pinned``: register the memory for direct copies from a GPU; ``folder``: folder for the file (default: the file is
    in main memory).
    """

    def __init__(self, size: int, pinned: bool, folder: Path | None = None) -> None:
        self.size, self._open = max(size, mmap.PAGESIZE), True
        if folder is not None:
            from weft.memory.nameless_file import nameless_file, reserve

            name = f"memory.folder = {str(folder)!r}"
            self._file = os.fdopen(nameless_file(folder, name), "r+b")
            self.memory = reserve(
                self._file.fileno(),
                0,
                self.size,
                f"in {name} for what a checkpoint copies",
            )
        else:
            if sys.platform == "linux":
                self._file = os.fdopen(os.memfd_create("weft-checkpoint"), "r+b")
            else:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115
            self._file.truncate(self.size)
            self.memory = mmap.mmap(self._file.fileno(), self.size)
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        # touched now, and not while training waits for the first save
        if folder is None:
            self._bytes.zero_()
        if pinned:  # a GPU copies straight into it
            from weft.memory.pinned import pin

            pin(self._bytes)
        memory = self._file.fileno()

        def start(theirs: PipeEnd) -> RunningProcess:
            return call_in_child("weft.checkpoint.writer", "run_writer", theirs, memory)

        self._pipe, self.process = open_child(start)

    def serves(self, size: int) -> bool:
        """Return whether the process is alive and the shared memory has at least ``size`` bytes."""
        return self._open and self.process.poll() is None and size <= self.size

    def send(self, task: WriteTask | str) -> None:
        """Send ``task`` to the process.

        A text in place of a task makes the process give up the commit that it waits for.
        """
        try:
            self._pipe.send(task)
        except OSError:  # it died, and so will not report
            self._open = False

    def has_report(self) -> bool:
        """Return whether a report has arrived, so that :meth:`report` returns without waiting."""
        return not self._open or self._pipe.poll()

    def report(self) -> Report | None:
        """Wait for the process's next report about a task. Returns None if the process has died."""
        try:
            return self._pipe.recv() if self._open else None
        except (EOFError, OSError):
            self._open = False
            return None

    def kill(self) -> None:
        """Kill the process. A checkpoint that it is writing is never committed."""
        self.process.kill()

    def close(self) -> None:
        """End the process, after up to ten seconds by killing it, and free the shared memory."""
        self._pipe.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        if self._bytes.is_pinned():
            from weft.memory.pinned import unpin

            unpin(self._bytes.data_ptr())
        del self._bytes
        self.memory.close()
        self._file.close()
