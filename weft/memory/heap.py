"""The process's own heap in the host's memory."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: glibc's numbers of M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
_TRIM, _MAP = -1, -3

#: The largest values of each.
_LIMITS = {_TRIM: 2**31 - 1, _MAP: 32 * 2**20}

#: Linux's numbers of MADV_COLLAPSE and MADV_HUGEPAGE, the bytes of a huge page, and of the smallest area that is moved.
_COLLAPSE, _HUGE_PAGES = 25, 14
_HUGE, _LARGE = 2 << 20, 8 << 20

#: Bytes from which a tensor is mapped by itself while the heap is passed by.
_PASSING = 64 << 10


def keep_heap() -> None:
    """Let this process keep the memory that it frees (glibc), except for tensors above 32 MiB.

    A step frees memory and allocates as much again. If freed memory goes back to the system, the system must map and
    zero it anew each time. That took a tenth to a fifth of a small model's step on two cores. The peak of memory stays
    the same.
    """
    for parameter, limit in _LIMITS.items():
        _limit(parameter, limit)


def _limit(parameter: int, limit: int) -> None:
    with suppress(AttributeError, OSError):  # another allocator: nothing to say to it
        ctypes.CDLL(None).mallopt(parameter, limit)


@contextmanager
def passing_by_the_heap() -> Iterator[None]:
    """Return a context in which each large tensor gets a memory mapping of its own instead of memory of the heap.

    Use it while a model is assembled whose state does not fit in memory. Without it all the state would pass through
    the heap in turn, and leave the heap large and mostly empty. Tensors of later steps would then be scattered over the
    heap, and the process would occupy twice the memory that they need.
    """
    give_heap_back()
    _limit(_MAP, _PASSING)
    try:
        yield
    finally:
        _limit(_MAP, _LIMITS[_MAP])
        give_heap_back()


def give_heap_back() -> None:
    """Return the heap's free memory to the system.

    This is done after a large model has been assembled, and when memory runs out. Steps keep the memory that they free,
    since mapping it again would take a third of their time.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def use_huge_pages() -> None:
    """Move large areas of this process's memory to huge pages (Linux), so that fewer addresses have to be looked up.

    A product of few rows reads each weight once, and looking up addresses of small pages took a sixth of its time. Call
    this once all weights are loaded and will not move any more: the memory is copied once, and its total size does not
    change. Where the system has no huge pages to give, nothing changes.
    """
    with suppress(AttributeError, OSError, ValueError):
        advise = ctypes.CDLL(None).madvise
        for line in Path("/proc/self/maps").read_text().splitlines():
            area, rights, _, _, file, *name = line.split()
            if rights != "rw-p" or file != "0" or name not in ([], ["[heap]"]):
                continue
            begin, end = (int(edge, 16) for edge in area.split("-"))
            first, last = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if last - first < _LARGE:
                continue
            where = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
            # before Linux 6.1 pages are moved later, by the system
            if advise(*where, _COLLAPSE):
                advise(*where, _HUGE_PAGES)
