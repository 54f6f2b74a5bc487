"""Saved activations on the host or in a file, between the forward and the backward pass of each block.

Autograd's hooks pass on every tensor that a block saves. Whole storages are moved, each once, so that views of one
activation cost nothing more; parameters, and tensors that all blocks share, stay (vDNN, Rhu et al. 2016, 1602.08124).
Threads write the storages of a block while the next blocks compute, and read the storages of the previous block while a
block's backward runs. A storage that is needed before it has been freed is used where it is. The last blocks stay on
the device, as many as :mod:`weft.memory.offload_profile` says (SSDTrain, Wu et al. 2024, 2408.10013).
"""

import sys
import time
import weakref
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait as settle
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import psutil
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from weft.memory.nameless_file import TierError
from weft.memory.offload_profile import BlockCost, Profile, most_leaving
from weft.memory.tier_file import (
    PAGE,
    PIECE,
    THREADS,
    Region,
    TierFile,
    Transfer,
    page_buffer,
    whole_pages,
)
from weft.memory.transfer_threads import Threads

T = torch.Tensor
Stamp = float | torch.cuda.Event

#: Profiled passes that move all blocks, and as many in turns with them that move none if there is room: transfers slow
#: the computation down.
PROFILED = 3


class HostRoom:
    """Room (stretch of memory) on the host for the storages that a block saves for backward.

    It has the same methods as :class:`weft.memory.tier_file.Region`, a region of a file: ``store`` and ``load`` copy
    bytes, and ``run`` runs such copies in threads. ``size``: bytes; ``pinned``: whether the memory is pinned for copies
    to and from a GPU; ``threads``: threads that copy.
    """

    def __init__(self, size: int, pinned: bool, threads: Threads) -> None:
        self.size = size
        self.threads = threads
        self.memory = page_buffer(size, pinned)

    def store(self, data: T, start: int) -> None:
        self.memory[start : start + data.numel()].copy_(data)

    def load(self, into: T, start: int) -> None:
        into.copy_(self.memory[start : start + into.numel()])

    def run(
        self, moves: Iterable[Callable[[], None]], size: int, write: bool
    ) -> Transfer:
        return Transfer(
            [self.threads.submit(move) for move in moves],
            f"copying {size:,} bytes to the host",
            600,
        )


class Rooms:
    """Pool of rooms (stretches of memory) for the storages that blocks save for backward.

    Each run of a block takes one room for all storages that it saves. A freed room is used again by later runs.
    ``file``: file that holds the rooms, or None for the host's memory; ``pinned``: whether memory of the host is
    pinned.
    """

    def __init__(self, file: TierFile | None, pinned: bool) -> None:
        self.file, self.pinned = file, pinned
        self.threads = (
            Threads(THREADS, "weft-activations") if file is None else file.threads
        )
        self.free: list[HostRoom | Region] = []  # by size

    def take(self, size: int) -> HostRoom | Region:
        """Return the smallest free room (memory or part of a file) of at least ``size`` bytes, or a new one if no free
        room is large enough.
        """
        place = bisect_left(self.free, size, key=lambda room: room.size)
        if place < len(self.free):
            return self.free.pop(place)
        if self.file is not None:
            return self.file.region(size)
        return HostRoom(size, self.pinned, self.threads)

    def give(self, room: HostRoom | Region, leaving: Transfer) -> None:
        """Return ``room`` to the pool.

        ``leaving``: the transfer that was moving storages to the room. Pieces of the transfer that have not begun are
        cancelled. The method waits for the other pieces.
        """
        for piece in leaving.pieces:
            piece.cancel()
        settle(leaving.pieces)
        insort(self.free, room, key=lambda room: room.size)


class SavedStorage:
    """Storage of a tensor that autograd has saved during one run of a block.

    Only autograd's saved tensors refer to this object. When backward drops these tensors, the memory is freed.

    Attributes:
        ``here``: bytes on the device (uint8), or None while they are only in the run's room.
        ``run``: run of the block that saved the storage.
        ``size``: number of bytes.
        ``start``: byte of the room at which the storage begins; -1 if the storage stays on the device.
    """

    def __init__(self, here: T, run: "BlockRun") -> None:
        self.here: T | None = here
        self.run = run
        self.size = here.numel()
        self.start = -1


class SavedView(NamedTuple):
    """Description of a tensor that autograd has saved, from which the tensor is rebuilt in backward.

    ``stored``: storage that holds its elements; ``dtype``: type of the elements; ``size``, ``stride``, ``offset``:
    shape, strides and first element, as in :func:`torch.as_strided`.
    """

    stored: SavedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class Timing:
    """Times and sizes of one run of a block.

    ``stamps``: begin and end of forward, then begin and end of backward (seconds, or CUDA events); ``saved``: bytes
    that the block saved for backward; ``inputs``: bytes of the block's input.
    """

    stamps: list[Stamp] = field(default_factory=list)
    saved: int = 0
    inputs: int = 0


class BlockRun:
    """One forward run of a block, and the storages that it has saved for backward.

    Attributes:
        ``before``: weak reference to the previous run in the same pass. Backward reaches that run after this one.
        ``index``: number of this run in the pass.
        ``stored``: storages that the run has saved.
        ``room``: room to which they are moved; None if they stay on the device.
        ``leaving``: transfer of the storages to the room.
        ``coming``: transfer of the storages back to the device.
        ``wanted``: whether backward has reached this run.
        ``timing``: times and sizes of the run.
        ``leaves``: whether the storages are moved in this pass. The flag has an effect in the first passes only, while
            the mover measures passes with and without moves in turn.
    """

    def __init__(self, before: "BlockRun | None") -> None:
        self.before = weakref.ref(before) if before is not None else lambda: None
        self.index: int = before.index + 1 if before is not None else 0
        self.stored: weakref.WeakSet[SavedStorage] = weakref.WeakSet()
        self.room: HostRoom | Region | None = None
        self.leaving = self.coming = Transfer((), "", 0)  # to its room, and back
        self.wanted, self.timing = False, Timing()
        self.leaves = True  # while passes are profiled

    @property
    def here(self) -> int:
        """Bytes of the run's saved storages that are on the device now."""
        return sum(
            stored.size for stored in list(self.stored) if stored.here is not None
        )


class SavedActivations:
    """Mover of the tensors that blocks save for backward, from the device to the host's memory or a file, and back.

    Args:
        ``device``: device on which the blocks run.
        ``file``: file to which tensors are moved; None: the host's memory.
        ``blocks``: number of first blocks of each pass whose tensors are moved; 0: chosen by a profile of the first
            passes.
        ``report``: function that is called with the profile and the chosen number, as a dict for the metrics.

    Two attributes count bytes. ``sent``: bytes whose move off the device has begun so far. ``peak``: largest number of
    bytes of saved tensors that were on the device at once.
    """

    def __init__(
        self,
        device: torch.device,
        file: TierFile | None = None,
        blocks: int = 0,
        report: Callable[[dict[str, Any]], None] = lambda chosen: None,
    ) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.rooms = Rooms(file, self.cuda)
        self.streams = {
            write: torch.cuda.Stream(device) if self.cuda else None
            for write in (True, False)
        }
        self.away = blocks or None  # not yet known
        self.sent = self.peak = self.length = 0  # blocks of the longest pass
        self.report = report
        self.runs: weakref.WeakSet[BlockRun] = weakref.WeakSet()
        self.leaving: deque[BlockRun] = deque()
        # the latest run of each, by what its runs share
        self.passes = WeakTensorKeyDictionary()
        self.back: weakref.ref[BlockRun] | None = None  # the run that backward is in
        # Of passes that leave, and of such that stay, by index.
        self.timings: dict[bool, dict[int, list[Timing]]] = {
            True: defaultdict(list),
            False: defaultdict(list),
        }
        # from, to, bytes of each piece
        self.moved: dict[bool, list[tuple[float, float, int]]] = {True: [], False: []}

    @contextmanager
    def block(self, module: nn.Module, x: T, *shared: T) -> Iterator[None]:
        """Return a context in which ``module`` runs forward on ``x``, and tensors that it saves for backward are moved
        off the device.

        ``shared``: tensors that all blocks of a pass save. These and the parameters stay on the device. Runs with the
        same ``shared`` are taken as one pass; backward goes through the runs of a pass in the opposite order. Raises
        :class:`TierError` if a file cannot be written. If it cannot be read, backward raises this error.
        """
        if not torch.is_grad_enabled():
            yield
            return
        self._choose()
        run = self._next_run(shared)
        self.length = max(self.length, run.index + 1)
        away = self.length * run.leaves if self.away is None else self.away
        while self.leaving and (
            self.leaving[0].leaving.done
            or len(self.leaving) > most_leaving(run.index, away, self.length)
        ):
            self._release(self.leaving.popleft())
        storages: dict[int, SavedStorage | None] = {}  # by storage; None stays as it is
        versions: list[tuple[T, int]] = []

        def pack(tensor: T) -> T | SavedView:
            if not storages:  # now, when the gathered parameters are in place
                for p in (*module.parameters(), *shared):
                    storages[p.untyped_storage()._cdata] = None
            storage = tensor.untyped_storage()
            if tensor.device.type != self.device.type or not tensor.numel():
                return tensor
            if storage._cdata not in storages:
                data = torch.empty(0, dtype=torch.uint8, device=self.device)
                stored = SavedStorage(data.set_(storage), run)
                storages[storage._cdata] = stored
                run.stored.add(stored)
                versions.append((tensor, tensor._version))
            if (there := storages[storage._cdata]) is None:
                return tensor
            return SavedView(
                there,
                tensor.dtype,
                tensor.size(),
                tensor.stride(),
                int(tensor.storage_offset()),
            )

        run.timing.stamps.append(self._stamp())
        with saved_tensors_hooks(pack, self._unpack):
            yield
        run.timing.stamps.append(self._stamp())
        assert all(tensor._version == version for tensor, version in versions), (
            "changed in place after it was saved"
        )
        versions.clear()
        run.timing.saved, run.timing.inputs = run.here, x.untyped_storage().nbytes()
        self._note_peak()
        if run.index < away:
            self._leave(run)

    def _next_run(self, shared: Sequence[T]) -> BlockRun:
        latest = self.passes.get(shared[0]) if shared else None
        before = latest() if latest is not None else None
        run = BlockRun(before)
        run.leaves = before.leaves if before is not None else not self._stays_next()
        if shared:
            self.passes[shared[0]] = weakref.ref(run)
        self.runs.add(run)
        return run

    def _leave(self, run: BlockRun) -> None:
        """Begin to write a run's storages. They stay on the device until :meth:`_release`; small ones always do."""
        start, going = 0, [stored for stored in run.stored if stored.size >= PAGE]
        for stored in going:
            stored.start = start
            start += whole_pages(stored.size)
        if not going:
            return
        run.room = self.rooms.take(start)
        run.leaving = self._moves(run.room, going, write=True)
        weakref.finalize(run, self.rooms.give, run.room, run.leaving).atexit = False
        self.leaving.append(run)
        self.sent += sum(stored.size for stored in going)

    def _moves(
        self, room: HostRoom | Region, going: Sequence[SavedStorage], write: bool
    ) -> Transfer:
        ready = None
        if self.cuda:
            ready = torch.cuda.current_stream(self.device).record_event(
                torch.cuda.Event(blocking=True)
            )
        moved = self.moved[write] if self.away is None else []
        pieces = [
            partial(move_piece, room.store if write else room.load, stored.here[i : i + PIECE], stored.start + i,
                    ready, self.streams[write], moved)
            for stored in going if stored.here is not None for i in range(0, stored.size, PIECE)
        ]  # fmt: skip
        return room.run(
            pieces, sum(whole_pages(stored.size) for stored in going), write
        )

    def _release(self, run: BlockRun) -> None:
        """Wait for a run's writes and free the device's memory of its storages."""
        try:
            run.leaving.wait()
        except TierError:
            self.leaving.clear()  # this pass is over
            raise
        for stored in run.stored:
            if stored.start >= 0:
                stored.here = None

    def _fetch(self, run: BlockRun) -> None:
        """Begin to read the freed storages of a run; those still on the device need not be written any more."""
        if run in self.leaving:
            self.leaving.remove(run)
            for piece in run.leaving.pieces:
                piece.cancel()
        missing = [stored for stored in run.stored if stored.here is None]
        if missing and run.room is not None:
            for stored in missing:
                stored.here = torch.empty(
                    stored.size, dtype=torch.uint8, device=self.device
                )
            run.coming = self._moves(run.room, missing, write=False)

    def _unpack(self, packed: T | SavedView) -> T:
        if not isinstance(packed, SavedView):
            return packed
        if not packed.stored.run.wanted:
            self._begin_backward(packed.stored.run)
        assert packed.stored.here is not None
        return torch.empty(0, dtype=packed.dtype, device=self.device).set_(
            packed.stored.here.untyped_storage(),
            packed.offset,
            packed.size,
            packed.stride,
        )

    def _begin_backward(self, run: BlockRun) -> None:
        """Wait for the storages of a run, and begin to read those of the next runs of backward as far as there is room.

        The room is the most that forward has needed, so that reads go on while backward is in blocks that have stayed.
        """
        after = self.back() if self.back is not None else None
        # nothing else was done in between
        if after is not None and after.index - run.index in (0, 1):
            after.timing.stamps.append(self._stamp())
        run.wanted, self.back = True, weakref.ref(run)
        self._fetch(run)
        run.coming.wait()
        self._note_peak()
        run.timing.stamps.append(self._stamp())
        room, ahead = self.peak - self.here, run.before()
        while ahead is not None and (
            ahead is run.before() or ahead.timing.saved - ahead.here <= room
        ):
            room -= ahead.timing.saved - ahead.here
            self._fetch(ahead)
            ahead = ahead.before()
        self._note_peak()
        if self.away is None and len(self.timings[run.leaves][run.index]) < PROFILED:
            self.timings[run.leaves][run.index].append(run.timing)

    @property
    def here(self) -> int:
        """Bytes of all saved tensors that are on the device."""
        return sum(run.here for run in list(self.runs))

    def _note_peak(self) -> None:
        self.peak = max(self.peak, self.here)

    # --- the profile

    def _stamp(self) -> Stamp:
        if not self.cuda:
            return time.perf_counter()
        return torch.cuda.current_stream(self.device).record_event(
            torch.cuda.Event(enable_timing=True)
        )

    def _stays_next(self) -> bool:
        """Return whether the next profiled pass keeps all storages: in turns with passes that move them, if there is
        room.
        """
        if self.away is not None:
            return False
        left, kept = (len(self.timings[leaves][0]) for leaves in (True, False))
        if kept >= min(left, PROFILED):
            return False
        all_saved = sum(times[-1].saved for times in self.timings[True].values())
        free = (
            torch.cuda.mem_get_info(self.device)[0]
            if self.cuda
            else psutil.virtual_memory().available
        )
        return 2 * all_saved < free

    def _choose(self) -> None:
        """Choose how many blocks are moved from now on, if enough passes are complete and none is under way."""
        if (
            self.away is not None
            or len(self.timings[True][0]) < PROFILED
            or self._stays_next()
        ):
            return
        if any(run.stored for run in self.runs):
            return
        profile = self.profile()
        self.away, self.peak = profile.most_hidden(), 0
        for timings in self.timings.values():
            timings.clear()
        self.report({
            "blocks": self.away, "of": len(profile.blocks), "place": "host" if self.rooms.file is None else "file",
            "write": profile.write, "read": profile.read, **profile.curve(),
        })  # fmt: skip

    def profile(self) -> Profile:
        """Return a profile of the passes so far, by which the number of blocks whose tensors are moved is chosen.

        It has, for each block, the shortest times of forward and backward without transfers beside them. It also has
        the bandwidth of transfers in both directions, and the time by which transfers slow the computation down.
        """
        if self.cuda:
            torch.cuda.synchronize(self.device)
        beside = self._costs(self.timings[True])
        alone = self._costs(self.timings[False]) or beside
        moved = sum(block.saved for block in beside) or 1
        write = sum(b.forward - a.forward for a, b in zip(alone, beside, strict=False))
        read = sum(b.backward - a.backward for a, b in zip(alone, beside, strict=False))
        return Profile(
            alone,
            bandwidth(self.moved[True]),
            bandwidth(self.moved[False] or self.moved[True]),
            max(0.0, write) / moved,
            max(0.0, read) / moved,
        )

    def _costs(self, by_index: Mapping[int, Sequence[Timing]]) -> list[BlockCost]:
        """Return the fastest times of each block. The end of the first one's backward is not seen: it counts as the
        second's.
        """
        blocks: list[BlockCost] = []
        for _, timings in sorted(by_index.items(), reverse=True):
            if not timings:
                continue
            forward = min(seconds_between(*t.stamps[:2]) for t in timings)
            seen = [
                seconds_between(*t.stamps[2:]) for t in timings if len(t.stamps) > 3
            ]
            backward = (
                min(seen) if seen else blocks[-1].backward if blocks else 2 * forward
            )
            blocks.append(
                BlockCost(forward, backward, timings[-1].saved, timings[-1].inputs)
            )
        return blocks[::-1]


def move_piece(
    move: Callable[[T, int], None], piece: T, start: int, ready: torch.cuda.Event | None,
    stream: torch.cuda.Stream | None, moved: list[tuple[float, float, int]],
) -> None:  # fmt: skip
    """Wait until the device has reached the event ``ready``, and then run ``move(piece, start)`` on ``stream``. This
    function is for a thread of its own.

    ``move``: copies ``piece`` (uint8) to or from a room, a stretch of memory or of a file. ``start``: byte of the room
    at which the piece begins. ``ready``: None: do not wait. ``moved``: list to which a triple is appended: begin and
    end of the move in seconds, and the number of bytes moved.
    """
    if ready is not None:
        ready.synchronize()
    begun = time.perf_counter()
    with torch.cuda.stream(stream):
        move(piece, start)
    moved.append((begun, time.perf_counter(), piece.numel()))


def seconds_between(begun: Stamp, ended: Stamp) -> float:
    """Return the seconds between two times: both CUDA events, or both seconds of the host's clock.

    ``begun``, ``ended``: the earlier and the later time.
    """
    if isinstance(begun, torch.cuda.Event):
        return float(begun.elapsed_time(cast(torch.cuda.Event, ended))) / 1000
    return cast(float, ended) - begun


def bandwidth(moved: Sequence[tuple[float, float, int]]) -> float:
    """Return the bytes per second of transfers, over the time in which at least one piece was moving.

    ``moved``: begin and end in seconds, and bytes, of each piece; pieces may overlap in time. If nothing was moved, the
    result is the largest float.
    """
    busy, end = 0.0, 0.0
    for begun, ended, _ in sorted(moved):
        busy += max(0.0, ended - max(begun, end))
        end = max(end, ended)
    return sum(size for *_, size in moved) / busy if busy else sys.float_info.max
