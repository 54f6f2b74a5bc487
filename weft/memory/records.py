"""Records of equal size that rest in a file or in the host's memory, and slots for the records in use.

All slots share one order of use: a record that is needed takes the slot of the record that was used longest ago (LRU),
as in SmallThinker for the experts of all layers (Song et al. 2025). Threads read beside the computation; a caller that
knows which records it will need says so ahead of time.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from weft.memory.tier_file import TierFile, Transfer, page_buffer, whole_pages

T = torch.Tensor


class HostCopy:
    """Copy from the host's memory to a device, on a CUDA stream beside the computation there.

    ``memory``: pinned source; ``into``: target on the device; ``stream``: stream of the copy.
    """

    def __init__(self, memory: T, into: T, stream: torch.cuda.Stream) -> None:
        # which may still use what is overwritten
        stream.wait_stream(torch.cuda.current_stream(into.device))
        with torch.cuda.stream(stream):
            into.copy_(memory, non_blocking=True)
        self._there, self._device = stream.record_event(), into.device

    @property
    def done(self) -> bool:
        """Whether the copy has ended. Reading this property does not wait."""
        return self._there.query()

    def cancel(self) -> bool:
        """Return False, because a copy cannot be cancelled. Reads from a file can (:meth:`Transfer.cancel`)."""
        return False

    def wait(self) -> None:
        """Make the current CUDA stream wait until the copy has ended; the calling thread does not wait."""
        torch.cuda.current_stream(self._device).wait_event(self._there)


class Records:
    """Store of records (byte strings of equal size) in a file or in the host's memory, read to a device when needed.

    ``count``: number of records; ``size``: bytes of a record, rounded up to whole pages; ``file``: the file, or None
    for the host's memory; ``device``: where records are read to.
    """

    def __init__(
        self, count: int, size: int, file: TierFile | None, device: torch.device
    ) -> None:
        self.count, self.size = count, whole_pages(size)
        self.region = None if file is None else file.region(self.count * self.size)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if file is None:
            self.memory = page_buffer(
                self.count * self.size, self._stream is not None
            ).view(count, -1)

    def read(self, index: int, into: T) -> Transfer | HostCopy:
        """Begin to read record number ``index`` into the memory ``into`` on the device (uint8 ``[size]``), and the
        records behind it if ``into`` has room for several.

        Returns the transfer.
        """
        if self.region is not None:
            # each as it was written, so that checksums are compared
            reads = [
                self.region.read(memory, at * self.size)
                for at, memory in enumerate(into.split(self.size), index)
            ]
            pieces = [piece for read in reads for piece in read.pieces]
            return replace(reads[0], pieces=pieces)
        rows = self.memory[index : index + into.numel() // self.size].flatten()
        if self._stream is not None:
            return HostCopy(rows, into, self._stream)
        into.copy_(rows)
        return Transfer((), "", 0)

    def give_up(self, coming: Transfer | HostCopy) -> bool:
        """Cancel a read unless it has begun. ``coming``: the transfer of the read. Returns whether the read was
        cancelled.
        """
        given_up = coming.cancel()
        if given_up and self.region is not None:
            self.region.file.bytes["read"] -= self.size
        return given_up

    def write(self, index: int, data: T) -> None:
        """Store ``data`` (uint8 ``[size]``) as record number ``index``, and wait until it is stored."""
        if self.region is not None:
            self.region.write(data, index * self.size).wait()
        else:
            self.memory[index].copy_(data)


class Slot(NamedTuple):
    """Memory on the device for one record.

    ``memory``: the bytes; ``coming``: transfer that reads the record into them.
    """

    memory: T
    coming: Transfer | HostCopy


class Slots:
    """Slots in a device's memory, each for one record of a store. When all slots are full, a new record replaces the
    record that was used longest ago.

    ``records``: the store; ``slots``: number of slots; ``device``: the device.

    The attribute ``counts`` is a dict of two counts. ``counts["read"]``: records whose read was begun and not
    cancelled. ``counts["awaited"]``: records for which the computation had to wait, as no other record that it needed
    was in memory.
    """

    def __init__(self, records: Records, slots: int, device: torch.device) -> None:
        self.records, self.count = records, max(1, min(slots, records.count))
        self.counts: Counter[str] = Counter()
        # what was used longest ago comes first
        self._there: OrderedDict[int, Slot] = OrderedDict()
        # of these, what is to be used and must not make room
        self._expected: set[int] = set()
        size = self.count * records.size
        memory = (
            page_buffer(size)
            if device.type == "cpu"
            else torch.empty(size, dtype=torch.uint8, device=device)
        )
        self._free = list(memory.view(self.count, -1))

    def choose(self, records: Sequence[int]) -> None:
        """Begin to read those of ``records`` that are in no slot, because they are used next.

        ``records``: numbers of the records. Reads of other records that :meth:`expect` has begun are cancelled if they
        are still queued.
        """
        for record in self._expected.difference(records):
            if self.records.give_up(self._there[record].coming):
                self._free.append(self._there.pop(record).memory)
                self.counts["read"] -= 1
        self._expected.intersection_update(records)
        self.expect(records)

    def expect(self, records: Iterable[int]) -> None:
        """Begin to read those of ``records`` (numbers) that are in no slot, because they may soon be used.

        They are read in the given order. Each is read into a slot that is free or whose record is not expected. When no
        such slot is left, the remaining records are not read yet.
        """
        for record in records:
            if record not in self._there:
                if (memory := self._room()) is None:
                    continue
                self._begin(record, memory)
            self._expected.add(record)

    def using(self, records: Sequence[int]) -> Iterator[list[tuple[int, T]]]:
        """Yield all of ``records``, given by their numbers, in groups: each record once it is in a slot. A group is a
        list of pairs: a record's number, and its memory, uint8 ``[size]``.

        Records that are already in a slot come first. The memory of a group may be used until the next group is
        requested. Raises :class:`weft.memory.nameless_file.TierError` if a record cannot be read.
        """
        self.expect(records)
        left = list(records)
        while left:
            if not (
                ready := [
                    r
                    for r in left
                    if (slot := self._there.get(r)) is not None and slot.coming.done
                ]
            ):
                ready = [self._next(left)]
                self.counts["awaited"] += 1
            for record in ready:
                self._there[record].coming.wait()
            yield [(record, self._there[record].memory) for record in ready]
            for record in ready:
                self._expected.discard(record)
                self._there.move_to_end(record)
                left.remove(record)
            self.expect(left)

    def _next(self, left: Sequence[int]) -> int:
        """Return the record of ``left`` that will be there first."""
        for record, slot in reversed(self._there.items()):
            if record in left and not slot.coming.done:
                return record
        self._begin(left[0], self._any_room(left))
        return left[0]

    def _room(self) -> T | None:
        """Memory of a slot whose record is there and not expected; None if there is no such slot."""
        if self._free:
            return self._free.pop()
        idle = (
            r
            for r, slot in self._there.items()
            if r not in self._expected and slot.coming.done
        )
        record = next(idle, None)
        return None if record is None else self._there.pop(record).memory

    def _any_room(self, left: Collection[int]) -> T:
        """Memory of a slot whose record is not in ``left``, even if it must be waited for."""
        if (slot := self._room()) is not None:
            return slot
        taken = min(
            (r for r in self._there if r not in left), key=self._expected.__contains__
        )
        self._expected.discard(taken)
        memory, coming = self._there.pop(taken)
        coming.wait()
        return memory

    def _begin(self, record: int, memory: T) -> None:
        """Begin to read a record. Until it is used it counts as used longest ago: a wrong guess makes room first."""
        self.counts["read"] += 1
        self._there[record] = Slot(memory, self.records.read(record, memory))
        self._there.move_to_end(record, last=False)
