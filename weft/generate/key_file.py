"""A file in which the keys and values of old tokens rest, and reads of them that run ahead of attention.

The layout is for storage that is fast in large sequential reads (InstInfer, Pan et al. 2024, 2409.04992). The file is
divided into *extents*, and an extent holds neighbouring *runs* of one text's cache blocks. In an extent lie layer after
layer, in a layer key head after key head, and of a head first all keys, then all values. So attention of a layer reads
a full extent in one piece. A run is the least that is written: so many blocks that a piece of one head is whole pages.

The first extents are read through the page cache of the system, which takes that memory back when a program needs it.
All others are read past it (direct I/O), into a fixed number of buffers.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from weft.generate.block_contents import LayerPart, bytes_of
from weft.memory.tier_file import (
    PAGE,
    TierFile,
    Transfer,
    page_buffer,
    transfer_all,
    whole_pages,
)

T = torch.Tensor

#: Tokens of a run, and runs of an extent.
RUN_TOKENS, RUNS = 256, 4

#: Buffers of reads that run ahead.
AHEAD = 6

#: Bytes that are read to measure the disk, about.
MEASURED = 128 << 20
#: Name of the option that names the folders, for messages.
CALLED = "--keys-in"


@dataclass(frozen=True)
class KeyLayout:
    """Where the keys and values of old tokens lie in a file. The file is divided into pieces of equal size, called
    extents. An extent has room for a fixed number of runs, which are mostly neighbours in one text. A run is a fixed
    number of cache blocks that follow one another in the text. Within an extent the layers follow one another, within a
    layer the key/value heads, and for each head first all keys, then all values.

    Attributes:
        ``layers``: what a cache block holds, layer by layer.
        ``size``: number of tokens of a cache block.
        ``blocks``: number of cache blocks of a run.
        ``runs``: number of runs for which an extent has room.
    """

    layers: tuple[LayerPart, ...]
    size: int
    blocks: int
    runs: int = RUNS

    @property
    def tokens(self) -> int:
        """Number of tokens of a run, which is a fixed number of neighbouring cache blocks of a text."""
        return self.size * self.blocks

    @property
    def block_bytes(self) -> int:
        """Number of bytes of a cache block, over all layers."""
        return bytes_of(self.layers, self.size)

    def piece(self, layer: int) -> int:
        """Return how many bytes the keys of one head of ``layer`` take in a run (:attr:`tokens` tokens). The values
        take as many.
        """
        each = self.layers[layer]
        return self.tokens * each.shape[-1] * each.dtype.itemsize

    def rows(self, layer: int) -> int:
        """Return how many contiguous sequences of vectors an extent holds for ``layer``. An extent is one of the equal
        pieces of the file. For each key/value head it has a sequence of keys and one of values, or a single one if
        the layer caches latent vectors.
        """
        each = self.layers[layer]
        return len(each.heads) * each.parts

    def layer_bytes(self, layer: int) -> int:
        """Return how many bytes the keys and values of ``layer`` take in a full extent, a piece of the file of fixed
        size.
        """
        return self.rows(layer) * self.runs * self.piece(layer)

    @cached_property
    def offsets(self) -> list[int]:
        """For each layer, the offset in bytes at which its keys and values begin in an extent, one of the equal pieces
        of the file. A last entry is the size of an extent.
        """
        starts = [0]
        for layer in range(len(self.layers)):
            starts.append(starts[-1] + whole_pages(self.layer_bytes(layer)))
        return starts

    @property
    def extent_bytes(self) -> int:
        """Size in bytes of an extent, one of the equal pieces into which the file is divided."""
        return self.offsets[-1]

    def view(self, raw: T, layer: int) -> T:
        """Return ``raw``, the bytes that an extent holds for ``layer``, as a tensor ``[heads, parts, tokens, width]``,
        without a copy. ``parts`` is 2 for keys and values, 1 for latent vectors.
        """
        each = self.layers[layer]
        values = raw[: self.layer_bytes(layer)].view(each.dtype)
        return values.view(len(each.heads), each.parts, -1, each.shape[-1])


def layout_of(layers: Sequence[LayerPart], size: int) -> KeyLayout:
    """Return the layout for ``layers`` and cache blocks of ``size`` tokens. Runs are made so long that the keys of a
    run and head take a whole number of the disk's pages in every layer.
    """
    blocks = max(1, RUN_TOKENS // size)
    while any(KeyLayout((each,), size, blocks).piece(0) % PAGE for each in layers):
        blocks *= 2
    return KeyLayout(tuple(layers), size, blocks)


class KeyRead(NamedTuple):
    """A read of keys and values from the file (:class:`KeyLayout`): those of one layer in the first ``runs`` runs of an
    extent. ``extent`` and ``layer`` are numbers from 0.
    """

    layer: int
    extent: int
    runs: int


class PendingRead(NamedTuple):
    """A read of keys and values that was begun and has not ended: what is read, the running transfer, and the buffer
    into which it reads.
    """

    read: KeyRead
    transfer: Transfer
    buffer: T


class KeyFile:
    """A nameless file in ``folder`` for keys and values of old tokens, with room for ``extents`` extents, pieces of
    equal size (:class:`KeyLayout`). Its room on the disk is reserved at once. ``cached``: number of extents, from the
    first one on, that are read through the system's page cache; the others are read without that cache. Raises
    :class:`TierError` if the folder cannot be used, or its disk is full.

    Attributes:
        ``calls``: number of reads without the page cache that were begun so far.
        ``unused``: bytes that were read ahead and then not needed.
        ``cached_bytes``: bytes that were read through the page cache.
    """

    def __init__(
        self, folder: Path, layout: KeyLayout, extents: int, cached: int
    ) -> None:
        self.layout, self.cached = layout, cached
        self.file = TierFile(folder, called=CALLED)
        self.region = self.file.region(layout.extent_bytes * extents)
        self.calls = self.unused = self.cached_bytes = 0
        self._room = max(
            layout.layer_bytes(layer) for layer in range(len(layout.layers))
        )
        self._free: list[T] = []
        self._buffers = 0
        self._pending: deque[PendingRead] = deque()
        self._staged: T | None = None

    def start_of(self, extent: int, layer: int) -> int:
        """Return the offset in bytes, from the beginning of the file, at which the keys of ``layer`` begin in the
        extent number ``extent``.
        """
        return extent * self.layout.extent_bytes + self.layout.offsets[layer]

    def write(self, extent: int, run: int, rows: T) -> None:
        """Write cache blocks to the file, as the run number ``run`` of the extent number ``extent``
        (:class:`KeyLayout`).

        ``rows``: contents of at most as many blocks as a run has, uint8 ``[blocks, bytes]``, each as
        :func:`weft.generate.block_contents.read_pages` returns it.
        """
        self.forget(extent, run)
        layout, at, moves, size = self.layout, 0, [], 0
        for number, each in enumerate(layout.layers):
            end = at + each.nbytes(layout.size)
            values = rows[:, at:end].contiguous().view(each.dtype)
            # [heads, parts, blocks, tokens, width]
            values = values.view(len(rows), *each.extents(layout.size)).permute(
                3, 1, 0, 2, 4
            )
            piece, count = layout.piece(number), layout.rows(number)
            start = self.start_of(extent, number)
            if extent < self.cached:
                raw = self.region.memory[start : start + layout.layer_bytes(number)]
                place = layout.view(raw, number).unflatten(
                    2, (layout.runs, layout.blocks, layout.size)
                )
                place[:, :, run, : len(rows)] = values
            else:
                staged = self._staging()[size : size + count * piece]
                shape = (
                    len(each.heads),
                    each.parts,
                    layout.blocks,
                    layout.size,
                    each.shape[-1],
                )
                staged.view(each.dtype).view(shape)[:, :, : len(rows)] = values
                for row in range(count):
                    memory = memoryview(
                        staged[row * piece : (row + 1) * piece].numpy().data
                    )
                    there = start + (row * layout.runs + run) * piece
                    moves.append(
                        partial(
                            transfer_all,
                            os.pwritev,
                            self.file.descriptor,
                            memory,
                            self.region.offset + there,
                        )
                    )
                size += count * piece
            at = end
        if moves:
            self.region.run(moves, size, write=True).wait()

    def fetch(self, extent: int, run: int, blocks: int) -> T:
        """Read cache blocks back from the file and return them: the first ``blocks`` blocks of the run number ``run``
        in the extent number ``extent``, uint8 ``[blocks, bytes]``.
        """
        layout, parts = self.layout, []
        reads = [KeyRead(layer, extent, run + 1) for layer in range(len(layout.layers))]
        for read, held in zip(reads, self.stream(reads, ()), strict=True):
            each = layout.layers[read.layer]
            runs = held.unflatten(2, (layout.runs, layout.blocks, layout.size))
            # [blocks, parts, tokens, heads, width]
            values = runs[:, :, run, :blocks].permute(2, 1, 3, 0, 4).contiguous()
            parts.append(values.flatten(1).view(torch.uint8))
            assert values.dtype == each.dtype
        return torch.cat(parts, 1)

    def stream(
        self, wanted: Sequence[KeyRead], later: Iterable[KeyRead]
    ) -> Iterator[T]:
        """Yield the keys and values for each of the reads ``wanted``, in order: ``[heads, parts, tokens of an extent,
        width]``, valid until the next item is yielded. Only the tokens of the first ``runs`` runs, for which the read
        asks, are defined. ``later``: the reads that will probably be wanted next; they are begun as soon as buffers are
        free.
        """
        direct = (
            read
            for read in (*wanted, *islice(later, AHEAD))
            if read.extent >= self.cached
        )
        expected = deque(direct)
        self._align(expected)
        for read in wanted:
            start, size = (
                self.start_of(read.extent, read.layer),
                self.layout.layer_bytes(read.layer),
            )
            if read.extent < self.cached:
                self.cached_bytes += size // self.layout.runs * read.runs
                yield self.layout.view(
                    self.region.memory[start : start + size], read.layer
                )
                continue
            pending = self._pending.popleft()
            pending.transfer.wait()
            yield self.layout.view(pending.buffer, read.layer)
            self._free.append(pending.buffer)
            expected.popleft()
            self._fill(expected)

    def forget(self, extent: int, run: int) -> None:
        """Discard reads that were begun in advance, because the run number ``run`` of the extent number ``extent`` is
        about to be overwritten. The first discarded read is the first one that includes this run; all reads after it
        are discarded too.
        """
        stale = (
            read.extent == extent and read.runs > run for read, *_ in self._pending
        )
        self._drop(
            next(
                (at for at, is_stale in enumerate(stale) if is_stale),
                len(self._pending),
            )
        )

    def _align(self, expected: Sequence[KeyRead]) -> None:
        """Let the reads under way be the first ones of ``expected``."""
        pairs = zip((pending.read for pending in self._pending), expected, strict=False)
        same = next(
            (at for at, (a, b) in enumerate(pairs) if a != b),
            min(len(self._pending), len(expected)),
        )
        self._drop(same)
        self._fill(expected)

    def _drop(self, first: int) -> None:
        """Drop all reads under way from the one number ``first`` on."""
        while len(self._pending) > first:
            read, transfer, buffer = self._pending.pop()
            if not transfer.cancel():
                transfer.wait()
                self.unused += (
                    self.layout.layer_bytes(read.layer) // self.layout.runs * read.runs
                )
            self._free.append(buffer)

    def _fill(self, expected: Sequence[KeyRead]) -> None:
        """Begin further reads of ``expected`` while there are buffers."""
        for read in islice(expected, len(self._pending), AHEAD):
            self._pending.append(self._begin(read))

    def _begin(self, read: KeyRead) -> PendingRead:
        if self._free:
            buffer = self._free.pop()
        else:
            buffer = page_buffer(self._room)
            self._buffers += 1
        layout, start = self.layout, self.start_of(read.extent, read.layer)
        step = layout.runs * layout.piece(read.layer)
        if read.runs == layout.runs:
            ranges = [(0, layout.layer_bytes(read.layer))]
        else:
            size = read.runs * layout.piece(read.layer)
            ranges = [(row * step, size) for row in range(layout.rows(read.layer))]
        moves = [
            partial(transfer_all, os.preadv, self.file.descriptor, memoryview(buffer[at : at + size].numpy().data),
                    self.region.offset + start + at)
            for at, size in ranges
        ]  # fmt: skip
        self.calls += len(moves)
        total = sum(size for _, size in ranges)
        return PendingRead(read, self.region.run(moves, total, write=False), buffer)

    def _staging(self) -> T:
        if self._staged is None:
            layers = range(len(self.layout.layers))
            self._staged = page_buffer(
                sum(self.layout.rows(i) * self.layout.piece(i) for i in layers)
            )
        return self._staged

    def measure(self) -> float:
        """Measure how fast the disk reads some layers of some extents without the page cache; return the bytes per
        second. The measured pieces of the file are overwritten, so call this before the file is used.
        """
        extents = range(self.cached, self.region.size // self.layout.extent_bytes)
        layers = range(len(self.layout.layers))
        reads = [
            KeyRead(layer, extent, self.layout.runs)
            for extent in islice(extents, 4)
            for layer in layers
        ]
        reads = reads[: max(1, MEASURED // self._room)]
        filler = page_buffer(self._room).fill_(1)
        for read in reads:  # what was never written is not read from the disk
            start = self.start_of(read.extent, read.layer)
            size = self.layout.layer_bytes(read.layer)
            move = partial(transfer_all, os.pwritev, self.file.descriptor, memoryview(filler[:size].numpy().data),
                           self.region.offset + start)  # fmt: skip
            self.region.run([move], size, write=True).wait()
        begun = perf_counter()
        for _ in self.stream(reads, ()):
            pass
        seconds = perf_counter() - begun
        return sum(self.layout.layer_bytes(read.layer) for read in reads) / max(
            seconds, 1e-9
        )
