"""Memory in which a rank leaves messages for other ranks of its host, so that they need not pass through a socket."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft.errors import UsageError
from weft.generate.shared_arena import ArenaForm, SharedArena, aligned_bytes
from weft.layout.mesh import from_all
from weft.net.process import machine_id

T = torch.Tensor

#: Messages of a rank that may wait in its memory at the same time.
SLOTS = 2
#: Bytes of a message in shared memory, which two copies find in the processor's cache.
SLOT = 4 << 20
#: Bytes of a slot at least, which tell a rank's slots from any other memory.
STAMP = 16


class HostSlots:
    """Slots of shared memory, each for a message of at most ``size`` bytes (:data:`STAMP` or more), among ranks of one
    host. Collective.

    A rank writes its messages into slots of its own, and others read them there. Ranks are on one host if they have one
    kernel, network namespace and process namespace. If a rank can make no such memory or cannot open another's, for
    instance in a container that forbids it, messages between the two have to be sent.

    ``group``: the ranks; None: all. ``shared``: whether this rank's messages are in main memory.

    Attributes:
        ``own``: this rank's slots, uint8 ``[slots, size]``; empty if no rank reads them.
        ``readers``: ranks that read this rank's slots.
        ``theirs``: slots of those ranks whose messages this rank reads, by rank.
    """

    def __init__(
        self, size: int, group: dist.ProcessGroup | None, shared: bool
    ) -> None:
        self.own = torch.empty(0, size, dtype=torch.uint8)
        self.theirs: dict[int, T] = {}
        rank = dist.get_rank(group) if dist.is_initialized() else 0
        arena, place = self._arena(size) if shared else None, None
        if arena is not None:
            # by the stamp others see that they have opened this memory and no other
            stamp = secrets.token_bytes(STAMP)
            self.own[0, :STAMP] = torch.frombuffer(bytearray(stamp), dtype=torch.uint8)
            place = _Place(
                machine_id("pid", "net"), os.getpid(), arena.handle, arena.form, stamp
            )
        everyones = from_all(place, group)
        for other, there in enumerate(everyones):
            if other != rank and there and place and there.machine == place.machine:
                self._open(other, there, size)
        read = from_all(frozenset(self.theirs), group)
        self.readers = frozenset(r for r, opened in enumerate(read) if rank in opened)
        if arena is not None:
            arena.close()  # all have opened it, and the mapping stays
        if not self.readers:
            self.own = self.own[:0].clone()

    def _arena(self, size: int) -> SharedArena | None:
        """Make this rank's slots. Return their memory, or None if the system gives none; then messages are sent."""
        with suppress(OSError, UsageError):
            arena = SharedArena(aligned_bytes(SLOTS * size))
            self.own = arena.room("slots", (SLOTS, size), torch.uint8)
            return arena
        return None

    def _open(self, other: int, there: _Place, size: int) -> None:
        """Map the slots of rank ``other``, if this process may."""
        with suppress(OSError, ValueError):
            handle = os.open(f"/proc/{there.pid}/fd/{there.handle}", os.O_RDWR)
            try:
                arena = SharedArena(aligned_bytes(SLOTS * size), handle, there.form)
            finally:
                os.close(handle)
            slots = arena["slots"]
            if bytes(slots[0, :STAMP].tolist()) == there.stamp:
                self.theirs[other] = slots


class _Place(NamedTuple):
    """Where slots of a rank are: machine, process, its file descriptor, their form, and the bytes they begin with."""

    machine: str
    pid: int
    handle: int
    form: ArenaForm
    stamp: bytes


class SlotAnswers:
    """Keeps which slot is next, and the answers that messages in slots were read (``awaited``, in their order).

    Slots take turns over all messages of a move, whoever reads them. As a rank reads a message after it has written its
    next one, no ring of ranks can wait for each other as long as there are two slots.
    """

    def __init__(self) -> None:
        self.awaited: list[dist.Work] = []
        self._next = 0

    def free_slot(self) -> int:
        """Return the number of the next slot, when the message that was in it has been read."""
        if len(self.awaited) == SLOTS:
            self.awaited.pop(0).wait()
        slot, self._next = self._next, (self._next + 1) % SLOTS
        return slot


def slot_word(slot: int = 0) -> T:
    """Return what is sent in place of a message that lies in ``slot``, and as an answer that it was read."""
    return torch.tensor([slot], dtype=torch.uint8)
