"""Saving without stopping: a rank copies its share into memory that it keeps for this, and a process of its own writes.

Which rank writes which elements follows from the layout alone (:func:`weft.checkpoint.format.share`); before a save the
ranks compare one digest of what they are about to write and tell each other how the last save went.
"""

import mmap
import os
import secrets
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from weft.checkpoint.format import DTYPES, Tensor, digest, share, tiles, volume
from weft.checkpoint.storage import Storage
from weft.checkpoint.writer import Commit, Job, Report
from weft.errors import WeftError
from weft.layout.dims import Box

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
    "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
assert TORCH_DTYPES.keys() == DTYPES.keys()


@dataclass(frozen=True)
class Local:
    """A rank's part of a logical tensor: ``values`` are its elements ``box``, which ``replicas`` ranks hold."""

    values: torch.Tensor
    box: Box
    tensor: Tensor
    replica: int = 0
    replicas: int = 1


@dataclass(frozen=True)
class Piece:
    """A block to be written: where it lies in the rank's tensor, and where in the staging memory."""

    name: str
    box: Box
    offset: int
    size: int


def plan(locals_: Mapping[str, Local]) -> list[Piece]:
    """The blocks that this rank writes, in the order in which they lie in its file."""
    pieces, at = [], 0
    for name in sorted(locals_):
        local = locals_[name]
        mine = share(local.box, local.tensor.itemsize, local.replica, local.replicas, zlib.crc32(name.encode()))
        for box in tiles(mine, local.tensor.shape, local.tensor.itemsize) if mine is not None else ():
            size = volume(box) * local.tensor.itemsize
            pieces.append(Piece(name, box, at, size))
            at += size
    return pieces


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """``box`` as an index into the elements of ``outer``."""
    return tuple(slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(box, outer, strict=True))


class _Memory:
    """Memory that another process can open by ``path``, and that is gone with this one however it ends."""

    def __init__(self, size: int) -> None:
        self.size = max(size, mmap.PAGESIZE)
        if sys.platform == "linux":
            self._handle = os.memfd_create("weft-checkpoint")
            self.path = f"/proc/{os.getpid()}/fd/{self._handle}"
        else:
            self._handle, self.path = tempfile.mkstemp(prefix="weft-checkpoint-")
        os.ftruncate(self._handle, self.size)
        self.buffer = mmap.mmap(self._handle, self.size)
        # Touched now, and not while training waits for the first save.
        torch.frombuffer(self.buffer, dtype=torch.uint8).zero_()

    def close(self) -> None:
        self.buffer.close()
        os.close(self._handle)
        if sys.platform != "linux":
            os.unlink(self.path)


class Saver:
    """Saves of one run. One is under way at a time: the next waits for it, which bounds the memory to one copy.

    ``heard`` is told what went wrong with a save in the background; with ``strict`` that is raised instead.
    """

    def __init__(self, heard: Callable[[str], None], strict: bool = False, timeout: float = 600) -> None:
        self.heard, self.strict, self.timeout = heard, strict, timeout
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self._memory: _Memory | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._step, self._where = 0, ""  # of the save under way
        self._due = 0  # reports that the writer owes: one for the files, and on rank 0 one for the commit
        self.reports: list[tuple[int, str, Report]] = []  # step, folder, how it went
        self.problem = ""

    def prepare(self, locals_: Mapping[str, Local]) -> None:
        """Make and touch the staging memory and start the writer, so that the first save is as short as the others."""
        self._room(sum(piece.size for piece in plan(locals_)))
        self._writer()

    def save(
        self,
        storage: Storage,
        step: int,
        locals_: Mapping[str, Local],
        meta: Mapping[str, Any],
        files: Mapping[str, bytes],
    ) -> float:
        """Copy this rank's share and let it be written; returns the seconds that this took. Collective."""
        begun = time.perf_counter()
        self._settle()
        if self.problem:
            if self.strict:
                raise WeftError(self.problem)
            self.heard(self.problem)
        attempt = self._agree(step, str(storage), meta)
        pieces = plan(locals_)
        buffer = self._room(sum(piece.size for piece in pieces))
        for piece in pieces:
            local = locals_[piece.name]
            values = local.values[within(piece.box, local.box)]
            count, dtype = volume(piece.box), TORCH_DTYPES[local.tensor.dtype]
            place = torch.frombuffer(buffer.buffer, dtype=dtype, count=count, offset=piece.offset)
            place.view(values.shape).copy_(values)
        named = {f"files/{attempt}/{name}": data for name, data in files.items()}
        names = [f"manifest/{attempt}-{rank:05d}.json" for rank in range(self.world)]
        self._writer().send(Job(
            storage, buffer.path, f"data/{attempt}-{self.rank:05d}.safetensors", names[self.rank],
            {name: local.tensor for name, local in locals_.items()},
            tuple((piece.name, piece.box) for piece in pieces),
            Commit(tuple(names), {"step": step, **meta}, named, self.timeout) if self.rank == 0 else None,
        ))  # fmt: skip
        self._step, self._where, self.problem = step, str(storage), ""
        self._due = 2 if self.rank == 0 else 1
        return time.perf_counter() - begun

    def poll(self) -> None:
        """Take what the writer reports. Never waits."""
        while self._due and self._pipe is not None and self._pipe.poll():
            self._take()

    def finish(self) -> None:
        """Wait until the last save is committed; collective. Raises :class:`WeftError` on all ranks if it is not."""
        self._settle()
        if self.problem:
            raise WeftError(self.problem)

    def close(self) -> None:
        """End the writer, whatever it is doing, and give the memory back."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        if self._memory is not None:
            self._memory.close()
        self._pipe = self._process = self._memory = None

    def _settle(self) -> None:
        """See the save under way to its end; collective. All ranks then have the same :attr:`problem`, if any."""
        while self._due > (self.rank == 0):
            self._take()
        self.problem = self._first(self.problem)
        if self._due:  # of rank 0: the commit
            if self.problem and self._pipe is not None:
                self._pipe.send("another rank has failed")
            said = self.problem
            self._take()
            self.problem = said or self.problem
        self.problem = self._first(self.problem)

    def _take(self) -> None:
        """The writer's next report."""
        self._due -= 1
        try:
            assert self._pipe is not None
            report = self._pipe.recv()
        except (EOFError, OSError, AssertionError):
            report = Report(problem="the process that writes checkpoints died; a new one starts with the next save")
            self._pipe, self._due = None, 0
        self.reports.append((self._step, self._where, report))
        if report.problem and not self.problem:
            self.problem = f"checkpoint at step {self._step} was not saved: {report.problem}"

    def _agree(self, step: int, where: str, meta: Mapping[str, Any]) -> str:
        """One id for this save on all ranks, once they agree on what is saved."""
        mine = (digest(repr((step, where, sorted(meta), meta.get("layout"))).encode()), secrets.token_hex(6))
        found = self._all(mine)
        if len({what for what, _ in found}) > 1:
            raise WeftError(f"the ranks are not about to save the same thing at step {step}; this is a defect of Weft")
        return str(found[0][1])

    def _first(self, problem: str) -> str:
        """The problem that explains the others: rank 0's may only say that another rank has one."""
        found = self._all(problem)
        return next(filter(None, [*found[1:], found[0]]), "")

    def _all(self, mine: Any) -> list[Any]:
        found = [mine] * self.world
        if self.world > 1:
            dist.all_gather_object(found, mine)
        return found

    def _room(self, size: int) -> _Memory:
        if self._memory is None or self._memory.size < size:
            if self._memory is not None:
                self._memory.close()
            self._memory = _Memory(size)
        return self._memory

    def _writer(self) -> Connection:
        if self._pipe is None or self._process is None or self._process.poll() is not None:
            self._pipe, theirs = Pipe()
            # A fresh interpreter that runs nothing else: multiprocessing's spawn would run the main program again.
            command = [sys.executable, "-c", "from weft.checkpoint.writer import main; main()", str(theirs.fileno())]
            # In a session of its own: a terminal's Ctrl-C is for the rank, which then waits for its writer.
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
            theirs.close()
        return self._pipe
