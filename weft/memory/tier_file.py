"""State in a file: read and written past the page cache (direct I/O), through buffers in memory.

The file has no name, so that a crash leaves nothing behind and no two runs can share it. Its regions are also memory of
the process, so that a checkpoint or a proof, which look at resting tensors now and then, need not know of it. Steps use
transfers between regions and page-aligned buffers: two threads, pieces of some MiB.
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
from weft.memory.pinned import PinnedPages, pin
from weft.memory.transfer_threads import Threads
from weft.paths import home_path, real_path

T = torch.Tensor

#: Offsets, lengths and addresses of direct I/O are multiples of this.
PAGE = mmap.PAGESIZE

#: Bytes of one system call, and system calls at a time: more of either is not faster.
PIECE, THREADS = 4 << 20, 2

#: The least bytes of a piece where threads share a transfer of less than a whole piece each.
SMALL = 512 << 10

#: Users of buffers of one size from which on these are kept.
COMMON = 3

#: Bytes of a new buffer from which on idle memory is freed first: mapping that again is cheap beside it.
LARGE = 64 << 20


class DiskHangs(TierError):
    """Error of a transfer to or from a file that has not ended within its time limit."""

    hangs = True


def whole_pages(size: int) -> int:
    """Return ``size`` in bytes, rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def piece_size(size: int) -> int:
    """Return the bytes of each piece but the last in which a transfer of ``size`` bytes is made."""
    return min(PIECE, max(SMALL, whole_pages(-(-size // THREADS))))


def page_buffer(size: int, pinned: bool = False) -> T:
    """Allocate ``size`` bytes of the host's memory that begin at a page boundary, as a uint8 tensor.

    ``pinned``: allocate them for copies to and from CUDA devices. PyTorch's own allocator of pinned memory rounds to
    powers of two (MemAscend, 2025). Raises :class:`TierError` if there is no memory.
    """
    private = (
        {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
        if hasattr(mmap, "MAP_PRIVATE")
        else {}
    )
    try:
        memory = PinnedPages(-1, max(PAGE, size), **private)
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
        pin(buffer)
        memory.pinned_at = buffer.data_ptr()
    return buffer[:size]


class BufferPool:
    """Pool of reusable buffers. Each size has its own buffers, so that small tensors do not occupy large buffers.

    Groups of tensors announce the size of buffer that they will use (:meth:`announce`). A buffer is freed after use if
    fewer than :data:`COMMON` groups have announced its size, unless buffers are pinned.

    Attributes:
        ``pinned``: whether buffers are pinned for copies to and from CUDA devices.
        ``bytes``: bytes of all buffers, in use or not.
        ``most``: the peak of ``bytes``.
        ``when_short``: function that the pool calls when memory runs out. It waits for buffers whose content is still
            being written to a file, and gives them back to the pool.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self.bytes = 0
        self.most = 0
        self.when_short: Callable[[], None] = lambda: None
        self._free: dict[int, list[T]] = defaultdict(list)
        self._users: Counter[int] = Counter()

    def announce(self, size: int) -> None:
        """Count one more group of tensors that will use buffers of ``size`` bytes.

        Buffers of a size that many groups use are kept after use.
        """
        self._users[whole_pages(size)] += 1

    def take(self, size: int) -> T:
        """Return a buffer of at least ``size`` bytes (uint8, whole pages) with undefined content."""
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
        """Free idle buffers, here and in the heap."""
        self.bytes -= sum(size * len(buffers) for size, buffers in self._free.items())
        self._free.clear()
        give_heap_back()

    def give(self, buffer: T) -> None:
        """Return ``buffer`` to the pool, or free it if it is not pinned and few groups of tensors use its size."""
        if self._users[buffer.numel()] < COMMON and not self.pinned:
            self.bytes -= buffer.numel()
        else:
            self._free[buffer.numel()].append(buffer)


@dataclass
class Transfer:
    """Transfer to or from a file that runs in threads, in pieces. It is complete after :meth:`wait`.

    ``pieces``: future of each piece; ``what``: words for the transfer in error messages; ``timeout``: seconds to wait
    for a piece; ``remedy``: what error messages advise.
    """

    pieces: Sequence[Future[None]]
    what: str
    timeout: float
    remedy: str = "choose a folder on another disk"

    def wait(self) -> None:
        """Wait until the transfer is complete.

        Raises :class:`TierError`, which names the file, if a piece fails or takes longer than ``timeout`` seconds.
        """
        try:
            for piece in self.pieces:
                piece.result(self.timeout)
        except FutureTimeout:
            raise DiskHangs(
                f"{self.what} has taken {self.timeout:g} s: the disk does not answer"
            ) from None
        except OSError as error:
            raise TierError(
                f"{self.what} failed: {error.strerror or error}; {self.remedy}"
            ) from None

    @property
    def done(self) -> bool:
        """Whether all pieces of the transfer have ended."""
        return all(piece.done() for piece in self.pieces)

    def cancel(self) -> bool:
        """Cancel the transfer if it has not begun. Returns whether it was cancelled."""
        if not self.pieces or self.pieces[0].running() or self.pieces[0].done():
            return False
        for piece in reversed(self.pieces):
            if not piece.cancel():  # it has begun after all
                piece.exception(self.timeout)
        return True


@dataclass(eq=False)
class Region:
    """Region of a file: a contiguous range of the file's bytes, in which offloaded tensors are stored.

    Attributes:
        ``file``: the file.
        ``offset``: byte of the file at which the region begins.
        ``size``: bytes of the region.
        ``memory``: the region's bytes mapped into this process, uint8; empty in a file that an earlier process wrote.
        ``sums``: checksums of the pieces that were written last, by the byte of the region at which they begin.
        ``piece``: bytes of a piece of every transfer; 0: chosen for speed.

    While a transfer to or from the region runs, nothing else may change its bytes: neither another transfer nor a write
    to ``memory``.
    """

    file: "TierFile"
    offset: int
    size: int
    memory: T
    sums: dict[int, int] = field(default_factory=dict)
    piece: int = 0

    def read(self, into: T, start: int = 0) -> Transfer:
        """Begin to read into the buffer ``into`` (whole pages), from byte ``start`` of the region on.

        Returns the transfer.
        """
        return self._transfer(into, start, write=False)

    def write(self, data: T, start: int = 0) -> Transfer:
        """Begin to write the buffer ``data`` (whole pages), from byte ``start`` of the region on.

        Returns the transfer.
        """
        return self._transfer(data, start, write=True)

    def forget_sums(self) -> None:
        """Drop the checksums of what was written, because the mapped memory may be changed from now on."""
        self.sums.clear()

    def _transfer(self, data: T, start: int, write: bool) -> Transfer:
        assert start + data.numel() <= self.size
        piece = self.piece or piece_size(data.numel())
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
        """Run several calls of :meth:`store` or :meth:`load` in threads, as one transfer.

        ``moves``: the calls; ``size``: bytes of all of them; ``write``: whether they are calls of :meth:`store`;
        ``threads``: pool that runs them (default: the file's threads).
        """
        self.file.bytes["written" if write else "read"] += size
        what = f"{'writing' if write else 'reading'} {size:,} bytes of {self.file.name}"
        submit = (
            threads.submit
            if threads
            else partial(self.file.threads.submit, urgent=not write)
        )
        pieces = [submit(move) for move in moves]
        return Transfer(pieces, what, self.file.timeout, self.file.remedy)

    def load(self, into: T, start: int) -> None:
        """Read into the tensor ``into``, from byte ``start`` of the region on, and return when all is read.

        If ``into`` is not whole pages in the host's memory, the bytes pass through pages that belong to the thread.
        Raises OSError if the bytes are not those that were written.
        """
        assert not start % PAGE
        pages = self.file.pages_for(into)
        transfer_all(
            os.preadv,
            self.file.descriptor,
            memoryview(pages.numpy().data),
            self.offset + start,
        )
        if self.sums.get(start, total := _sum(pages)) != total:
            raise OSError(
                errno.EIO,
                f"what was read at {self.offset + start:,} is not what was written: it is damaged",
            )
        if pages is not into:
            into.copy_(pages[: into.numel()])

    @property
    def compared(self) -> bool:
        """Whether reads are compared with checksums, because checksums of the written bytes are known."""
        return bool(self.sums)

    def store(self, data: T, start: int) -> None:
        """Write the tensor ``data``, from byte ``start`` of the region on, and return when all is written.

        If ``data`` is not whole pages in the host's memory, the bytes pass through pages that belong to the thread.
        """
        assert not start % PAGE
        pages = self.file.pages_for(data)
        if pages is not data:
            pages[: data.numel()].copy_(data)
        self.sums.pop(start, None)
        transfer_all(
            os.pwritev,
            self.file.descriptor,
            memoryview(pages.numpy().data),
            self.offset + start,
        )
        self.sums[start] = _sum(pages)


def transfer_all(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    memory: memoryview,
    offset: int,
) -> None:
    """Repeat a system call until all of ``memory`` is transferred, as one call may transfer less than was asked for.

    ``call``: ``preadv`` or ``pwritev``; ``descriptor``: descriptor of the file; ``offset``: first byte in the file.
    Raises OSError if the file ends too early.
    """
    while memory:
        done = call(descriptor, [memory], offset)
        if not done:
            raise OSError(errno.EIO, f"the file ends at {offset:,}")
        memory, offset = memory[done:], offset + done


def _sum(data: T) -> int:
    # PyTorch's takes twice as long, and reads wait for it
    return int(np.add.reduce(data.numpy().view(np.int64)))


class TierFile:
    """File for the offloaded tensors of one rank. It grows by regions, and vanishes when no process has it open.

    :meth:`keep` gives the file a name, under which later processes can open it to read. ``kept``: such a file, or None
    for a new one.

    Attributes:
        ``folder``: folder of the file.
        ``remedy``: what error messages advise when a transfer fails.
        ``timeout``: seconds that a transfer may take.
        ``called``: setting that names the folder, for messages.
        ``bytes``: bytes that transfers have moved so far, by ``"read"`` and ``"written"``.
        ``note``: warning that the file goes through the page cache, because its file system has no direct I/O, or that
            the file lies in memory; "" if there is none.
    """

    def __init__(
        self, folder: Path, timeout: float = 600, called: str = "memory.folder", kept: Path | None = None
    ) -> None:  # fmt: skip
        folder = home_path(folder)
        self.name = f"{called} = {str(folder)!r}"
        self.folder = folder
        self.timeout = timeout
        self.size = 0
        self.bytes: Counter[str] = Counter()
        self.remedy = Transfer.remedy
        self._grows = kept is None
        if kept is None:
            self._file = nameless_file(folder, self.name)
        else:
            self._file = _opened(kept)
            self.remedy = f"remove {kept}, which the next start writes again"
        self.note, self.descriptor = "", self._file
        try:
            mode = os.O_RDWR if self._grows else os.O_RDONLY
            self.descriptor = os.open(f"/proc/self/fd/{self._file}", mode | os.O_DIRECT)
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
        """Return ``data`` itself if direct I/O accepts its memory, else whole pages with room for its bytes.

        The pages belong to the calling thread, and are valid until its next call.
        """
        if not (data.is_cuda or data.data_ptr() % PAGE or data.numel() % PAGE):
            return data
        room = whole_pages(data.numel())
        own = getattr(self._own, "pages", None)
        if own is None or own.numel() < room:
            own = self._own.pages = page_buffer(max(room, PIECE), data.is_cuda)
        return own[:room]

    def region(self, size: int, piece: int = 0) -> Region:
        """Reserve ``size`` bytes, filled with zeros, at the end of the file, and return them as a region.

        Of a file that an earlier process wrote, the next ``size`` bytes are the region. ``piece``: bytes of a piece of
        its transfers, whole pages; 0: chosen for speed.

        Raises :class:`TierError` if the disk is full.
        """
        room, start = whole_pages(max(1, size)), self.size
        if not self._grows:
            self.size += room
            return Region(self, start, room, torch.empty(0, dtype=torch.uint8))
        where = f"in {self.name}"
        if start:
            where = f"more in {self.name}, beside {start:,} of its own"
        memory = reserve(self._file, start, room, where)
        self.size += room
        mapped = torch.frombuffer(memory, dtype=torch.uint8)
        return Region(self, start, room, mapped, piece=piece)

    def keep(self, path: Path) -> bool:
        """Give the file the path ``path``, which must be in its folder, once all that was written is on the disk.

        Until then the file has no name, so a process that ends earlier leaves nothing behind. Returns whether a file
        called ``path`` exists afterwards: this file, or one that another process has made with the same content. The
        result is False on file systems that cannot name an open file.
        """
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(self._file)
            os.link(f"/proc/self/fd/{self._file}", path, src_dir_fd=folder)
        except OSError:
            return path.exists()
        finally:
            os.close(folder)
        return True


def _opened(kept: Path) -> int:
    """Return a descriptor with which the file ``kept`` can be read."""
    try:
        return os.open(kept, os.O_RDONLY)
    except OSError as error:
        raise TierError(f"{kept} cannot be read: {error.strerror or error}") from None


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _kind_of(folder: Path) -> str:
    """Return the type of the file system of a folder; empty if it is not known."""
    mounts = {disk.mountpoint: disk.fstype for disk in psutil.disk_partitions(all=True)}
    places = (real_path(folder), *real_path(folder).parents)
    return next((mounts[str(place)] for place in places if str(place) in mounts), "")
