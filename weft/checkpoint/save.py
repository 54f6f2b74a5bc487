"""Save in the background: a rank copies its share into reserved memory, and a separate process writes it.

Which rank writes which elements follows from the layout alone (:func:`weft.checkpoint.format.share`). Before a save the
ranks compare a digest of what they are about to write, and tell each other how the last save went. The copy can overlap
with the next forward and backward pass, as nothing changes before the optimizer's step (Maurya et al. 2024,
DataStates-LLM).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from weft.checkpoint.boxes import ROOT, checksum
from weft.checkpoint.pack import index_within
from weft.checkpoint.staging import SavedPiece, WriterProcess, elements_of, plan_pieces
from weft.checkpoint.storage import Storage, StorageError
from weft.checkpoint.write_task import Commit, Report, WriteTask
from weft.errors import WeftError
from weft.layout.mesh import from_all

if TYPE_CHECKING:
    from weft.checkpoint.in_place_writer import InPlaceWriter
    from weft.layout.parts import Part


@dataclass(frozen=True)
class Saved:
    """Report of one rank about a save.

    Every rank reports when it has written its own part. Rank 0 also reports on the commit, which completes the whole
    save. ``rank``: rank that reports; ``step``: step of the checkpoint; ``where``: address of the checkpoint;
    ``report``: result of the work. Its ``committed`` is set only in the report of a commit that succeeded.
    """

    rank: int
    step: int
    where: str
    report: Report


class Saver:
    """Background saves of one run: copies this rank's share of the state, and lets a writer process write the copy.

    A save waits for the previous save, so memory holds at most one copy of the state.

    Attributes:
        ``warn``: called with the problem of a failed save, unless ``strict`` is set.
        ``strict``: whether the save after a failed save raises its problem.
        ``timeout``: seconds that the commit waits for the other ranks.
        ``group``: ranks that save together (default: all).
        ``folder``: folder for the copy of the state (default: the copy is in main memory).
        ``in_place``: write from the state's own memory, without a copy and a process, while training waits.
        ``reports``: reports so far. Rank 0 gets those of other ranks when the next save begins or :meth:`finish` is
            called.
        ``problem``: problem of the last save; empty if there is none.
    """

    def __init__(
        self,
        warn: Callable[[str], None],
        strict: bool = False,
        timeout: float = 600,
        group: dist.ProcessGroup | None = None,
        folder: Path | None = None,
        in_place: bool = False,
    ) -> None:
        self.warn, self.strict, self.timeout = warn, strict, timeout
        self.folder, self.group, self.in_place = folder, group, in_place
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.world = dist.get_world_size(group) if dist.is_initialized() else 1
        self.reports: list[Saved] = []
        self.problem = ""
        self._writer: WriterProcess | InPlaceWriter | None = None
        self._thread = ThreadPoolExecutor(1, "weft-checkpoint")
        self._plan: tuple[Any, list[SavedPiece]] = (None, [])
        self._step = 0  # of the save under way
        self._where: Storage | None = None
        self._seconds: dict[str, float] = {}  # of its stages on this side
        # waits for the copy under way; the seconds that it took
        self._copying: Callable[[], float] | None = None
        self._task: WriteTask | None = None  # for the writer, once that is done
        # reports that the writer owes: one for the files, and on rank 0 one for the commit
        self._due = 0
        self._unsent: list[Saved] = []  # reports that rank 0 does not have yet

    def prepare(self, locals_: Mapping[str, Part]) -> None:
        """Allocate the memory for the copy of the state, and start the writer process.

        ``locals_``: this rank's parts of tensors, by name. Without this call the first save would take longer than
        later ones.
        """
        self._stage(locals_)

    def save(
        self,
        storage: Storage,
        step: int,
        locals_: Mapping[str, Part],
        meta: Mapping[str, Any],
        files: Mapping[str, bytes],
        lazy: bool = False,
    ) -> float:
        """Copy this rank's share of the state, and let the writer process write it to ``storage``. Collective.

        ``step``: step of the checkpoint; ``locals_``: this rank's parts of tensors, by name; ``meta``: further contents
        of the root file; ``files``: contents of further files, by name. With ``lazy`` the copy continues after the
        return; values must not change until :meth:`wait_for_copy` has returned. Returns the seconds that training
        waited. Raises :class:`WeftError` if the previous save failed and ``strict`` is set.
        """
        begun = time.perf_counter()
        attempt = self._finish_current(
            checksum(
                repr((step, str(storage), sorted(meta), meta.get("layout"))).encode()
            )
        )
        if self.problem:
            self._remove_failed()
            if self.strict:
                raise WeftError(self.problem)
            self.warn(self.problem)
        pieces, places = self._stage(locals_)
        values = [
            locals_[p.name].values[index_within(p.box, locals_[p.name].box)]
            for p in pieces
        ]
        named = {f"files/{attempt}/{name}": data for name, data in files.items()}
        names = [f"manifest/{attempt}-{rank:05d}.json" for rank in range(self.world)]
        self._task = WriteTask(
            storage, f"data/{attempt}-{self.rank:05d}.safetensors", names[self.rank],
            {name: local.tensor for name, local in locals_.items()},
            tuple((piece.name, piece.box) for piece in pieces),
            Commit(tuple(names), {"step": step, **meta}, named, self.timeout) if self.rank == 0 else None,
        )  # fmt: skip
        self._step, self._where, self.problem = step, storage, ""
        self._seconds = {"stage": time.perf_counter() - begun}
        self._copying = self._copy(places, values)
        if not lazy:
            self.wait_for_copy()
        return time.perf_counter() - begun

    def wait_for_copy(self) -> None:
        """Wait until the save under way, if any, has copied the state.

        Call it before every update of the parameters, because no parameter may change during the copy.
        """
        if self._copying is None or self._task is None:
            return
        begun = time.perf_counter()
        took, self._copying = self._copying(), None
        self._seconds |= {"copy": took, "wait": time.perf_counter() - begun}
        self._due = 2 if self.rank == 0 else 1
        assert self._writer is not None
        self._writer.send(self._task)
        self._task = None

    def poll(self) -> None:
        """Collect the reports that the writer process has sent so far. Does not wait."""
        while self._due and self._writer is not None and self._writer.has_report():
            self._receive_report()

    def finish(self) -> None:
        """Wait until the last save is committed. Collective.

        If the save failed, its files are removed, and all ranks raise :class:`WeftError`.
        """
        self._finish_current()
        if self.problem:
            self._remove_failed()
            raise WeftError(self.problem)

    def _remove_failed(self) -> None:
        """Remove what a failed save has left, which on a full disk is the room that the next one needs.

        All ranks have come to the end of it. If there is a root, it is somebody else's, or the answer to it was lost.
        """
        if self.rank == 0 and self._where is not None:
            with suppress(StorageError):
                if not self._where.holds(ROOT):
                    self._where.clear()

    def close(self, at_once: bool = False) -> None:
        """End the writer process and free its memory.

        ``at_once``: kill the process instead of waiting for its work to end.
        """
        self._thread.shutdown()
        if self._writer is not None:
            if at_once:
                self._writer.kill()
            self._writer.close()
        self._writer = None

    def _finish_current(self, what: str = "") -> str:
        """Wait for the save under way, and give all ranks the same :attr:`problem`, if there is one. Collective.

        Returns a random id for the next save, the same on all ranks. ``what``: a digest of what is to be saved next,
        which must be the same on all ranks, too.
        """
        self.wait_for_copy()
        while self._due > (self.rank == 0):
            self._receive_report()
        everyones = from_all((self.problem, self._unsent), self.group)
        self._unsent = []
        if self.rank == 0:
            self.reports += [saved for _, theirs in everyones[1:] for saved in theirs]
        self.problem = _root_cause([problem for problem, _ in everyones])
        if self._due:  # of rank 0: the commit
            if self.problem and self._writer is not None:
                self._writer.send("another rank has failed")
            before = self.problem
            self._receive_report()
            self.problem = before or self.problem
        agreed = from_all((self.problem, what, secrets.token_hex(6)), self.group)
        self.problem = _root_cause([problem for problem, *_ in agreed])
        if len({theirs for _, theirs, _ in agreed}) > 1:
            raise WeftError(
                "the ranks are not about to save the same thing; this is a defect of Weft"
            )
        return agreed[0][2]

    def _receive_report(self) -> None:
        """Wait for the writer's next report and keep it. If the writer has died, the report says so."""
        of_files = self._due == (2 if self.rank == 0 else 1)
        self._due -= 1
        assert self._writer is not None
        if (report := self._writer.report()) is None:
            report = Report(
                problem="the process that writes checkpoints died; a new one starts with the next save"
            )
            self._due = 0
        if of_files:
            report = replace(report, seconds=self._seconds | report.seconds)
        saved = Saved(self.rank, self._step, str(self._where), report)
        self.reports.append(saved)
        if self.rank:
            self._unsent.append(saved)
        if report.problem and not self.problem:
            self.problem = (
                f"checkpoint at step {self._step} was not saved: {report.problem}"
            )

    def _stage(
        self, locals_: Mapping[str, Part]
    ) -> tuple[list[SavedPiece], list[torch.Tensor]]:
        """Return the pieces that this rank writes, and their places in the staging memory, if there is one."""
        key = [
            (name, local.box, local.tensor, local.replica, local.replicas)
            for name, local in locals_.items()
        ]
        if self._plan[0] != key:  # the same at every save
            self._plan = key, plan_pieces(locals_)
        pieces = self._plan[1]
        if self.in_place:
            # runs that save in the background do without what writes
            from weft.checkpoint.in_place_writer import InPlaceWriter

            self._writer = self._writer or InPlaceWriter()
            return pieces, []
        size = sum(piece.size for piece in pieces)
        writer = self._writer
        if not isinstance(writer, WriterProcess) or not writer.serves(size):
            if writer is not None:
                writer.close()
            pinned = any(local.values.is_cuda for local in locals_.values())
            self._writer = writer = WriterProcess(size, pinned, self.folder)
        return pieces, [
            elements_of(piece, locals_[piece.name], writer.memory) for piece in pieces
        ]

    def _copy(
        self, places: list[torch.Tensor], values: list[torch.Tensor]
    ) -> Callable[[], float]:
        """Start to copy. The returned function waits for the end and returns the seconds of the copy.

        Without staging memory the writer gets ``values`` themselves.
        """
        if self.in_place:
            cast("InPlaceWriter", self._writer).values = values
            return lambda: 0.0
        on_gpu = [v.is_cuda for v in values]
        if len({*on_gpu}) > 1:  # such as moments that rest on the host
            waits = [
                self._copy(
                    [
                        p
                        for p, there in zip(places, on_gpu, strict=True)
                        if there is gpu
                    ],
                    [v for v in values if v.is_cuda is gpu],
                )
                for gpu in (True, False)
            ]
            return lambda: max([wait() for wait in waits])
        if values and values[0].is_cuda:
            stream, start, end = (
                torch.cuda.Stream(),
                *(torch.cuda.Event(enable_timing=True) for _ in range(2)),
            )
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                start.record()
                torch._foreach_copy_(places, values, non_blocking=True)
                end.record()

            def wait() -> float:
                end.synchronize()
                return float(start.elapsed_time(end)) / 1e3

            return wait

        def work() -> float:
            begun = time.perf_counter()
            if values:
                torch._foreach_copy_(places, values)
            return time.perf_counter() - begun

        return self._thread.submit(torch.no_grad()(work)).result


def _root_cause(problems: list[str]) -> str:
    """Return the problem that explains the others. That of rank 0 may only say that another rank failed."""
    return next(filter(None, [*problems[1:], problems[0]]), "")
