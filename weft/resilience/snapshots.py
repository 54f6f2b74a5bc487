"""Copies of the state in memory, each part on two ranks, so that no part is lost with a rank.

While step ``k + 1`` computes, the state is still that after step ``k``. Meanwhile every rank copies its part into its
own memory, and from there to its *buddy*, a rank on another host if there is one. Both copies are complete before the
rank updates its state in step ``k + 1``, so no rank can have gone on from a state that could be lost. Each copy has two
buffers, used in turns: the older copy counts until all ranks have the newer one.

Parts that other ranks hold as well (on another host, if there are several) are not sent. Parts that never change
(frozen parameters) are sent once, and are not copied on their own rank. (Gemini, Wang et al. 2023, keeps snapshots in
the memory of other hosts; ElasWave, 2025, one for every step.)
"""

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, asdict, dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from weft.checkpoint.boxes import volume
from weft.checkpoint.run_state import Progress
from weft.layout.dims import Box, Tensor, extents
from weft.layout.mesh import from_all
from weft.layout.parts import TORCH_DTYPES, Part
from weft.net.endpoint import Endpoint
from weft.net.lost import PeerLost
from weft.net.wire import Head, SealedConnection, WireBroken
from weft.parallel.state import State
from weft.recipe import Recipe

T = torch.Tensor

#: Tensors begin at multiples of so many bytes in a copy.
ALIGNED = 64
#: Seconds for which the end of a view waits for a copy that is under way.
STOP_S = 10.0
#: Stands in place of a turn (0 or 1) for parts that never change.
FIXED = -1

#: A rank's part of the state without values: by name, the whole tensor, the box of it, and whether it never changes.
Table = Mapping[str, tuple[Tensor, Box, bool]]


def why_none(recipe: Recipe) -> str:
    """Return in words why a run of ``recipe`` keeps no copies of its state in memory; "" if it keeps them."""
    away = [
        kind
        for kind in ("weights", "moments")
        if recipe.memory.place_of(kind) == "file"
    ]
    if recipe.rl and recipe.roles and recipe.roles.critic.elsewhere:
        return "the critic's state is in processes of its own, and comes to these ranks for checkpoints alone"
    if not away:
        return ""
    return f"memory.{away[0]} = 'file' says that the state does not fit in memory, so that no rank keeps another's part"


def buddies(machines: Sequence[str], leaving: Collection[int] = ()) -> list[int]:
    """Return for every rank its buddy: the rank that keeps a copy of its part of the state.

    With several machines, the buddy is a rank of another machine, so that the copy survives the loss of a machine.
    Where possible, the buddy of a machine's first rank is the first rank of the next machine, and so on. On a single
    machine the buddy is the next rank. A single rank is its own buddy. A rank that is about to leave becomes a buddy
    only if there is no other choice.

    ``machines``: name of the machine of each rank, by rank; ``leaving``: ranks that are about to leave.
    """
    order = sorted(
        range(len(machines)), key=lambda rank: (machines.index(machines[rank]), rank)
    )
    buddy_of = [0] * len(machines)
    for at, rank in enumerate(order):
        after = order[at + 1 :] + order[:at]
        able = [other for other in after if other not in leaving] or after or [rank]
        elsewhere = [other for other in able if machines[other] != machines[rank]]
        number = [other for other in order if machines[other] == machines[rank]].index(
            rank
        )
        buddy_of[rank] = elsewhere[number % len(elsewhere)] if elsewhere else able[0]
    return buddy_of


class TensorSlice(NamedTuple):
    """Slice of a tensor in a segment of a copy.

    ``name``: name of the tensor; ``box``: index ranges of the elements in the slice; ``tensor``: description of the
    whole tensor; ``start``: byte of the segment at which the elements begin.
    """

    name: str
    box: Box
    tensor: Tensor
    start: int

    @property
    def size(self) -> int:
        return volume(self.box) * self.tensor.itemsize

    @property
    def room(self) -> int:
        return self.size + -self.size % ALIGNED


@dataclass(frozen=True)
class SnapshotSegment:
    """Segment of a copy: all parts of the state that the same ranks hold, in the same order in every copy.

    Attributes:
        ``holders``: ranks that hold the parts.
        ``fixed``: whether the parts never change (frozen parameters).
        ``sender``: the one of ``holders`` that sends the parts to its buddy, the rank that keeps a copy for it; -1 if
            no copy is needed. None is needed if the parts survive the loss of any one machine, or, if there is a single
            machine, of any one rank.
        ``pieces``: slices of tensors in the segment.
    """

    holders: tuple[int, ...]
    fixed: bool
    sender: int
    pieces: tuple[TensorSlice, ...]

    @property
    def size(self) -> int:
        return sum(piece.room for piece in self.pieces)


def segments_of(
    tables: Sequence[Table], machines: Sequence[str], leaving: Collection[int] = ()
) -> list[SnapshotSegment]:
    """Group the parts of the state of all ranks into segments: all parts that the same ranks hold are one segment.

    The result is the same on every rank. ``tables``: for each rank, a description of its parts; ``machines``: name of
    the machine of each rank, by rank; ``leaving``: ranks that are about to leave.

    A segment also names the rank that sends it to its buddy, which keeps a copy in case the sender is lost. It names
    none if no copy is needed, because the segment survives without one. With several machines, a segment survives if
    ranks on more than one machine hold it. With a single machine, it survives if more than one rank holds it. If
    ``leaving`` is not empty, it survives if any staying rank holds it. A rank that is alone sends nothing.
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, table in enumerate(tables):
        for name, (_, box, _) in table.items():
            if volume(box):
                holders.setdefault((name, box), []).append(rank)
    slices: dict[tuple[bool, tuple[int, ...]], list[TensorSlice]] = {}
    for (name, box), ranks in sorted(holders.items()):
        tensor, _, fixed = tables[ranks[0]][name]
        pieces = slices.setdefault((fixed, tuple(ranks)), [])
        pieces.append(
            TensorSlice(
                name, box, tensor, pieces[-1].start + pieces[-1].room if pieces else 0
            )
        )
    several = len(set(machines)) > 1

    def sender(ranks: Sequence[int]) -> int:
        apart = len({machines[r] for r in ranks}) if several else len(ranks)
        safe = (
            not set(ranks) <= set(leaving)
            if leaving
            else apart > 1 or len(machines) == 1
        )
        return -1 if safe else ranks[0]

    return [
        SnapshotSegment(ranks, fixed, sender(ranks), tuple(slices[fixed, ranks]))
        for fixed, ranks in sorted(slices)
    ]


@dataclass
class SnapshotCopy:
    """Copy in memory of some segments of one rank's state. A segment is a numbered group of tensor parts.

    Attributes:
        ``segments``: segments of the copy, by number, in the order in which they lie in ``memory``.
        ``pinned``: whether the memory is pinned for copies from a GPU.
        ``step``: step after which the state was copied; None before the first copy, and for parts that never change.
        ``whole``: whether the copy is complete; False while it is being made.
        ``progress``: progress of the run after that step.
        ``rows``: for each tensor name, the numbers of the rows that this rank holds. Only tensors of experts that were
            moved between ranks are listed.
        ``digests``: digest of each segment, by number.
        ``starts``: byte of ``memory`` at which each segment begins, by the segment's number.
        ``memory``: bytes of the copy.
    """

    segments: Mapping[int, SnapshotSegment]
    pinned: InitVar[bool] = False
    step: int | None = None
    whole: bool = False
    progress: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, list[int]] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)

    def __post_init__(self, pinned: bool) -> None:
        self.starts, size = {}, 0
        for number, segment in self.segments.items():
            self.starts[number] = size
            size += segment.size
        self.memory = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return a view of this copy's memory from byte ``start`` to byte ``stop`` (by default the end)."""
        return self.memory.numpy()[start:stop].data

    def hash_segment(self, number: int) -> str:
        start = self.starts[number]
        return hash_views([self.view(start, start + self.segments[number].size)])

    def values(self, number: int) -> Iterator[tuple[TensorSlice, T]]:
        """Yield each slice in a segment, with a tensor that views the slice's elements in this copy's memory.

        ``number``: number of the segment.
        """
        for piece in self.segments[number].pieces:
            at = self.starts[number] + piece.start
            flat = self.memory[at : at + piece.size].view(
                TORCH_DTYPES[piece.tensor.dtype]
            )
            yield piece, flat.view(extents(piece.box))


def hash_views(views: Iterable[memoryview]) -> str:
    hasher = xxhash.xxh3_128()
    for view in views:
        hasher.update(view)
    return hasher.hexdigest()


class Snapshots:
    """Copies of the state in memory for one view: this rank's own, and those that it keeps for other ranks.

    Creating the object is collective over ``group``.

    Args:
        ``state``: this rank's state.
        ``machines``: name of the machine of each rank of the group, by rank.
        ``endpoint``: listener of this process.
        ``token``: the run's secret.
        ``epoch``: number of the view.
        ``every``: number of steps between two copies.
        ``limit``: seconds that a copy may take.
        ``group``: ranks that copy together (default: all).
        ``leaving``: ranks about to leave. They send parts that only they hold to the staying ranks, which send nothing.
    """

    def __init__(
        self, state: State, machines: Sequence[str], endpoint: Endpoint, token: str, epoch: int = 0, every: int = 1,
        limit: float = 600, group: dist.ProcessGroup | None = None, leaving: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.state, self.epoch, self.every, self.limit = state, epoch, every, limit
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.world, self.buddy = len(machines), buddies(machines, leaving)[self.rank]
        fixed = {
            f"model.{h.name}"
            for h in state.held
            if not h.learns and not h.logical.everywhere
        }
        parts = state.parts()
        self._live = {name: parts[name].values.detach() for name in fixed}
        self._ready = Event()
        name = f"copies/{secrets.token_hex(8)}"
        self._channel = endpoint.open(name, token, self._receive)
        own_table = {
            name: (part.tensor, part.box, name in fixed) for name, part in parts.items()
        }
        places = from_all((endpoint.address, name, own_table), group)
        self.segments = segments_of(
            [table for _, _, table in places], machines, leaving
        )
        pinned = any(part.values.is_cuda for part in parts.values())
        self._own = [
            SnapshotCopy(self._segments_of(self.rank, fixed=False), pinned)
            for _ in range(2)
        ]
        self._places = [
            [pair for number in copy.segments for pair in copy.values(number)]
            for copy in self._own
        ]
        self._held: dict[tuple[int, int], SnapshotCopy] = {}
        self._turn, self._begun, self._sent_fixed = 0, -1, False
        self._problem, self._done = "", Event()
        self._done.set()
        self._sends = any(s.sender == self.rank for s in self.segments)
        self._buddy_at, self._buddy_name, _ = places[self.buddy]
        self._connection: SealedConnection | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="weft-snapshots", daemon=True)
        self._thread.start()
        self._ready.set()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's memory that its own copies and those kept for other ranks take together."""
        return sum(copy.memory.nbytes for copy in (*self._own, *self._held.values()))

    @property
    def sent(self) -> int:
        """Bytes that this rank sends for each copy to its buddy, the rank that keeps a copy of its state."""
        return sum(
            s.size for s in self.segments if s.sender == self.rank and not s.fixed
        )

    def begin(self, progress: Progress, now: bool = False) -> None:
        """Begin to copy the state if a copy is due. Call this method after a step, when it is over on all ranks.

        A copy is due at the first call, after every ``every`` steps (an argument of the class), and whenever ``now`` is
        set. ``progress``: the run's progress, with the number of the step; it is stored with the copy. The state may
        not change until :meth:`complete` has returned.
        """
        if progress.step == self._begun or not (
            now or self._begun < 0 or progress.step % self.every == 0
        ):
            return
        self.complete()
        parts = self.state.parts()
        self._turn, self._begun = 1 - self._turn, progress.step
        copy = self._own[self._turn]
        copy.whole, copy.step, copy.progress = False, progress.step, asdict(progress)
        copy.rows = {
            name: list(part.rows)
            for name, part in parts.items()
            if part.rows is not None
        }
        pairs = [
            (place, parts[piece.name].values.detach())
            for piece, place in self._places[self._turn]
        ]
        ready = None
        if any(values.is_cuda for _, values in pairs):
            ready = torch.cuda.Event()
            ready.record()
        self._done.clear()
        self._jobs.put(partial(self._copy, copy, pairs, ready, self._turn))
        if copy.rows:  # such rows go home as soon as anybody looks at the whole state
            self.complete()

    def complete(self) -> None:
        """Wait until the last copy is complete, on this rank and on its buddy. Afterwards the state may change.

        Raises :class:`PeerLost` if the buddy is gone, or has not answered for ``limit`` seconds.
        """
        in_time = self._done.wait(self.limit)
        if self._problem or not in_time:
            problem = self._problem or f"it has not answered for {self.limit:g} s"
            raise PeerLost(
                f"rank {self.buddy} has not kept the state of rank {self.rank}: {problem}"
            )

    def break_off(self) -> None:
        """Stop all sending and receiving, so that calls that wait for another rank raise. Returns at once."""
        self._ready.set()
        self._channel.close()

    def stop(self) -> None:
        """Stop sending and receiving. Complete copies are kept. May be called in any thread, and more than once."""
        self.break_off()
        self._jobs.put(None)
        self._thread.join(STOP_S)

    def held(self) -> dict[str, Any]:
        """End all copying between ranks, and describe the complete copies in this rank's memory as JSON.

        If a view (set of ranks) ends on purpose, all ranks must have returned from :meth:`complete` before this call.
        The keys of the result are:

        ``epoch``, ``rank``, ``world``: number of the view, this rank, and the number of ranks. ``segments``: for each
        segment of the state, the ranks that hold it. ``copies``: a list with an entry for each copy.

        The keys of an entry are: ``owner``, the rank whose state was copied; ``step``, the step after which it was
        copied, or None for parts that never change; ``progress``, the progress of the run after that step; ``digests``,
        a digest of each segment by the segment's number.
        """
        self.stop()
        fixed = {
            number: hash_views(self._bytes_of_fixed(number))
            for number in self._segments_of(self.rank, fixed=True)
        }
        copies: list[dict[str, Any]] = [
            {"owner": self.rank, "step": None, "digests": _by_text(fixed)}
        ]
        for owner, copy in self._all():
            copy.digests |= {
                number: copy.hash_segment(number)
                for number in copy.segments
                if number not in copy.digests
            }
            about = {"owner": owner, "step": copy.step, "progress": copy.progress}
            copies.append(about | {"digests": _by_text(copy.digests)})
        segments = [list(s.holders) for s in self.segments]
        return {
            "epoch": self.epoch,
            "rank": self.rank,
            "world": self.world,
            "segments": segments,
            "copies": copies,
        }

    def parts(self, step: int, owner: int, number: int) -> Iterator[tuple[str, Part]]:
        """Yield the name and the values of each part of a tensor that lies in one segment of a copy.

        The copy must be complete. ``step``: step of the copy; ``owner``: rank whose state was copied; ``number``:
        number of the segment.
        """
        segment = self.segments[number]
        if segment.fixed and owner == self.rank:
            yield from (
                (p.name, Part(self._live[p.name], p.box, p.tensor))
                for p in segment.pieces
            )
            return
        at = None if segment.fixed else step
        copy = next(
            c
            for o, c in self._all()
            if (o, c.step) == (owner, at) and number in c.segments
        )
        for piece, values in copy.values(number):
            for part in _in_runs(values, piece, copy.rows.get(piece.name)):
                yield piece.name, part

    # --- in the thread that copies ---

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except OSError as error:
                self._problem = error.strerror or str(error)
            except (
                Exception
            ) as error:  # whatever it is, the main thread must not wait for its end
                self._problem = f"{type(error).__name__}: {error}"
            self._done.set()

    @torch.no_grad()
    def _copy(
        self,
        copy: SnapshotCopy,
        pairs: Sequence[tuple[T, T]],
        ready: "torch.cuda.Event | None",
        turn: int,
    ) -> None:
        places, values = [place for place, _ in pairs], [value for _, value in pairs]
        if ready is not None:
            # a new thread is on the first device
            stream = torch.cuda.Stream(values[0].device)
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                torch._foreach_copy_(places, values, non_blocking=True)
            stream.synchronize()
        elif places:
            torch._foreach_copy_(places, values)
        copy.digests = {
            n: copy.hash_segment(n)
            for n, segment in copy.segments.items()
            if segment.sender == self.rank
        }
        copy.whole = True
        if not self._sends:
            return
        if not self._sent_fixed:
            views = {
                n: self._bytes_of_fixed(n)
                for n in self._segments_of(self.rank, fixed=True, sent=True)
            }
            digests = {number: hash_views(of_one) for number, of_one in views.items()}
            self._send(
                {"turn": FIXED, "step": None},
                digests,
                [view for of_one in views.values() for view in of_one],
            )
            self._sent_fixed = True
        head = {
            "turn": turn,
            "step": copy.step,
            "progress": copy.progress,
            "rows": copy.rows,
        }
        self._send(head, copy.digests, [copy.view(0, self.sent)])

    def _send(
        self, head: Head, digests: Mapping[int, str], payload: Sequence[memoryview]
    ) -> None:
        if self._connection is None:
            self._connection = self._channel.dial(
                self._buddy_at,
                {"rank": self.rank},
                self.limit,
                self.limit,
                self._buddy_name,
            )
        self._connection.send(head | {"digests": _by_text(digests)}, payload)
        if not self._connection.receive(limit=self.limit).head["kept"]:
            raise WireBroken("what came is not what was sent")

    # --- in the threads that receive ---

    def _receive(self, connection: SealedConnection) -> None:
        self._ready.wait()
        sender = int(connection.hello["rank"])
        with suppress(OSError):
            while True:
                head, _ = connection.receive(lambda head, _: self._place(sender, head))
                connection.send({"kept": self._keep(sender, head)})
        connection.close()

    def _place(self, sender: int, head: Head) -> memoryview:
        """Return the memory for what ``sender`` sends; the copy that was there no longer counts."""
        key = sender, int(head["turn"])
        if key not in self._held:
            self._held[key] = SnapshotCopy(
                self._segments_of(sender, fixed=key[1] == FIXED, sent=True)
            )
        self._held[key].whole = False
        return self._held[key].view()

    def _keep(self, sender: int, head: Head) -> bool:
        """Return whether the received bytes are those that were sent; if so, this copy counts from now on."""
        copy = self._held[sender, int(head["turn"])]
        copy.digests = {number: copy.hash_segment(number) for number in copy.segments}
        copy.step, copy.progress, copy.rows = (
            head["step"],
            head.get("progress", {}),
            head.get("rows", {}),
        )
        copy.whole = head["digests"] == _by_text(copy.digests)
        return copy.whole

    # --- both ---

    def _segments_of(
        self, owner: int, fixed: bool, sent: bool = False
    ) -> dict[int, SnapshotSegment]:
        """Return the segments of ``owner`` by number: first those that it sends, then (unless ``sent``) all others."""
        own = [
            (n, s)
            for n, s in enumerate(self.segments)
            if owner in s.holders and s.fixed == fixed
        ]
        return dict([pair for pair in own if pair[1].sender == owner]) | (
            {} if sent else dict(own)
        )

    def _bytes_of_fixed(self, number: int) -> list[memoryview]:
        """Return the bytes of a fixed segment, from this rank's state, laid out as in a copy."""
        views = []
        for piece in self.segments[number].pieces:
            flat = self._live[piece.name].cpu().contiguous().view(-1).view(torch.uint8)
            views += [flat.numpy().data, memoryview(bytes(piece.room - piece.size))]
        return views

    def _all(self) -> list[tuple[int, SnapshotCopy]]:
        """Return all complete copies on this rank, each with its owner."""
        held = [(sender, copy) for (sender, _), copy in list(self._held.items())]
        return [
            (owner, copy)
            for owner, copy in [*((self.rank, copy) for copy in self._own), *held]
            if copy.whole
        ]


def _by_text(digests: Mapping[int, str]) -> dict[str, str]:
    """Return ``digests`` with text for keys, as JSON requires."""
    return {str(number): value for number, value in digests.items()}


def _in_runs(
    values: T, piece: TensorSlice, rows: Sequence[int] | None
) -> Iterator[Part]:
    """Yield ``values`` as parts whose rows match their boxes: one part for every run of consecutive ``rows``."""
    if rows is None:
        yield Part(values, piece.box, piece.tensor)
        return
    begin = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            yield Part(
                values[begin:at],
                ((rows[begin], rows[at - 1] + 1), *piece.box[1:]),
                piece.tensor,
            )
            begin = at
