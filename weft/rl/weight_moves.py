"""Moves of weights from the layout in which they are trained to the layout in which they generate, bucket by bucket.

The plan is that of :mod:`weft.rl.weight_plan`. While a bucket travels, the next one is packed. Between ranks of one
host whose weights are in main memory a bucket lies in memory that both see (:mod:`weft.rl.host_slots`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft.checkpoint.boxes import volume
from weft.checkpoint.pack import index_within
from weft.checkpoint.reshard import ALIGN, ElementMove
from weft.layout.dims import Box, Tensor, extents
from weft.layout.parts import TORCH_DTYPES
from weft.rl.host_slots import SLOT, SLOTS, HostSlots, SlotAnswers, slot_word
from weft.rl.weight_plan import buckets, padded_bytes

T = torch.Tensor

#: Most bytes of messages that a rank holds at a time, sent and received ones together.
BUCKET = 64 << 20
#: A rank sends one message and receives one, while it packs the next ones, and has :data:`SLOTS` for other ranks.
AT_ONCE = 4 + SLOTS

#: Added to the number of a message, this is the tag of the answer that it was read.
ANSWERS = 1 << 20


class WeightsMoved(NamedTuple):
    """Bytes and time of a move of weights, on this rank.

    Attributes:
        ``received``: bytes that came from other ranks, without padding.
        ``seconds``: duration of the move.
        ``sent``: bytes that went to other ranks, without padding.
        ``buffer``: largest number of bytes that memory for messages took at the same time, with this rank's slots.
    """

    received: int
    seconds: float
    sent: int
    buffer: int


@dataclass(frozen=True)
class _Exchange:
    """The messages that this rank exchanges at one distance: those to the rank so far ahead, and those from the rank so
    far behind."""

    target: int
    outgoing: list[list[ElementMove]]
    source: int
    incoming: list[list[ElementMove]]


class WeightMover:
    """Moves weights between ranks by a fixed plan, each time that they have changed.

    ``plan``: the moves of this rank (:func:`weight_plan`). ``tensors``: shapes of the tensors and the types in which
    they are sent, by name. ``group``: process group whose ranks the plan numbers; None: all ranks. ``device``: device
    on which messages are built. ``bucket``: largest number of bytes of messages that this rank holds at a time.
    """

    def __init__(
        self,
        plan: Sequence[ElementMove],
        tensors: Mapping[str, Tensor],
        group: dist.ProcessGroup | None,
        device: torch.device,
        bucket: int = BUCKET,
    ) -> None:
        rank, world = (
            (dist.get_rank(group), dist.get_world_size(group))
            if dist.is_initialized()
            else (0, 1)
        )
        self.tensors, self.group, self.device = tensors, group, device
        self.local = [move for move in plan if move.source == move.target == rank]
        most = max(2 * ALIGN, bucket // AT_ONCE)
        slot = min(most, SLOT) // ALIGN * ALIGN
        self.slots = HostSlots(slot, group, world > 1 and device.type == "cpu")
        self.exchanges: list[_Exchange] = []
        for distance in range(1, world):
            target, source = (rank + distance) % world, (rank - distance) % world
            there = [m for m in plan if (m.source, m.target) == (rank, target)]
            here = [m for m in plan if (m.source, m.target) == (source, rank)]
            if there or here:
                outgoing, incoming = (
                    buckets(each, tensors, slot, slot + 1)
                    if in_memory
                    else buckets(each, tensors, most)
                    for each, in_memory in (
                        (there, target in self.slots.readers),
                        (here, source in self.slots.theirs),
                    )
                )
                self.exchanges.append(_Exchange(target, outgoing, source, incoming))

    @torch.no_grad()
    def move(
        self,
        sources: Mapping[str, Mapping[Box, T]],
        targets: Mapping[str, Mapping[Box, T]],
    ) -> WeightsMoved:
        """Copy elements from ``sources`` to ``targets`` on this rank and on others. Collective over the group.

        Both are tensors by name and box. Elements are converted to the target's type before they are sent. A message
        that is one contiguous piece is sent and received without a copy.
        """
        begin = perf_counter()
        received = sent = buffer = 0
        flying: _Flying | None = None
        local: Sequence[ElementMove] = self.local
        answers = SlotAnswers()
        for exchange in self.exchanges:
            turns = max(len(exchange.outgoing), len(exchange.incoming))
            for turn in range(turns):
                outgoing, incoming = (
                    side[turn] if turn < len(side) else []
                    for side in (exchange.outgoing, exchange.incoming)
                )
                before = flying
                coming = self._place_for(exchange, incoming, targets)
                message = self._packed(exchange, outgoing, sources, answers)
                flying = self._fly(exchange, turn, message, coming, incoming, answers)
                buffer = max(buffer, flying.buffer + (before.buffer if before else 0))
                # while that travels
                _copy_local(local, sources, targets)
                local = ()
                if before is not None:
                    self._land(before, targets)
                sent += self._bytes(outgoing)
                received += self._bytes(incoming)
        _copy_local(local, sources, targets)
        if flying is not None:
            self._land(flying, targets)
        for answer in answers.awaited:
            answer.wait()
        buffer += self.slots.own.nbytes
        return WeightsMoved(received, perf_counter() - begin, sent, buffer)

    def _fly(
        self,
        exchange: _Exchange,
        turn: int,
        message: _Memory,
        coming: _Memory,
        incoming: list[ElementMove],
        answers: SlotAnswers,
    ) -> _Flying:
        operations = []
        if message.bytes.numel():
            operations.append(
                self._operation(dist.isend, message.bytes, exchange.target, turn)
            )
        if coming.bytes.numel():
            operations.append(
                self._operation(dist.irecv, coming.bytes, exchange.source, turn)
            )
        works = dist.batch_isend_irecv(operations) if operations else []
        if message.slots is not None:
            answer = self._operation(
                dist.irecv, slot_word(), exchange.target, ANSWERS + turn
            )
            answers.awaited += dist.batch_isend_irecv([answer])
        return _Flying(message, coming, incoming, works, exchange.source, turn)

    def _operation(
        self, what: Callable[..., object], message: T, peer: int, tag: int
    ) -> dist.P2POp:
        return dist.P2POp(what, message, group=self.group, tag=tag, group_peer=peer)

    def _land(self, flying: _Flying, targets: Mapping[str, Mapping[Box, T]]) -> None:
        for work in flying.works:
            work.wait()
        coming = flying.coming
        if coming.direct:
            return
        message = (
            coming.bytes
            if coming.slots is None
            else coming.slots[int(coming.bytes.item())]
        )
        for move, place in self._places(flying.incoming, message):
            _view(targets, move, move.needed).copy_(place)
        if coming.slots is not None:
            answer = self._operation(
                dist.isend, slot_word(), flying.source, ANSWERS + flying.turn
            )
            for work in dist.batch_isend_irecv([answer]):
                work.wait()

    def _packed(
        self,
        exchange: _Exchange,
        moves: Sequence[ElementMove],
        sources: Mapping[str, Mapping[Box, T]],
        answers: SlotAnswers,
    ) -> _Memory:
        """The elements of ``moves``, in one message."""
        views = [_view(sources, move, move.held) for move in moves]
        if moves and exchange.target in self.slots.readers:
            slot = answers.free_slot()
            message = self.slots.own[slot]
            memory = _Memory(slot_word(slot), False, self.slots.own)
        elif (run := self._run(moves, views)) is not None:
            return _Memory(run, True)
        else:
            message = self._empty(moves)
            memory = _Memory(message, False)
        for (_, place), view in zip(self._places(moves, message), views, strict=True):
            place.copy_(view)
        return memory

    def _place_for(
        self,
        exchange: _Exchange,
        moves: Sequence[ElementMove],
        targets: Mapping[str, Mapping[Box, T]],
    ) -> _Memory:
        """Memory that receives the elements of ``moves``."""
        if moves and (slots := self.slots.theirs.get(exchange.source)) is not None:
            return _Memory(slot_word(), False, slots)
        views = [_view(targets, move, move.needed) for move in moves]
        if (run := self._run(moves, views)) is not None:
            return _Memory(run, True)
        return _Memory(self._empty(moves), False)

    def _run(self, moves: Sequence[ElementMove], views: Sequence[T]) -> T | None:
        """The bytes of a single view that is a message as it lies in memory; None: it is not."""
        if len(moves) != 1 or moves[0].box == ():
            return None
        (view,), tensor = views, self.tensors[moves[0].name]
        whole = view.is_contiguous() and not view.nbytes % ALIGN
        alike = (view.dtype, view.device.type) == (
            TORCH_DTYPES[tensor.dtype],
            self.device.type,
        )
        return view.flatten().view(torch.uint8) if whole and alike else None

    def _empty(self, moves: Sequence[ElementMove]) -> T:
        size = sum(padded_bytes(move, self.tensors) for move in moves)
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _bytes(self, moves: Sequence[ElementMove]) -> int:
        return sum(volume(m.box) * self.tensors[m.name].itemsize for m in moves)

    def _places(
        self, moves: Sequence[ElementMove], message: T
    ) -> Iterator[tuple[ElementMove, T]]:
        """Yield each move with the elements of ``message`` that belong to it, in the shape of its box."""
        at = 0
        for move in moves:
            tensor = self.tensors[move.name]
            flat = message[at : at + volume(move.box) * tensor.itemsize]
            yield move, flat.view(TORCH_DTYPES[tensor.dtype]).view(extents(move.box))
            at += padded_bytes(move, self.tensors)


class _Memory(NamedTuple):
    """The bytes that are sent of a message, and whether they lie in a tensor of the weights (``direct``) and not in a
    buffer. ``slots``: the slots in one of which the message lies; then only the number of this slot is sent."""

    bytes: T
    direct: bool
    slots: T | None = None


class _Flying(NamedTuple):
    """Messages under way: what goes, what comes, whose moves come, what to wait for, who sends, and its number."""

    message: _Memory
    coming: _Memory
    incoming: list[ElementMove]
    works: Sequence[dist.Work]
    source: int
    turn: int

    @property
    def buffer(self) -> int:
        """Bytes of memory that is there for the messages that are sent alone."""
        sides = (self.message, self.coming)
        sent = [side for side in sides if not side.direct and side.slots is None]
        return sum(side.bytes.nbytes for side in sent)


def _copy_local(
    moves: Sequence[ElementMove],
    sources: Mapping[str, Mapping[Box, T]],
    targets: Mapping[str, Mapping[Box, T]],
) -> None:
    for move in moves:
        _view(targets, move, move.needed).copy_(_view(sources, move, move.held))


def _view(tensors: Mapping[str, Mapping[Box, T]], move: ElementMove, box: Box) -> T:
    return tensors[move.name][box][index_within(move.box, box)]
