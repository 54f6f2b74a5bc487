"""The process's own heap, in the host's memory."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: glibc's numbers of M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
_TRIM, _MAP = -1, -3

#: The most that each takes.
_LIMITS = {_TRIM: 2**31 - 1, _MAP: 32 * 2**20}

#: Bytes of what is mapped by itself where little is to stay.
_PASSING = 64 << 10


def keep_heap() -> None:
    """Let this process keep the memory that it frees (glibc), but for tensors above 32 MiB.

    A step frees and takes the same again. Handed back to the system, it would be mapped and zeroed anew each time: on
    two cores that was a tenth to a fifth of a small model's step. The peak of memory stays the same.
    """
    for parameter, limit in _LIMITS.items():
        _limit(parameter, limit)


def _limit(parameter: int, limit: int) -> None:
    with suppress(AttributeError, OSError):  # another allocator: nothing to say to it
        ctypes.CDLL(None).mallopt(parameter, limit)


@contextmanager
def passing_by_the_heap() -> Iterator[None]:
    """In here tensors are mapped one by one, so that the heap is no larger for many that come and go.

    For assembling a model whose state does not fit in memory. A heap in which all of it has been, unit by unit, is
    mostly empty then, and steps scatter over it: they touched twice as much of it as they need at a time.
    """
    give_heap_back()
    _limit(_MAP, _PASSING)
    try:
        yield
    finally:
        _limit(_MAP, _LIMITS[_MAP])
        give_heap_back()


def give_heap_back() -> None:
    """Hand the memory that is free now back to the system.

    For a process whose state does not fit in memory, before its steps: these keep what they free, as mapping it anew
    would take a third of their time, and for that hold a tenth more at their peak.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
