"""The process's own heap in the host's memory."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: glibc's numbers of M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
_TRIM, _MAP = -1, -3

#: The largest values of each.
_LIMITS = {_TRIM: 2**31 - 1, _MAP: 32 * 2**20}

#: Bytes from which a tensor is mapped by itself while the heap is passed by.
_PASSING = 64 << 10


def keep_heap() -> None:
    """Let this process keep the memory that it frees (glibc), except for tensors above 32 MiB.

    A step frees memory and allocates as much again. Memory that goes back to the system must be mapped and zeroed anew
    each time, which took a tenth to a fifth of a small model's step on two cores. The peak of memory stays the same.
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
