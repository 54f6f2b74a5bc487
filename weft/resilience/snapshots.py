"""Copies of the state in memory, each part on two ranks, so that no part is lost with a rank.

While step ``k + 1`` computes, the state is still that after step ``k``: beside it every rank copies its part into
memory of its own, and from there to a *buddy*, a rank on another host if there is one. Both copies are whole before the
rank gives its share to the sums of step ``k + 1``, so that nobody can have gone on from a state that could be lost. Of
each copy there are two, in turns: the older one counts until all ranks have the newer.

What other ranks hold as well, on another host if there are several, is not sent anywhere. What never changes (frozen
parameters) is sent once, and has no second copy on its own rank. (Gemini, Wang et al. 2023, has snapshots in the memory
of other hosts; ElasWave, 2025, one for every step.)
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from weft.checkpoint.format import volume
from weft.checkpoint.state import Progress
from weft.layout.dims import Box, Tensor, extents
from weft.layout.lost import PeerLost
from weft.layout.mesh import from_all
from weft.layout.parts import TORCH_DTYPES, Part
from weft.parallel.state import State
from weft.recipe import Recipe
from weft.resilience.links import Head, Inbox, LinkBroken, Outbox

T = torch.Tensor

#: Tensors begin at multiples of so many bytes in a copy.
ALIGNED = 64
#: Seconds that an end of a view waits for a copy that is under way.
STOP_S = 10.0
#: In the place of a turn: what never changes.
FIXED = -1

#: A rank's part of the state without its values: by name, what it is of, its box, and whether it never changes.
Table = Mapping[str, tuple[Tensor, Box, bool]]


def why_none(recipe: Recipe) -> str:
    """Why the state of this recipe has no copies in memory; empty if it has."""
    away = [kind for kind in ("weights", "moments") if recipe.memory.place_of(kind) == "file"]
    if not away:
        return ""
    return f"memory.{away[0]} = 'file' says that the state does not fit in memory, so that no rank keeps another's part"


def buddies(machines: Sequence[str], leaving: Collection[int] = ()) -> list[int]:
    """For every rank, given its machine, the rank that keeps its part as well; of a rank alone, itself.

    It is one of another machine, if there is one: the first rank of a machine has the first of the next, and so on. On
    one machine it is the next rank. It is none of those that are ``leaving``, if others stay.
    """
    order = sorted(range(len(machines)), key=lambda rank: (machines.index(machines[rank]), rank))
    found = [0] * len(machines)
    for at, rank in enumerate(order):
        after = order[at + 1 :] + order[:at]
        able = [other for other in after if other not in leaving] or after or [rank]
        elsewhere = [other for other in able if machines[other] != machines[rank]]
        number = [other for other in order if machines[other] == machines[rank]].index(rank)
        found[rank] = elsewhere[number % len(elsewhere)] if elsewhere else able[0]
    return found


class TensorSlice(NamedTuple):
    """Elements ``box`` of a tensor, and where they begin in the bytes of their segment."""

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
    """Parts that the same ranks hold, the ``holders``, in whose copies they lie alike; ``fixed``: they never change.

    ``sender``: the one of them that sends them to its buddy; -1 if losing any rank, or host, leaves another holder.
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
    """The parts of all ranks, by who holds them; the same on every rank. What a rank holds that stays is not sent."""
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, table in enumerate(tables):
        for name, (_, box, _) in table.items():
            if volume(box):
                holders.setdefault((name, box), []).append(rank)
    found: dict[tuple[bool, tuple[int, ...]], list[TensorSlice]] = {}
    for (name, box), ranks in sorted(holders.items()):
        tensor, _, fixed = tables[ranks[0]][name]
        pieces = found.setdefault((fixed, tuple(ranks)), [])
        pieces.append(TensorSlice(name, box, tensor, pieces[-1].start + pieces[-1].room if pieces else 0))
    several = len(set(machines)) > 1

    def sender(ranks: Sequence[int]) -> int:
        apart = len({machines[r] for r in ranks}) if several else len(ranks)
        safe = not set(ranks) <= set(leaving) if leaving else apart > 1 or len(machines) == 1
        return -1 if safe else ranks[0]

    return [SnapshotSegment(ranks, fixed, sender(ranks), tuple(found[fixed, ranks])) for fixed, ranks in sorted(found)]


@dataclass
class SnapshotCopy:
    """Some ``segments`` of one rank, by number, one behind the other in ``memory``; ``starts``: where each begins.

    They are as they were after ``step`` once the copy is ``whole``. ``rows``: of tensors whose rows are not those of
    their box, which they are; ``digests``: of segments by number.
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
        """Its bytes, from one place to another."""
        return self.memory.numpy()[start:stop].data

    def digest(self, number: int) -> str:
        start = self.starts[number]
        return digest([self.view(start, start + self.segments[number].size)])

    def values(self, number: int) -> Iterator[tuple[TensorSlice, T]]:
        """Every piece of a segment, and its elements here."""
        for piece in self.segments[number].pieces:
            at = self.starts[number] + piece.start
            flat = self.memory[at : at + piece.size].view(TORCH_DTYPES[piece.tensor.dtype])
            yield piece, flat.view(extents(piece.box))


def digest(views: Iterable[memoryview]) -> str:
    found = xxhash.xxh3_128()
    for view in views:
        found.update(view)
    return found.hexdigest()


class Snapshots:
    """The copies of one view: this rank's, and those that it keeps for others. Making it is collective over ``group``.

    ``machines``: of every rank of the group; ``host``: where this one listens; ``token``: of the run. A copy is made
    after every ``every``-th step; nobody waits longer than ``limit`` seconds for it. With ``leaving``, ranks that are
    about to go on purpose, these hand what only they have to those that stay, who send nothing.
    """

    def __init__(
        self, state: State, machines: Sequence[str], host: str, token: str, epoch: int = 0, every: int = 1,
        limit: float = 600, group: dist.ProcessGroup | None = None, leaving: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.state, self.epoch, self.every, self.limit = state, epoch, every, limit
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.world, self.buddy = len(machines), buddies(machines, leaving)[self.rank]
        fixed = {f"model.{h.name}" for h in state.held if not h.learns and not h.logical.everywhere}
        parts = state.parts()
        self._live = {name: parts[name].values.detach() for name in fixed}
        self._inbox = Inbox(host, token, self._place, self._keep)
        mine = {name: (part.tensor, part.box, name in fixed) for name, part in parts.items()}
        found = from_all((self._inbox.address, mine), group)
        self.segments = segments_of([table for _, table in found], machines, leaving)
        pinned = any(part.values.is_cuda for part in parts.values())
        self._own = [SnapshotCopy(self._segments_of(self.rank, fixed=False), pinned) for _ in range(2)]
        self._places = [[pair for number in copy.segments for pair in copy.values(number)] for copy in self._own]
        self._held: dict[tuple[int, int], SnapshotCopy] = {}
        self._turn, self._begun, self._sent_fixed = 0, -1, False
        self._problem, self._done = "", Event()
        self._done.set()
        sends = any(s.sender == self.rank for s in self.segments)
        self._outbox = Outbox(found[self.buddy][0], token, self.rank, limit) if sends else None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="weft-snapshots", daemon=True)
        self._thread.start()
        self._inbox.start()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's memory that the copies take."""
        return sum(copy.memory.nbytes for copy in (*self._own, *self._held.values()))

    @property
    def sent(self) -> int:
        """Bytes that go to the buddy after a step."""
        return sum(s.size for s in self.segments if s.sender == self.rank and not s.fixed)

    def begin(self, progress: Progress, now: bool = False) -> None:
        """Begin to copy the state as it is after the step that ``progress`` says, if it is to be copied, or ``now``.

        Until :meth:`complete` has returned nothing may change it. To be called when the sums of that step are known.
        """
        if progress.step == self._begun or not (now or self._begun < 0 or progress.step % self.every == 0):
            return
        self.complete()
        parts = self.state.parts()
        self._turn, self._begun = 1 - self._turn, progress.step
        copy = self._own[self._turn]
        copy.whole, copy.step, copy.progress = False, progress.step, asdict(progress)
        copy.rows = {name: list(part.rows) for name, part in parts.items() if part.rows is not None}
        pairs = [(place, parts[piece.name].values.detach()) for piece, place in self._places[self._turn]]
        ready = None
        if any(values.is_cuda for _, values in pairs):
            ready = torch.cuda.Event()
            ready.record()
        self._done.clear()
        self._jobs.put(partial(self._copy, copy, pairs, ready, self._turn))
        if copy.rows:  # who looks at the whole state brings them home, at any time
            self.complete()

    def complete(self) -> None:
        """Return when the copy that was begun last is whole, here and at the buddy: the state may change now.

        Raises :class:`PeerLost` if the buddy is gone, or has not answered for :attr:`limit` seconds.
        """
        in_time = self._done.wait(self.limit)
        if self._problem or not in_time:
            problem = self._problem or f"it has not answered for {self.limit:g} s"
            raise PeerLost(f"rank {self.buddy} has not kept the state of rank {self.rank}: {problem}")

    def stop(self) -> None:
        """Send and take nothing more; what is whole here stays. May be called by any thread, and more than once."""
        self._inbox.close()
        if self._outbox is not None:
            self._outbox.close()
        self._jobs.put(None)
        self._thread.join(STOP_S)

    def held(self) -> dict[str, Any]:
        """What is whole here, as JSON: after which ``step`` (none: ever since) which segments of which rank, the
        ``owner``, and their digests. Ends all copying, that of others to here, too: if a view ends on purpose, all
        must have returned from :meth:`complete` before."""
        self.stop()
        fixed = {number: digest(self._bytes_of_fixed(number)) for number in self._segments_of(self.rank, fixed=True)}
        copies: list[dict[str, Any]] = [{"owner": self.rank, "step": None, "digests": _by_text(fixed)}]
        for owner, copy in self._all():
            copy.digests |= {number: copy.digest(number) for number in copy.segments if number not in copy.digests}
            about = {"owner": owner, "step": copy.step, "progress": copy.progress}
            copies.append(about | {"digests": _by_text(copy.digests)})
        segments = [list(s.holders) for s in self.segments]
        return {"epoch": self.epoch, "rank": self.rank, "world": self.world, "segments": segments, "copies": copies}

    def parts(self, step: int, owner: int, number: int) -> Iterator[tuple[str, Part]]:
        """A segment of ``owner`` after ``step``, which must be whole here: its parts by name."""
        segment = self.segments[number]
        if segment.fixed and owner == self.rank:
            yield from ((p.name, Part(self._live[p.name], p.box, p.tensor)) for p in segment.pieces)
            return
        at = None if segment.fixed else step
        copy = next(c for o, c in self._all() if (o, c.step) == (owner, at) and number in c.segments)
        for piece, values in copy.values(number):
            for part in _in_runs(values, piece, copy.rows.get(piece.name)):
                yield piece.name, part

    # --- in the thread that copies ---

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except LinkBroken as error:
                self._problem = str(error)
            except Exception as error:  # whatever it is, the main thread must not wait for its end
                self._problem = f"{type(error).__name__}: {error}"
            self._done.set()

    @torch.no_grad()
    def _copy(
        self, copy: SnapshotCopy, pairs: Sequence[tuple[T, T]], ready: "torch.cuda.Event | None", turn: int
    ) -> None:
        places, values = [place for place, _ in pairs], [value for _, value in pairs]
        if ready is not None:
            stream = torch.cuda.Stream(values[0].device)  # a new thread is on the first device
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                torch._foreach_copy_(places, values, non_blocking=True)
            stream.synchronize()
        elif places:
            torch._foreach_copy_(places, values)
        copy.digests = {n: copy.digest(n) for n, segment in copy.segments.items() if segment.sender == self.rank}
        copy.whole = True
        if self._outbox is None:
            return
        if not self._sent_fixed:
            views = {n: self._bytes_of_fixed(n) for n in self._segments_of(self.rank, fixed=True, sent=True)}
            digests = {number: digest(of_one) for number, of_one in views.items()}
            self._send({"turn": FIXED, "step": None}, digests, [view for of_one in views.values() for view in of_one])
            self._sent_fixed = True
        head = {"turn": turn, "step": copy.step, "progress": copy.progress, "rows": copy.rows}
        self._send(head, copy.digests, [copy.view(0, self.sent)])

    def _send(self, head: Head, digests: Mapping[int, str], payload: Sequence[memoryview]) -> None:
        assert self._outbox is not None
        self._outbox.send(head | {"digests": _by_text(digests)}, payload)

    # --- in the threads that receive ---

    def _place(self, sender: int, head: Head) -> memoryview:
        """Room for what ``sender`` sends; what was there before is not whole any more."""
        key = sender, int(head["turn"])
        if key not in self._held:
            self._held[key] = SnapshotCopy(self._segments_of(sender, fixed=key[1] == FIXED, sent=True))
        self._held[key].whole = False
        return self._held[key].view()

    def _keep(self, sender: int, head: Head) -> bool:
        """Whether what came is what was sent; from then on it counts."""
        copy = self._held[sender, int(head["turn"])]
        copy.digests = {number: copy.digest(number) for number in copy.segments}
        copy.step, copy.progress, copy.rows = head["step"], head.get("progress", {}), head.get("rows", {})
        copy.whole = head["digests"] == _by_text(copy.digests)
        return copy.whole

    # --- both ---

    def _segments_of(self, owner: int, fixed: bool, sent: bool = False) -> dict[int, SnapshotSegment]:
        """The segments of ``owner`` by number, those first that it sends, or those alone."""
        mine = [(n, s) for n, s in enumerate(self.segments) if owner in s.holders and s.fixed == fixed]
        return dict([pair for pair in mine if pair[1].sender == owner]) | ({} if sent else dict(mine))

    def _bytes_of_fixed(self, number: int) -> list[memoryview]:
        """What never changes, as it is on this rank, laid out as in a copy."""
        found = []
        for piece in self.segments[number].pieces:
            flat = self._live[piece.name].cpu().contiguous().view(-1).view(torch.uint8)
            found += [flat.numpy().data, memoryview(bytes(piece.room - piece.size))]
        return found

    def _all(self) -> list[tuple[int, SnapshotCopy]]:
        """What is whole here, with whose it is."""
        held = [(sender, copy) for (sender, _), copy in list(self._held.items())]
        return [(owner, copy) for owner, copy in [*((self.rank, copy) for copy in self._own), *held] if copy.whole]


def _by_text(digests: Mapping[int, str]) -> dict[str, str]:
    """With keys as JSON has them."""
    return {str(number): found for number, found in digests.items()}


def _in_runs(values: T, piece: TensorSlice, rows: Sequence[int] | None) -> Iterator[Part]:
    """``values`` as parts whose rows are those of their boxes: one for every run of consecutive ``rows``."""
    if rows is None:
        yield Part(values, piece.box, piece.tensor)
        return
    begin = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            yield Part(values[begin:at], ((rows[begin], rows[at - 1] + 1), *piece.box[1:]), piece.tensor)
            begin = at
