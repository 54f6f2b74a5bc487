"""State in a file: read and written past the page cache (direct I/O), through buffers in memory.

The file has no name, so that nothing is left of it after a crash and no two runs can share one. Its regions are memory
of the process, too, so that who looks at what rests there now and then, a checkpoint or a proof, need not know of it.
What happens in every step goes by transfers between regions and page-aligned buffers: two threads, pieces of some MiB.
"""

import errno
import mmap
import os
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch

from weft.memory.heap import give_heap_back
from weft.memory.nameless_file import TierError, nameless_file, reserve
from weft.memory.transfer_threads import Threads

T = torch.Tensor

#: Offsets, lengths and addresses of direct I/O are multiples of this.
PAGE = mmap.PAGESIZE

#: Bytes of one call to the system, of which there are :data:`THREADS` at a time: more of either is not faster.
PIECE, THREADS = 4 << 20, 2

#: What is less than a piece for every thread is shared by them, so that it is there as soon as can be; not less each.
SMALL = 512 << 10

#: So many who need buffers of one size keep these.
COMMON = 3

#: Before so many bytes are taken anew, what is idle is handed back: mapping that again is little beside them.
LARGE = 64 << 20


class DiskHangs(TierError):
    """A transfer does not end."""

    hangs = True


def whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def page_buffer(size: int, pinned: bool = False) -> T:
    """Just so many bytes of memory that begins at a page, uint8; ``pinned``: for copies to and from CUDA devices.

    PyTorch's own allocator of pinned memory rounds to powers of two (MemAscend, 2025).
    """
    private = (
        {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
        if hasattr(mmap, "MAP_PRIVATE")
        else {}
    )
    try:
        memory = mmap.mmap(-1, max(PAGE, size), **private)
    except OSError as error:
        raise TierError(
            f"no memory for a buffer of {size:,} bytes: {error.strerror or error}"
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Direct I/O then looks up far fewer pages: twice as fast here, at a quarter of the processor time.
        with suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    if pinned:
        try:
            torch.cuda.check_error(
                torch.cuda.cudart().cudaHostRegister(
                    buffer.data_ptr(), buffer.numel(), 0
                )
            )
        except RuntimeError as error:
            # Copies through other memory would go on, at a third of the speed, without a word.
            raise TierError(
                f"{size:,} bytes of the host's memory cannot be pinned for copies: {error}"
            ) from None
    return buffer[:size]


class BufferPool:
    """Buffers by size, used again: a unit's shape has slots of its own, so that no room is lost to the largest.

    A size that fewer than :data:`COMMON` have :meth:`announced` is not kept: an embedding's, say, used twice a step.
    ``bytes`` is how much there is of all, in use or not, and ``most`` how much there has been. ``when_short`` is called
    where memory ends, to give back buffers whose content is still on its way to the disk.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self.bytes = 0
        self.most = 0
        self.when_short: Callable[[], None] = lambda: None
        self._free: dict[int, list[T]] = defaultdict(list)
        self._users: Counter[int] = Counter()

    def announce(self, size: int) -> None:
        """There is one more that will need buffers of ``size`` bytes, again and again."""
        self._users[whole_pages(size)] += 1

    def take(self, size: int) -> T:
        """A buffer of whole pages for ``size`` bytes, with anything in it."""
        room = whole_pages(size)
        if self._free[room]:
            return self._free[room].pop()
        if room >= LARGE and not self.pinned:
            self._let_go()
        try:
            buffer = page_buffer(room, self.pinned)
        except TierError:  # what is idle may be all that lacks
            if self.pinned:
                raise
            self.when_short()
            self._let_go()
            buffer = page_buffer(room, self.pinned)
        self.bytes += room
        self.most = max(self.most, self.bytes)
        return buffer

    def _let_go(self) -> None:
        """Hand back what is idle, here and in the heap."""
        self.bytes -= sum(size * len(buffers) for size, buffers in self._free.items())
        self._free.clear()
        give_heap_back()

    def give(self, buffer: T) -> None:
        if self._users[buffer.numel()] < COMMON and not self.pinned:
            self.bytes -= buffer.numel()
        else:
            self._free[buffer.numel()].append(buffer)


@dataclass
class Transfer:
    """Pieces that are being read or written; they are there, or gone, after :meth:`wait`."""

    pieces: Sequence[Future[None]]
    what: str
    timeout: float

    def wait(self) -> None:
        """Raises :class:`TierError`, which names the file, where a piece failed or takes longer than the limit."""
        try:
            for piece in self.pieces:
                piece.result(self.timeout)
        except FutureTimeout:
            raise DiskHangs(
                f"{self.what} has taken {self.timeout:g} s: the disk does not answer"
            ) from None
        except OSError as error:
            raise TierError(
                f"{self.what} failed: {error.strerror or error}; choose a folder on another disk"
            ) from None

    @property
    def done(self) -> bool:
        return all(piece.done() for piece in self.pieces)

    def cancel(self) -> bool:
        """Give it up if it has not begun; returns whether it has been."""
        if not self.pieces or self.pieces[0].running() or self.pieces[0].done():
            return False
        for piece in reversed(self.pieces):
            if not piece.cancel():  # it has begun after all
                piece.exception(self.timeout)
        return True


@dataclass(eq=False)
class Region:
    """So many bytes of a tier's file. ``memory``: the same bytes as memory of this process, uint8.

    A transfer may not overlap with another one, or with a use of the memory, that changes the same bytes.
    """

    file: "TierFile"
    offset: int
    size: int
    memory: T
    # of the pieces written last, by where they begin
    _sums: dict[int, int] = field(default_factory=dict)

    def read(self, into: T, start: int = 0) -> Transfer:
        """Bring what is in the file from ``start`` on into a buffer of whole pages."""
        return self._transfer(into, start, write=False)

    def write(self, data: T, start: int = 0) -> Transfer:
        """Put a buffer of whole pages into the file from ``start`` on."""
        return self._transfer(data, start, write=True)

    def forget_sums(self) -> None:
        """The memory may be written to from now on: what is read next is not compared with what was written."""
        self._sums.clear()

    def _transfer(self, data: T, start: int, write: bool) -> Transfer:
        assert start + data.numel() <= self.size
        piece = min(PIECE, max(SMALL, whole_pages(-(-data.numel() // THREADS))))
        move, at = self.store if write else self.load, range(0, data.numel(), piece)
        return self.run(
            [partial(move, data[i : i + piece], start + i) for i in at],
            data.numel(),
            write,
        )

    def run(
        self,
        moves: Iterable[Callable[[], None]],
        size: int,
        write: bool,
        threads: ThreadPoolExecutor | None = None,
    ) -> Transfer:
        """Have the file's threads, or others, make ``moves`` of so many bytes together: loads or stores."""
        self.file.bytes["written" if write else "read"] += size
        what = f"{'writing' if write else 'reading'} {size:,} bytes of {self.file.name}"
        submit = (
            threads.submit
            if threads
            else partial(self.file.threads.submit, urgent=not write)
        )
        return Transfer([submit(move) for move in moves], what, self.file.timeout)

    def load(self, into: T, start: int) -> None:
        """Read bytes at once. What is not whole pages, or not on the host, goes through pages of the thread's own."""
        assert not start % PAGE
        pages = self.file.pages_for(into)
        _whole(
            os.preadv,
            self.file.descriptor,
            memoryview(pages.numpy().data),
            self.offset + start,
        )
        if self._sums.get(start, total := _sum(pages)) != total:
            raise OSError(
                errno.EIO,
                f"what was read at {self.offset + start:,} is not what was written: it is damaged",
            )
        if pages is not into:
            into.copy_(pages[: into.numel()])

    def load_runs(self, into: memoryview, runs: Iterable[tuple[int, int, int]]) -> None:
        """Read many pieces at once: for each, where it comes to stand, from where on, and how much, in whole pages.

        They are not compared with what was written.
        """
        for place, start, size in runs:
            _whole(
                os.preadv,
                self.file.descriptor,
                into[place : place + size],
                self.offset + start,
            )

    @property
    def compared(self) -> bool:
        """Whether what is read next is compared with what was written."""
        return bool(self._sums)

    def store(self, data: T, start: int) -> None:
        """Write bytes at once, likewise."""
        assert not start % PAGE
        pages = self.file.pages_for(data)
        if pages is not data:
            pages[: data.numel()].copy_(data)
        self._sums.pop(start, None)
        _whole(
            os.pwritev,
            self.file.descriptor,
            memoryview(pages.numpy().data),
            self.offset + start,
        )
        self._sums[start] = _sum(pages)


def _whole(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    memory: memoryview,
    offset: int,
) -> None:
    """Repeat a call until all of ``memory`` is through: the system may do less than it is asked."""
    while memory:
        done = call(descriptor, [memory], offset)
        if not done:
            raise OSError(errno.EIO, f"the file ends at {offset:,}")
        memory, offset = memory[done:], offset + done


def _sum(data: T) -> int:
    # PyTorch's takes twice as long, and reads wait for it
    return int(np.add.reduce(data.numpy().view(np.int64)))


class TierFile:
    """A file in ``folder`` for the state of one rank; it grows by regions and is gone with the last that uses one.

    ``bytes`` counts what transfers have ``read`` and ``written``. ``note`` says so where the file is not what one
    expects: read and written through the page cache, as its file system cannot do otherwise, or not on a disk at all.
    ``timeout``: seconds for a transfer. ``called``: what the user knows the folder by.
    """

    def __init__(
        self, folder: Path, timeout: float = 600, called: str = "memory.folder"
    ) -> None:
        folder = folder.expanduser()
        self.name = f"{called} = {str(folder)!r}"
        self.folder = folder
        self.timeout = timeout
        self.size = 0
        self.bytes: Counter[str] = Counter()
        self._file = nameless_file(folder, self.name)
        self.note, self.descriptor = "", self._file
        try:
            self.descriptor = os.open(
                f"/proc/self/fd/{self._file}", os.O_RDWR | os.O_DIRECT
            )
        except (OSError, AttributeError):
            self.note = (
                f"{self.name} knows no direct I/O: what rests there goes through the page cache, "
                "slower, and takes memory if there is some; a folder on a local disk is better"
            )
        if _kind_of(folder) in ("tmpfs", "ramfs"):
            self.note = (
                f"{self.name} is in memory itself; a folder on a local disk is better"
            )
        self.threads, self._own = Threads(THREADS, "weft-tier"), threading.local()
        self.close = weakref.finalize(self, _close, {self._file, self.descriptor})

    def pages_for(self, data: T) -> T:
        """``data`` itself if direct I/O takes it, or else as many whole pages of this thread's, until it asks again."""
        if not (data.is_cuda or data.data_ptr() % PAGE or data.numel() % PAGE):
            return data
        room = whole_pages(data.numel())
        own = getattr(self._own, "pages", None)
        if own is None or own.numel() < room:
            own = self._own.pages = page_buffer(max(room, PIECE), data.is_cuda)
        return own[:room]

    def region(self, size: int) -> Region:
        """New room in the file, zeros. Raises :class:`TierError` if the disk has none."""
        room = whole_pages(max(1, size))
        where = (
            f"more in {self.name}, beside {self.size:,} of its own"
            if self.size
            else f"in {self.name}"
        )
        memory = reserve(self._file, self.size, room, where)
        self.size += room
        return Region(
            self, self.size - room, room, torch.frombuffer(memory, dtype=torch.uint8)
        )


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _kind_of(folder: Path) -> str:
    """The file system that a folder is on, by name; nothing where that cannot be known."""
    mounted = {
        disk.mountpoint: disk.fstype for disk in psutil.disk_partitions(all=True)
    }
    places = [str(folder.resolve()), *map(str, folder.resolve().parents)]
    return next((mounted[place] for place in places if place in mounted), "")
