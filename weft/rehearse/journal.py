"""A process group that moves nothing: it records its rank's calls, and the work between them.

Groups of the world and of axes share one :class:`Journal`, so that all events of a step stand in one order. Buffers to
receive into are filled with numbers of usual size, because denormal numbers would slow down the timed step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from weft.net.groups import fake_rank

T = torch.Tensor
#: PyTorch's stubs do not say that a process group can be written in Python.
Group: Any = dist.ProcessGroup


@dataclass(frozen=True)
class Event:
    """One recorded event of a rank.

    Attributes:
        ``kind``: ``work``, ``collective``, ``send``, ``recv``, or ``wait`` for a message.
        ``name``: what work is for (``compute`` or ``optimizer``), the collective (``reduce``, ``gather``, ``scatter``
            or ``exchange``), or what is waited for (``send`` or ``recv``).
        ``seconds``: for work, the processor seconds of this process divided by its number of threads.
        ``bytes``: bytes of a message, or of the whole tensor of a collective.
        ``ranks``: for a collective, its global ranks; for a message, two numbers: the other rank and the message's tag.
        ``number``: number of a message, by which ``wait`` names it.
    """

    kind: str
    name: str = ""
    seconds: float = 0.0
    bytes: int = 0
    ranks: tuple[int, ...] = ()
    number: int = 0


def processor_seconds() -> float:
    """Return the processor seconds of all threads of this process, divided by PyTorch's number of threads.

    The difference of two results is the time of a computation between them that kept all threads busy. Unlike
    wall-clock time, other programs hardly lengthen it.
    """
    return time.process_time() / torch.get_num_threads()


class Journal:
    """Record of a rank's events in order since :meth:`begin`: collectives, messages, and the work between them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.numbers = 0
        self.name, self.since = "compute", 0.0

    def begin(self) -> None:
        self.events, self.numbers = [], 0
        self.turn("compute")

    def turn(self, name: str) -> None:
        """Set the purpose under which the rank's work is recorded from now on: ``name`` is "compute" or "optimizer".

        Work that :meth:`close` has not recorded yet is dropped.
        """
        self.name, self.since = name, processor_seconds()

    def close(self) -> None:
        self.events.append(Event("work", self.name, processor_seconds() - self.since))

    @contextmanager
    def note(self, event: Event) -> Iterator[None]:
        """Record the rank's work until now, and then ``event``.

        Time inside the context does not count as the rank's work.
        """
        self.close()
        self.events.append(event)
        yield
        self.since = processor_seconds()


class PendingMessage:
    """A message under way, in place of PyTorch's work object.

    A call of :meth:`wait` is recorded in ``journal`` as an event. ``event``: the event of sending or receiving it.
    """

    def __init__(self, journal: Journal, event: Event) -> None:
        self.journal, self.event = journal, event

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        with self.journal.note(
            Event("wait", self.event.kind, number=self.event.number)
        ):
            return True

    def is_completed(self) -> bool:
        return True


class Silent(Group):
    """A process group backend that moves no data and records its calls in a journal.

    The methods are those that PyTorch calls in a backend. ``rank``, ``size``: number of this rank, and of all ranks.
    """

    options = None

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        world = dist.group.WORLD
        self.journal: Journal = (
            world.journal if isinstance(world, Silent) else Journal()
        )

    def _get_backend(self, device: torch.device) -> Silent:
        return self

    def getBackendName(self) -> str:
        return "silent"

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def _collective(
        self, name: str, whole: int, pairs: Sequence[tuple[T, T]] = ()
    ) -> dist.Work:
        """Record a collective on ``whole`` bytes, and copy the second tensor of each of ``pairs`` into the first."""
        ranks = tuple(dist.get_process_group_ranks(self))
        with self.journal.note(Event("collective", name, bytes=whole, ranks=ranks)):
            for out, given in pairs:
                out.copy_(given)
            done: torch.futures.Future[Any] = torch.futures.Future()
            done.set_result([out for out, _ in pairs])
            return _create_work_from_future(done)

    def allreduce(self, tensors: Sequence[T], opts: Any = None) -> dist.Work:
        return self._collective("reduce", tensors[0].nbytes)

    def broadcast(self, tensors: Sequence[T], opts: Any = None) -> dist.Work:
        return self._collective("gather", tensors[0].nbytes)

    def allgather(
        self, outputs: Sequence[Sequence[T]], given: Sequence[T], opts: Any = None
    ) -> dist.Work:
        return self._collective(
            "gather",
            sum(t.nbytes for t in outputs[0]),
            [(out, given[0]) for out in outputs[0]],
        )

    def all_gather_single(self, out: T, given: T, opts: Any = None) -> dist.Work:
        return self._collective(
            "gather", out.nbytes, [(part, given.view(-1)) for part in self._parts(out)]
        )

    def reduce_scatter_single(self, out: T, given: T, opts: Any = None) -> dist.Work:
        return self._collective(
            "scatter", given.nbytes, [(out.view(-1), self._parts(given)[self.rank()])]
        )

    def all_to_all_single(self, out: T, given: T, *more: Any) -> dist.Work:
        some = min(out.numel(), given.numel())
        return self._collective(
            "exchange", given.nbytes, [(out.view(-1)[:some], given.reshape(-1)[:some])]
        )

    def allreduce_coalesced(self, tensors: Sequence[T], opts: Any = None) -> dist.Work:
        return self._each(self.allreduce, [([t], opts) for t in tensors])

    def all_gather_single_coalesced(
        self, outputs: Sequence[T], given: Sequence[T], opts: Any = None
    ) -> dist.Work:
        return self._each(self.all_gather_single, zip(outputs, given, strict=True))

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[T], given: Sequence[T], opts: Any = None
    ) -> dist.Work:
        return self._each(self.reduce_scatter_single, zip(outputs, given, strict=True))

    # The same by the names that PyTorch had before 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
    )
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _each(self, call: Callable[..., dist.Work], given: Iterable[Any]) -> dist.Work:
        """Apply ``call`` to each of ``given`` and return the last work."""
        return [call(*args) for args in given][-1]

    def alltoall(
        self, outputs: Sequence[T], given: Sequence[T], opts: Any = None
    ) -> dist.Work:
        return self._collective("exchange", sum(t.nbytes for t in given))

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._collective("reduce", 0)

    def send(self, tensors: Sequence[T], target: int, tag: int = 0) -> PendingMessage:
        return self._message("send", tensors[0], target, tag)

    def recv(self, tensors: Sequence[T], source: int, tag: int = 0) -> PendingMessage:
        return self._message("recv", tensors[0], source, tag)

    def _message(self, kind: str, tensor: T, peer: int, tag: int) -> PendingMessage:
        self.journal.numbers += 1
        ranks = dist.get_global_rank(self, peer), tag
        event = Event(
            kind, bytes=tensor.nbytes, ranks=ranks, number=self.journal.numbers
        )
        with self.journal.note(event):
            if kind == "recv" and tensor.is_floating_point():
                tensor.normal_()
            return PendingMessage(self.journal, event)

    def _parts(self, whole: T) -> Sequence[T]:
        return whole.view(self.size(), -1).unbind()


dist.Backend.register_backend(
    "silent", lambda store, rank, size, timeout: Silent(rank, size), devices=["cpu"]
)


@contextmanager
def silent_rank(rank: int, world: int) -> Iterator[Journal]:
    """Set up this process as ``rank`` of ``world`` ranks, of which no other exists, for the context.

    Yields the journal that records the collectives and messages of this rank.
    """
    with fake_rank(rank, world, "silent"):
        assert isinstance(dist.group.WORLD, Silent)
        yield dist.group.WORLD.journal
