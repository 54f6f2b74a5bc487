"""Neurons of a feed-forward layer in a file, and memory for those that were active last (LLM in a flash).

A neuron is a row of ``up`` (and of ``gate``) and a column of ``down``. These lie together in the file, so that one
read fetches all of them (Alizadeh et al. 2023, 2312.11514). Texts use many of the neurons that their last tokens used,
and so memory keeps the neurons of as many of the last steps as it has room for. Only others are read, by several
threads, runs of neighbours at once, past the page cache. What a layer will probably use can be read while the layer
before it computes.
"""

import errno
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from weft.memory.kept_records import KeptRecords
from weft.memory.tier_file import Transfer, page_buffer, transfer_all

T = torch.Tensor

#: Threads that read: small reads are mostly waiting.
READERS = 8

#: Bytes of neurons on their way from the file to the memory of their layer, in each of four buffers.
STAGED = 4 << 20

#: Neurons of a layer that are read ahead before it is judged whether that helps.
TRIED = 256


@dataclass(eq=False)
class NeuronsAhead:
    """Neurons that are read before it is known that they are used.

    Attributes:
        ``records``: ascending indices of their records.
        ``memory``: where their weights are once ``transfer`` is complete, uint8 ``[neurons, size]``.
        ``transfer``: the read.
        ``valid``: whether the memory has not been given to other neurons since.
        ``held``: whether the memory is in use, so that it cannot be given to others.
    """

    records: np.ndarray
    memory: T
    transfer: Transfer
    valid: bool = True
    held: bool = False


class StagedNeurons:
    """Reads neurons' weights from a file into alternating buffers, for all layers of a model: two for neurons that are
    used at once, two for those that are read ahead.

    The weights of a neuron are one record. What is read is compared with its checksum. ``kept``: the records of all
    layers, and their checksums.

    Attributes:
        ``counts``: how many neurons tokens have used, how many were read, and how many of these were used and read
            ahead.
        ``room``: largest number of neurons in one read.
    """

    def __init__(self, kept: KeptRecords) -> None:
        self.kept, self.size = kept, kept.records.size
        self.counts: Counter[str] = Counter()
        self.room = max(1, STAGED // self.size)
        self._threads = ThreadPoolExecutor(READERS, "weft-neurons")
        buffers = page_buffer(4 * self.room * self.size).view(4, self.room, self.size)
        self._buffers = [*buffers]
        self._ahead: list[NeuronsAhead | None] = [None, None]
        self._turn = 0
        assert kept.records.region is not None
        self._start = kept.records.region.offset

    def read(self, records: np.ndarray, turn: int) -> tuple[T, Transfer]:
        """Start to read the records with the ascending indices ``records``, at most :attr:`room` of them.

        ``turn``: number of the read; even ones use the first buffer, odd ones the second. Returns the memory of the
        records, uint8 ``[records, size]``, and the transfer to wait for. Waiting raises an error if the data are
        damaged.
        """
        return self._read(records, self._buffers[turn % 2][: len(records)])

    def read_ahead(self, records: np.ndarray) -> NeuronsAhead | None:
        """Start to read the records with the ascending indices ``records``, at most :attr:`room` of them, into the
        buffer for reads ahead that was used longest ago. What it held is not valid any more. Return None if that is
        still in use.
        """
        before = self._ahead[0]
        if before is not None:
            if before.held:
                return None
            before.valid = False
            before.transfer.wait()
        memory, transfer = self._read(records, self._buffers[2 + self._turn][: len(records)])  # fmt: skip
        self._turn = 1 - self._turn
        ahead = NeuronsAhead(records, memory, transfer)
        self._ahead = [self._ahead[1], ahead]
        return ahead

    def _read(self, records: np.ndarray, memory: T) -> tuple[T, Transfer]:
        """Start to read records into ``memory``, uint8 ``[records, size]``."""
        file = self.kept.file
        self.counts["read"] += len(records)
        file.bytes["read"] += len(records) * self.size
        shares = np.array_split(np.arange(len(records)), min(READERS, len(records)))
        pieces = [
            self._threads.submit(partial(self._load, records[share], memory[share[0] : share[-1] + 1]))
            for share in shares
        ]  # fmt: skip
        what = f"reading {len(records):,} neurons of {file.name}"
        return memory, Transfer(pieces, what, file.timeout, file.remedy)

    def _load(self, records: np.ndarray, memory: T) -> None:
        """Read records, each run of neighbours at once, and compare them with their checksums."""
        view = memoryview(memory.view(-1).numpy().data)
        size, descriptor = self.size, self.kept.file.descriptor
        ends = np.flatnonzero(np.diff(records) != 1) + 1
        for first, last in zip([0, *ends], [*ends, len(records)], strict=True):
            part = view[first * size : last * size]
            start = self._start + int(records[first]) * size
            transfer_all(os.preadv, descriptor, part, start)
        sums = memory.numpy().view(np.int64).sum(1)
        if (sums != self.kept.sums[records, 0]).any():
            raise OSError(errno.EIO, "what was read is not what was written: it is damaged")  # fmt: skip


class NeuronGroup(NamedTuple):
    """Some neurons of a layer, with their weights in memory.

    Attributes:
        ``neurons``: their indices in the layer, int64 ``[neurons]``.
        ``memory``: weights as records of bytes, uint8 ``[records, size]``.
        ``records``: which of the records are those of ``neurons``, int64 ``[neurons]``.
    """

    neurons: np.ndarray
    memory: T
    records: np.ndarray


class NeuronSlots:
    """Cache in memory for the most recently used neurons of one layer.

    ``staged``: reads neurons from the file; ``first``: index of the record of the layer's first neuron; ``neurons``:
    number of neurons of the layer; ``slots``: number of neurons for which memory has room; ``device``: device of the
    memory.
    """

    def __init__(
        self, staged: StagedNeurons, first: int, neurons: int, slots: int, device: torch.device
    ) -> None:  # fmt: skip
        self.staged, self.first, self.device = staged, first, device
        slots = min(slots, neurons)
        on_cpu = device.type == "cpu"
        size = slots * staged.size
        memory = page_buffer(size) if on_cpu else torch.empty(size, dtype=torch.uint8, device=device)  # fmt: skip
        self.memory = memory[:size].view(slots, staged.size)
        self._slot = np.full(neurons, -1)  # of each neuron, -1: it is in the file alone
        self._neuron = np.full(slots, -1)  # of each slot
        self._used = np.full(slots, -1)  # the step that used it last
        self._step = 0
        self._ahead: NeuronsAhead | None = None
        self._guessed = self._right = 0

    @property
    def guessing(self) -> bool:
        """Whether it helps to read ahead: half of what was read so has been used, or little was read so yet."""
        return self._guessed < TRIED or 2 * self._right >= self._guessed

    def expect(self, neurons: np.ndarray) -> None:
        """Begin to read those of the neurons with the ascending indices ``neurons`` that are in the file alone, because
        the next call of :meth:`using` will probably ask for them.
        """
        missing = neurons[self._slot[neurons] < 0][: self.staged.room]
        if len(missing) and not (self._ahead and self._ahead.valid):
            self._ahead = self.staged.read_ahead(self.first + missing)

    def using(self, neurons: np.ndarray) -> Iterator[NeuronGroup]:
        """Yield the neurons with the ascending indices ``neurons`` in groups, with their weights.

        Neurons that are in memory come first, while others are read. The memory of a group may be used until the next
        group is requested.
        """
        self._step += 1
        self.staged.counts["used"] += len(neurons)
        slots = self._slot[neurons]
        here, missing = neurons[slots >= 0], neurons[slots < 0]
        ahead, early = self._foreseen(missing)
        missing = np.setdiff1d(missing, early, assume_unique=True)
        parts = [
            missing[i : i + self.staged.room]
            for i in range(0, len(missing), self.staged.room)
        ]
        coming = self._begin(parts, 0)
        if len(here):
            at = slots[slots >= 0]
            self._used[at] = self._step
            yield NeuronGroup(here, self.memory, at)
        if ahead is not None:
            ahead.transfer.wait()
            memory = ahead.memory.to(self.device)
            places = np.searchsorted(ahead.records, self.first + early)
            yield NeuronGroup(early, memory, places)
            self._keep(early, memory, places)
            ahead.held = False
        for turn, part in enumerate(parts):
            assert coming is not None
            memory, transfer = coming
            transfer.wait()
            coming = self._begin(parts, turn + 1)
            memory = memory.to(self.device)
            every = np.arange(len(part))
            yield NeuronGroup(part, memory, every)
            self._keep(part, memory, every)

    def _foreseen(self, missing: np.ndarray) -> tuple[NeuronsAhead | None, np.ndarray]:
        """Return which of the neurons ``missing`` are read ahead, with that read; None if none of them is."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or not ahead.valid:
            return None, missing[:0]
        early = np.intersect1d(ahead.records - self.first, missing, assume_unique=True)
        self._guessed += len(ahead.records)
        self._right += len(early)
        self.staged.counts["ahead"] += len(early)
        ahead.held = len(early) > 0
        return (ahead if ahead.held else None), early

    def _begin(self, parts: list[np.ndarray], turn: int) -> tuple[T, Transfer] | None:
        """Begin to read a part, if there is one."""
        if turn >= len(parts):
            return None
        return self.staged.read(self.first + parts[turn], turn)

    def _keep(self, neurons: np.ndarray, memory: T, records: np.ndarray) -> None:
        """Keep neurons that were read in the slots that were used longest ago. ``memory``, ``records``: where their
        weights are, as in :class:`NeuronGroup`.
        """
        count = min(len(neurons), len(self._used))
        if not count:
            return
        neurons = neurons[-count:]
        oldest = np.argpartition(self._used, count - 1)[:count]
        left = self._neuron[oldest]
        self._slot[left[left >= 0]] = -1
        self._slot[neurons], self._neuron[oldest] = oldest, neurons
        self._used[oldest] = self._step
        rows, places = (
            torch.from_numpy(each).to(self.device)
            for each in (records[-count:], oldest)
        )
        # by words, as elements are copied one by one
        kept = memory.view(torch.int64).index_select(0, rows)
        self.memory.view(torch.int64).index_copy_(0, places, kept)
