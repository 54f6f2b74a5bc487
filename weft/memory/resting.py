"""Tensors that rest in a tier while not in use: read together, and written back after they have changed.

A tensor object stays the same all the time, and its memory changes: a region of the tier's file (or memory of the host)
while it rests, and a buffer (or memory of the device) in between.
"""

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch

from weft.memory.on_device import OnDevice
from weft.memory.tier_file import (
    BufferPool,
    Region,
    TierFile,
    Transfer,
    page_buffer,
    whole_pages,
)
from weft.paths import home_path

T = torch.Tensor

CPU = torch.device("cpu")

#: Groups that may be written back at a time.
MOST_LEAVING = 3

#: The transfer of tensors that are already there.
HERE = Transfer((), "", 0)

#: Alignment of tensors in a region, in bytes.
ALIGNED = 64


@cache
def return_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the CUDA stream on which tensors go back from ``device`` to the host, beside all other work."""
    return torch.cuda.Stream(device)


class ReturnCopy:
    """Copy from a device to the host's memory, on a CUDA stream beside the computation and the copies the other way.

    ``there``: source on the device, which nobody may change; ``home``: pinned target.
    """

    def __init__(self, there: T, home: T) -> None:
        stream = return_stream(there.device)
        stream.wait_stream(torch.cuda.current_stream(there.device))
        with torch.cuda.stream(stream):
            home.copy_(there, non_blocking=True)
        # so that its memory is not used again before
        there.record_stream(stream)
        self._ended = stream.record_event()

    @property
    def done(self) -> bool:
        """Whether the copy has ended. Reading this property does not wait."""
        return self._ended.query()

    def wait(self) -> None:
        """Wait until the copy has ended."""
        self._ended.synchronize()


class ComingRow(NamedTuple):
    """A row of a tensor that rests on the host or in a file, while the row is being read into a buffer.

    ``buffer``: the buffer, which goes back to the pool after use; ``coming``: the transfer that fills the buffer;
    ``values``: the row's values in the buffer, valid after the transfer.
    """

    buffer: T
    coming: Transfer
    values: T


class RestingGroup:
    """Tensors of one unit and kind that rest together, outside the memory in which they are used.

    Attributes:
        ``tensors``: the tensors, whose objects stay the same while their memory changes.
        ``file``: file in which they rest; None: in the host's memory.
        ``pool``: pool of the buffers into which they are read from the file.
        ``device``: device on which they are used.
        ``size``: bytes of all tensors.
        ``home``: memory in which they rest.
        ``spare``: room for a second version of them; None if there is none.
        ``buffer``: buffer into which they were read; None if there is none.
        ``kept``: whether the buffer stays after their next use.
        ``coming``: transfer that reads them; None if there is none.
        ``leaving``: transfer that writes them back; None if there is none.
        ``in_use``: whether they are in the memory in which they are used.
        ``piece``: bytes of a piece of every transfer, such as those of one row; 0: chosen for speed.
    """

    def __init__(
        self,
        tensors: Sequence[T],
        file: TierFile | None,
        pool: BufferPool,
        piece: int = 0,
    ) -> None:
        self.tensors = list(tensors)
        self.pool, self.piece = pool, piece
        self.device = tensors[0].device
        self.starts, size = [], 0
        aligned = piece or ALIGNED
        for tensor in self.tensors:
            self.starts.append(size)
            size += -(-tensor.nbytes // aligned) * aligned
        self.file, self.size = file, size
        pool.announce(size)
        self.region, self.home = self._room()
        # room for another version, or the version before
        self.spare: tuple[Region | None, T] | None = None
        self.kept = False  # whether the buffer stays when the tensors have been used
        # what the region is read into, used in and written from
        self.buffer: T | None = None
        self.there: T | None = None  # the same on the device
        self.coming: Transfer | None = None
        self.leaving: Transfer | ReturnCopy | None = None
        self.in_use = False
        for tensor, place in zip(self.tensors, self._places(self.home), strict=True):
            if tensor.count_nonzero():  # the home is zeros
                place.copy_(tensor)
            tensor.data = place

    def _room(self) -> tuple[Region | None, T]:
        """Room for all tensors: in the file, if there is one, and as memory."""
        if self.file is None:
            return None, page_buffer(whole_pages(self.size), self.pool.pinned)
        region = self.file.region(self.size, self.piece)
        return region, region.memory

    def double(self) -> None:
        """Reserve room for a second version of the tensors, so that :meth:`put` can keep the version that was read."""
        self.spare = self.spare or self._room()

    def turn(self) -> None:
        """Make the second version of the tensors the current one, and the current version the second.

        No transfer may be under way.
        """
        assert self.spare is not None
        (self.region, self.home), self.spare = self.spare, (self.region, self.home)
        self._refer_to(self.home)

    def fetch(self) -> None:
        """Begin to read the tensors into a buffer, unless a read is under way or a buffer that holds them was kept."""
        if self.region is not None and self.coming is None:
            self.let_go()
            self.buffer = self.pool.take(self.region.size)
            self.coming = self.region.read(self.buffer)

    @property
    def whole(self) -> bool:
        """Whether no read has to be started: the tensors are in use, their buffer stays for the next use, or they are
        being read into a buffer.
        """
        return self.in_use or self.kept or self.coming is not None

    def read_row(self, index: int, row: int) -> "ComingRow":
        """Begin to read row number ``row`` of the tensor number ``index`` alone, into a buffer of its own.

        Waits until the tensors are written back, if they are on their way. The group must have been given a ``piece``.
        """
        assert self.region is not None
        if self.leaving is not None:
            self.leaving.wait()
        tensor = self.tensors[index]
        size = tensor.nbytes // len(tensor)
        begin = self.starts[index] + row * size
        first = begin // self.piece * self.piece
        last = min(-(-(begin + size) // self.piece) * self.piece, self.region.size)
        buffer = self.pool.take(last - first)
        coming = self.region.read(buffer, first)
        values = buffer[begin - first : begin - first + size].view(tensor.dtype)
        return ComingRow(buffer, coming, values.view(tensor.shape[1:]))

    def bring(self, read: bool = True, changes: bool = False) -> None:
        """Move the tensors to the memory in which they are used, and wait until they are there.

        ``read``: whether their values are needed; without it they are undefined, and the caller must write all of them.
        ``changes``: whether the caller will change them, so that an earlier write to the file must be complete.
        """
        if read:
            self.fetch()
        elif self.region is not None:
            self.settle()
            self.buffer = self.pool.take(self.region.size)
        if self.coming is not None:
            self.coming.wait()
        # of what was kept, or is still on its way back from the device
        if (changes or self.file is None) and self.leaving is not None:
            self.leaving.wait()
        memory = self.home if self.buffer is None else self.buffer
        if self.device.type != "cpu":
            memory = self.there = memory.to(self.device, non_blocking=True)
        self._refer_to(memory)
        self.in_use = True

    def put(self, changed: bool, apart: bool = False) -> None:
        """Return the tensors to where they rest, after use; write them back if they have changed.

        The call returns before the write has ended. ``changed``: whether they have changed; ``apart``: write them as
        a second version, and keep the version that was read. If the attribute ``kept`` is set, the buffer stays for
        the next use.
        """
        if changed and apart:
            self.turn()
        memory = self.home if self.buffer is None else self.buffer
        if self.there is not None and changed:
            if self.file is None:  # beside the update of the next unit
                self.leaving = ReturnCopy(self.there, memory)
            else:
                memory.copy_(self.there)
        self.there, self.in_use = None, False
        self._refer_to(self.home)
        if changed and self.region is not None and self.buffer is not None:
            self.leaving = self.region.write(self.buffer)
            self.coming = HERE if self.kept else None
        elif not self.kept:
            self.coming = None
            if self.leaving is None:
                self.let_go()
        self.kept = False

    @property
    def has_left(self) -> bool:
        """Whether the tensors are completely written back: no write of them is under way."""
        return self.leaving is None or self.leaving.done

    def let_go(self) -> None:
        """Wait until the tensors are written back. If their buffer is not in use, return it to the pool."""
        if self.leaving is not None:
            self.leaving.wait()
        self.leaving = None
        if self.buffer is not None and self.coming is None and not self.in_use:
            self.pool.give(self.buffer)
            self.buffer = None

    def settle(self) -> None:
        """Wait until all transfers of the tensors have ended, so that the tensors are where they rest.

        A buffer that was read but not used is returned to the pool.
        """
        if self.coming is not None:
            self.coming.wait()
        self.coming, self.kept = None, False
        self.let_go()

    def _places(self, memory: T) -> list[T]:
        tensors = zip(self.tensors, self.starts, strict=True)
        return [
            memory[at : at + t.nbytes].view(t.dtype).view(t.shape) for t, at in tensors
        ]

    def _refer_to(self, memory: T) -> None:
        for tensor, place in zip(self.tensors, self._places(memory), strict=True):
            tensor.data = place


@dataclass
class AccessOrder:
    """Order in which the last step used the units of the state. It predicts which unit is used next.

    A unit is a group of parameters that are updated together.

    ``following``: for each unit, the unit that was used after it; ``last``: unit that was used last.
    """

    following: dict[Hashable, Hashable] = field(default_factory=dict)
    last: Hashable = None

    def after(self, owner: Hashable) -> Hashable:
        """Record that the unit ``owner`` is used now, and return the unit that is expected next.

        Returns None if no unit has followed ``owner`` so far.
        """
        self.following[self.last], self.last = owner, owner
        return self.following.get(owner)


def _let_all_leave(tiers: "weakref.ref[Tiers]") -> None:
    # a cycle would keep the file of tiers that nobody needs any more
    if (held := tiers()) is not None:
        held._drain(0)


class Tiers(OnDevice):
    """Keeps tensors of a run in the host's memory or in a file while they are not in use.

    A unit of the state (parameters updated together) owns its tensors, which are moved by unit and kind. Units are
    updated in the same order in every step, so that from the second step on the next unit's tensors are read while the
    present unit's are in use.

    Args:
        ``places``: "device", "host" or "file" for each kind ("weights", "gradients", "moments"); other kinds are on the
            device.
        ``folder``: folder in which every rank has a file.
        ``device``: device on which tensors are used.
        ``timeout``: seconds that one transfer may take.
        ``room``: bytes of weights that may stay in memory between uses, beyond those that a step always needs.
        ``ahead``: whether tensors are read before they are used, and written while others are in use. Otherwise only
            one unit's tensors are in memory, and every transfer is waited for.
    """

    def __init__(
        self, places: Mapping[str, str], folder: str = ".", device: torch.device = CPU, timeout: float = 600,
        room: int = 0, ahead: bool = True,
    ) -> None:  # fmt: skip
        self.places = places
        self.folder = home_path(folder)
        self.timeout = timeout
        self.room, self.ahead = room, ahead
        self.pool = BufferPool(pinned=device.type == "cuda")
        self.groups = defaultdict(dict)
        self.order = AccessOrder()  # of updates that stand
        self.trials = AccessOrder()  # of those that may be taken back
        self.tried: list[RestingGroup] = []  # whose last version may be taken back
        self.leaving: deque[RestingGroup] = deque()
        # functions that say in a line how tensors were used
        self.reports: list[Callable[[], str]] = []
        self.pool.when_short = partial(_let_all_leave, weakref.ref(self))
        self._file: TierFile | None = None

    @property
    def file(self) -> TierFile:
        """This rank's file for offloaded tensors, created when the first tensors come to rest there."""
        if self._file is None:
            self._file = TierFile(self.folder, self.timeout)
        return self._file

    @property
    def activation_file(self) -> TierFile | None:
        return self.file if self.places.get("activations") == "file" else None

    @property
    def pooled(self) -> int:
        return self.pool.bytes

    @property
    def staging(self) -> Path | None:
        """Folder for the copy of the state that a save makes, or None if the copy is made in main memory."""
        return self.folder if "file" in self.places.values() else None

    def summary(self) -> str:
        return "; ".join(filter(None, (report() for report in self.reports)))

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes that transfers have moved so far: ``read`` from the file and ``written`` to it.

        Empty without a file.
        """
        return dict(self._file.bytes) if self._file is not None else {}

    @property
    def note(self) -> str:
        """Warning about the file for offloaded tensors, such as missing direct I/O; "" if there is none."""
        return self._file.note if self._file is not None else ""

    def rest(
        self, owner: Hashable, kind: str, tensors: Iterable[T], piece: int = 0
    ) -> None:
        """Let ``tensors`` rest, while they are not in use, where the setting for their kind says.

        The tensor objects stay the same. ``owner``: unit of the state (parameters updated together) to which they
        belong; ``kind``: "weights", "gradients" or "moments"; ``piece``: bytes of a piece of their transfers, such as
        a row of a tensor that is also read alone; 0: chosen for speed.
        """
        place = self.places.get(kind, "device")
        tensors = [t for t in tensors if t.numel()]
        if tensors and (
            place == "file" or (place == "host" and tensors[0].device.type != "cpu")
        ):
            self.groups[owner][kind] = RestingGroup(
                tensors, self.file if place == "file" else None, self.pool, piece
            )

    def fetch(self, owner: Hashable, *kinds: str) -> None:
        """Begin to read the tensors of some kinds of one unit from where they rest, because they will soon be used.

        ``owner``: the unit (parameters that are updated together); ``kinds``: some of "weights", "gradients" and
            "moments".

        Nothing is read yet if nothing is to be read ahead.
        """
        for kind in kinds if self.ahead else ():
            if group := self._group(owner, kind):
                group.fetch()

    def size(self, owner: Hashable, kind: str) -> int:
        """Return the bytes that some tensors take in the file, 0 if they do not rest there.

        ``owner``: the unit (parameters that are updated together) whose tensors count; ``kind``: "weights", "gradients"
        or "moments".
        """
        group = self._group(owner, kind)
        return 0 if group is None or group.region is None else group.region.size

    def keep(self, owner: Hashable, kind: str) -> None:
        """Keep some tensors in memory between their next two uses. A use is a context of :meth:`at_hand`.

        ``owner``: the unit (parameters that are updated together) whose tensors are kept; ``kind``: "weights",
        "gradients" or "moments".
        """
        if group := self._group(owner, kind):
            group.kept = True

    @contextmanager
    def at_hand(
        self,
        owner: Hashable,
        kind: str,
        changes: bool = False,
        read: bool = True,
        apart: bool = False,
    ) -> Iterator[None]:
        """Return a context in which some tensors are in the memory in which they are used. Between contexts they rest
        elsewhere.

        Args:
            ``owner``: the unit (parameters that are updated together) whose tensors are used.
            ``kind``: which of its tensors: "weights", "gradients" or "moments".
            ``changes``: whether the context may change them. They are then written back when it ends.
            ``read``: whether their values are needed. If not, they are not read, and their values are undefined at
                first.
            ``apart``: whether changed values are written as a second version, so that :meth:`undo` can go back to the
                first.

        If the context ends by an error, the values at rest stay as they were. A context inside another one for the same
        tensors does nothing.
        """
        group = self._group(owner, kind)
        if group is None or group.in_use:
            yield
            return
        group.bring(read, changes)
        done = False
        try:
            yield
            done = True
        finally:
            group.kept = group.kept and done
            group.put(changes and done, apart)
            if apart and done:
                self.tried.append(group)
            if group.leaving is not None and group.coming is None:
                self.leaving.append(group)
                self._drain(MOST_LEAVING if self.ahead else 0)

    @contextmanager
    def updating(self, owner: Hashable, behind: int = 1) -> Iterator[None]:
        """Return a context in which the unit ``owner`` is updated: all its tensors are in the memory in which they are
        used. All of them but the gradients may change.

        ``behind``: number of units updated before it whose tensors may still be in transfer back to where they rest.
        """
        if not (groups := self.groups.get(owner)):
            yield
            return
        self._drain(behind * len(groups))
        for each in self._to_read(owner, self.order):
            for group in self.groups.get(each, {}).values():
                group.fetch()
        with ExitStack() as stack:
            for kind in groups:
                changes = kind != "gradients"
                stack.enter_context(self.at_hand(owner, kind, changes=changes))
            yield

    @contextmanager
    def trying(self, owner: Hashable) -> Iterator[None]:
        """Return a context in which the tensors of the unit ``owner``, except gradients, may change on trial.

        :meth:`undo` takes the changes back, and :meth:`stand` makes them permanent.
        """
        kinds = [kind for kind in self.groups.get(owner, ()) if kind != "gradients"]
        self._drain(len(kinds))
        for each in self._to_read(owner, self.trials):
            self.fetch(each, *kinds)
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(self.at_hand(owner, kind, changes=True, apart=True))
            yield

    def _to_read(self, owner: Hashable, order: AccessOrder) -> Sequence[Hashable]:
        """Return the unit ``owner``, which is used now, and the unit that is expected next by ``order``, if its tensors
        are read ahead.
        """
        return (owner, order.after(owner))[: 1 + self.ahead]

    def stand(self) -> None:
        """Make all changes that were made in :meth:`trying` permanent: :meth:`undo` can no longer take them back."""
        self.tried.clear()

    def undo(self) -> None:
        """Take back all changes that were made in :meth:`trying` since the last :meth:`stand`."""
        while self.tried:
            group = self.tried.pop()
            group.settle()
            group.turn()

    def _drain(self, most: int) -> None:
        """Return the buffers of groups that were written, and wait for the oldest until at ``most`` so many are
        left.
        """
        while self.leaving and (len(self.leaving) > most or self.leaving[0].has_left):
            self.leaving.popleft().let_go()

    def settle(self) -> None:
        """Wait until all transfers have ended, so that every tensor has its current values where it rests."""
        for group in self._all():
            group.settle()
        self.leaving.clear()
        self.restart()

    def check(self) -> None:
        """Read all that transfers have written to the file, and compare it with the checksums made when it was written.

        All transfers must have ended. Raises :class:`TierError` if the file is damaged or cannot be read.
        """
        written = [
            group
            for group in self._all()
            if group.region is not None and group.region.compared
        ]
        for i, group in enumerate(written):
            for coming in written[i : i + 2]:
                coming.fetch()
            group.settle()

    def restart(self) -> None:
        """Declare that a step begins: the next unit to be updated is the first of the step.

        The order of units in the last step then predicts which unit to read ahead.
        """
        self.order.last = self.trials.last = None

    def forget_sums(self) -> None:
        """Drop the checksums of all tensors in the file, because resting tensors may be changed from now on."""
        for group in self._all():
            if group.region is not None:
                group.region.forget_sums()

    def _group(self, owner: Hashable, kind: str) -> RestingGroup | None:
        return self.groups.get(owner, {}).get(kind)

    def _all(self) -> Iterator[RestingGroup]:
        return (group for groups in self.groups.values() for group in groups.values())
