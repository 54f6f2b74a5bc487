"""Memory that several processes of a host see at once: tensors by name in a nameless file in main memory."""

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from weft.errors import UsageError

T = torch.Tensor

#: Bytes to which tensors are aligned.
ALIGNED = 64


class ArenaTensor(NamedTuple):
    """Where a tensor lies in a :class:`SharedArena`. ``offset``: index of its first byte. ``dtype``: name of its type,
    such as "float32". ``shape``: its shape.
    """

    offset: int
    dtype: str
    shape: Sequence[int]


#: What lies where in an arena, by name. It is a JSON value, too.
ArenaForm = Mapping[str, Sequence[object]]


class SharedArena:
    """Memory of ``size`` bytes for tensors that several processes use without copies. It takes pages of main memory
    only after they were written, and vanishes with the last process that has it. ``handle``: file descriptor of an
    arena that another process has made; None: make a new arena. ``form``: places of the tensors in that other arena
    (:attr:`form`). Raises :class:`UsageError` on a system without such memory.
    """

    def __init__(
        self, size: int, handle: int | None = None, form: ArenaForm | None = None
    ) -> None:
        if not hasattr(os, "memfd_create"):
            raise UsageError(
                "memory for two processes is for Linux; leave out --phases"
            )
        self.size = max(size, mmap.PAGESIZE)
        if handle is None:
            handle = os.memfd_create("weft-shared")
            os.ftruncate(handle, self.size)
        self.handle = handle
        self._memory = mmap.mmap(handle, self.size)
        self._used = 0
        self.tensors = {
            name: ArenaTensor(*place)  # type: ignore[arg-type]
            for name, place in (form or {}).items()
        }

    @property
    def form(self) -> dict[str, ArenaTensor]:
        """Places of all tensors in this shared memory, by name. Another process needs them to find the tensors."""
        return dict(self.tensors)

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> T:
        """Return a new tensor of zeros, of this ``shape`` and ``dtype``, that lies in the shared memory and can be
        found there under ``name``. It takes no main memory before something is written to it.
        """
        offset = self._used
        self._used += aligned_bytes(prod(shape) * dtype.itemsize)
        assert self._used <= self.size
        word = str(dtype).removeprefix("torch.")
        self.tensors[name] = ArenaTensor(offset, word, tuple(shape))
        return self[name]

    def keep(self, name: str, value: T) -> T:
        """Copy ``value`` into the shared memory, where it can be found under ``name``. Return the copy."""
        return self.room(name, value.shape, value.dtype).copy_(value)

    def alias(self, name: str, other: str) -> T:
        """Let the tensor in shared memory that is called ``other`` be found under ``name`` too; return the tensor."""
        self.tensors[name] = self.tensors[other]
        return self[name]

    def __getitem__(self, name: str) -> T:
        """Return the tensor ``name``, which is a view of the arena."""
        place = self.tensors[name]
        dtype: torch.dtype = getattr(torch, place.dtype)
        count = prod(place.shape)
        if not count:
            return torch.empty(*place.shape, dtype=dtype)
        flat = torch.frombuffer(
            self._memory, dtype=dtype, count=count, offset=place.offset
        )
        return flat.view(*place.shape)

    def close(self) -> None:
        """Close the file descriptor of the shared memory. The memory stays as long as tensors view it."""
        os.close(self.handle)


def aligned_bytes(size: int) -> int:
    """Return ``size`` bytes rounded up to whole steps of :data:`ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED


def arena_bytes(tensors: Iterable[T]) -> int:
    """Return how many bytes copies of ``tensors`` take in a :class:`SharedArena`, with their alignment."""
    return sum(aligned_bytes(each.nbytes) for each in tensors)
