"""Rows of a table that rests in a file, read when asked for: the pages on which they lie, and little else.

An embedding table, or the features of a graph's nodes, may be far larger than memory while a step asks for some
thousand rows of it. A file that is mapped into memory brings them in one after the other, each with what the system
guesses will be wanted next. Here all that are asked for are made unique and sorted, those near each other are read
together, and many such runs are under way at once: gathers that go by rows (PyTorch-Direct, Min et al. 2021; GIDS,
Park et al. 2024), from a file and by the host.
"""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from weft.memory.tier_file import PAGE, TierFile, page_buffer, transfer_all

T = torch.Tensor

#: Small reads that are under way at once: a disk answers many of them in about the time of one.
DEPTH = 16

#: Pages between two rows that are rather read along: they cost less than one more call.
NEAR = 8


class Rows:
    """The table ``values``, ``[rows, ...]``, in a region of ``file``; indexed by a tensor of numbers, it gives rows.

    ``near``: see :data:`NEAR`. ``bytes`` counts, of all rows asked for so far: ``asked``, theirs; ``touched``, of the
    pages that they lie on, each once in a call; ``read``, of these and of pages between.
    """

    def __init__(self, values: T, file: TierFile, near: int = NEAR) -> None:
        self.shape, self.dtype, self.near = values.shape, values.dtype, near
        self.width = values[:1].nbytes
        self.bytes: Counter[str] = Counter()
        self.threads = ThreadPoolExecutor(DEPTH, "weft-rows")
        self.region = file.region(values.nbytes)
        self.region.write(values.reshape(-1).view(torch.uint8)).wait()
        self.region.forget_sums()  # they are of larger pieces

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: T) -> T:
        """The rows of these numbers, from 0, ``[*index, ...]``. Takes as much memory as is read, beside the result.

        Raises :class:`IndexError` for a number that is no row's.
        """
        numbers, places = index.flatten().unique(return_inverse=True)  # sorted
        if not len(numbers):
            return torch.empty(*index.shape, *self.shape[1:], dtype=self.dtype)
        if numbers[0] < 0 or numbers[-1] >= len(self):
            raise IndexError(
                f"row {int(numbers[0] if numbers[0] < 0 else numbers[-1])} of a table of {len(self)}"
            )
        begin = numbers * self.width
        # the pages of each row
        first, last = begin // PAGE, (begin + self.width - 1) // PAGE
        apart = first[1:] - last[:-1] > 1 + self.near
        edge = apart.new_ones(1)
        opens, closes = torch.cat((edge, apart)), torch.cat((apart, edge))
        start, pages = first[opens], last[closes] + 1 - first[opens]  # of each run
        place = pages.cumsum(0) - pages  # where a run comes to stand in the buffer
        buffer = page_buffer(int(pages.sum()) * PAGE)
        self._read(buffer, torch.stack((place, start, pages), dim=1) * PAGE)
        touched = int((last - first + 1).sum() - (first[1:] == last[:-1]).sum())
        self.bytes.update(
            asked=index.numel() * self.width,
            touched=touched * PAGE,
            read=buffer.numel(),
        )
        begin += ((place - start) * PAGE)[opens.cumsum(0) - 1]  # in the buffer
        width = self.width // self.dtype.itemsize
        rows = buffer.view(self.dtype).unfold(0, width, 1)[
            (begin // self.dtype.itemsize)[places]
        ]
        return rows.view(*index.shape, *self.shape[1:])

    def _read(self, buffer: T, runs: T) -> None:
        """Bring in runs: where in the buffer, from where on, how much, ``[runs, 3]``; the disk has many at a time."""
        shares = [runs[i::DEPTH].tolist() for i in range(min(DEPTH, len(runs)))]
        memory = memoryview(buffer.numpy().data)
        moves = [partial(self._load_runs, memory, share) for share in shares]
        self.region.run(moves, buffer.numel(), write=False, threads=self.threads).wait()

    def _load_runs(self, into: memoryview, runs: Sequence[Sequence[int]]) -> None:
        """Read runs of whole pages now; they are not compared with checksums."""
        file, offset = self.region.file.descriptor, self.region.offset
        for place, start, size in runs:
            transfer_all(os.preadv, file, into[place : place + size], offset + start)
