"""The process's own heap, in the host's memory."""

import ctypes
from contextlib import suppress

#: glibc's numbers of M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, with the most that each takes.
_LIMITS = {-1: 2**31 - 1, -3: 32 * 2**20}


def keep_heap() -> None:
    """Let this process keep the memory that it frees (glibc), but for tensors above 32 MiB.

    A step frees and takes the same again. Handed back to the system, it would be mapped and zeroed anew each time: on
    two cores that was a tenth to a fifth of a small model's step. The peak of memory stays the same.
    """
    with suppress(AttributeError, OSError):  # another allocator: nothing to say to it
        libc = ctypes.CDLL(None)
        for parameter, limit in _LIMITS.items():
            libc.mallopt(parameter, limit)


def give_heap_back() -> None:
    """Hand the memory that is free now back to the system.

    For a process whose state does not fit in memory, before its steps: these keep what they free, as mapping it anew
    would take a third of their time, and for that hold a tenth more at their peak.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
