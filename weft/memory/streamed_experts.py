"""Experts that rest in a file or on the host and move through memory layer by layer, once per pass (MoE-Lens).

A pass over a large batch chooses nearly every expert of every layer. So nobody waits for a router: a mover reads the
layers' experts in their order, each layer as one contiguous run of bytes, and goes on with the first layer of the next
pass. While a layer's experts travel, the attention of this layer and the experts of the layer before are computed. Few
layers have room at a time; where there is room for more, the others stay in memory for good, which leaves fewer bytes
to read per pass (MoE-Lens, Yuan et al. 2025, 2504.09345).
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from weft.memory.records import HostCopy, Records
from weft.memory.resting_experts import (
    blocks_with_experts,
    replace_experts,
    stored_experts,
)
from weft.memory.tier_file import TierFile, Transfer, page_buffer
from weft.models.transformer import Transformer
from weft.models.values import Values

T = torch.Tensor

#: Layers whose experts have room at a time while all others rest: one computes, and two are on their way.
RING = 3


class MovingLayer(NamedTuple):
    """A layer whose experts are being read into memory.

    ``layer``: index among the layers with experts; ``memory``: room for their records, uint8; ``coming``: the transfer
    that reads the records.
    """

    layer: int
    memory: T
    coming: Transfer | HostCopy


@dataclass
class MoveTimes:
    """When the read of a layer's experts began and ended, in seconds of ``time.perf_counter``.

    ``ended`` is 0 until the read has ended. ``records``: number of experts of the layer.
    """

    records: int
    begun: float
    ended: float = 0.0


class LayerRing:
    """Memory of a device for the experts of some layers, into which the experts of each layer are read before its turn.

    ``records``: the store of all experts. ``firsts``: index of the first record of each layer, and at last the number
    of all records. ``layers``: number of layers for which there is room. :data:`RING` of them are reused from layer to
    layer; if there are more, the additional layers stay in memory after their first use. ``device``: device of the
    memory.

    Attributes:
        ``counts``: records that were used, awaited and read.
        ``waited``: seconds for which computation has waited for records so far.
        ``moves``: times of the last reads.
    """

    def __init__(
        self, records: Records, firsts: Sequence[int], layers: int, device: torch.device
    ) -> None:
        self.records, self.firsts = records, firsts
        every = len(firsts) - 1
        self.layers = max(min(RING, every), min(layers, every))
        staying = every if self.layers == every else self.layers - RING
        # spread evenly, so that the mover has work at any time
        self.staying = {i * every // staying for i in range(staying)}
        self.streamed = [i for i in range(every) if i not in self.staying]
        self.counts: Counter[str] = Counter()
        self.waited = 0.0
        self.moves: deque[MoveTimes] = deque(maxlen=1024)
        self._kept: dict[int, MovingLayer] = {}
        self._moving: deque[MovingLayer] = deque()
        self._next = 0  # of the streamed layers
        self._device = device
        room = max((self._size(i) for i in self.streamed), default=0)
        self._free = [self._memory(room) for _ in range(RING if room else 0)]

    @property
    def count(self) -> int:
        """Number of records that the memory has room for."""
        sizes = sorted((self._records(i) for i in self.streamed), reverse=True)
        return sum(map(self._records, self.staying)) + sum(sizes[:1] * RING)

    def begin(self) -> None:
        """Start to read the layers that the first pass uses first, so that it waits less."""
        while self._free and self.streamed:
            memory = self._free.pop()
            layer = self.streamed[self._next]
            self._next = (self._next + 1) % len(self.streamed)
            self._moving.append(self._read(layer, memory))

    def using(self, records: Sequence[int]) -> Iterator[list[tuple[int, T]]]:
        """Wait until a layer's experts are in memory, and yield them as one list of pairs: index, and memory, uint8
        ``[size]``.

        ``records``: indices of the records, which are experts of one layer. When the caller goes on, the layer's memory
        is reused for a later layer. Raises :class:`weft.memory.nameless_file.TierError` if the layer cannot be read.
        """
        if not records:
            return
        layer = self._layer_of(records[0])
        moving = self._kept_layer(layer) if layer in self.staying else self._come(layer)
        if not moving.coming.done:
            self.counts["awaited"] += len(records)
        begun = perf_counter()
        moving.coming.wait()
        self.waited += perf_counter() - begun
        size, first = self.records.size, self.firsts[layer]
        rows = moving.memory[: self._size(layer)].view(-1, size)
        yield [(record, rows[record - first]) for record in records]
        if layer not in self.staying:
            self._moving.popleft()
            self._free.append(moving.memory)
            self.begin()

    def _come(self, layer: int) -> MovingLayer:
        """The first of the moving layers, once it is ``layer``. Those that a pass left out are let go."""
        self.begin()
        while self._moving[0].layer != layer:
            left_out = self._moving.popleft()
            left_out.coming.wait()
            self._free.append(left_out.memory)
            self.begin()
        return self._moving[0]

    def _kept_layer(self, layer: int) -> MovingLayer:
        if layer not in self._kept:
            self._kept[layer] = self._read(layer, self._memory(self._size(layer)))
        return self._kept[layer]

    def _read(self, layer: int, memory: T) -> MovingLayer:
        self.counts["read"] += self._records(layer)
        times = MoveTimes(self._records(layer), perf_counter())
        coming = self.records.read(self.firsts[layer], memory[: self._size(layer)])

        def ended(piece: Future[None]) -> None:
            times.ended = max(times.ended, perf_counter())

        pieces = coming.pieces if isinstance(coming, Transfer) else ()
        for piece in pieces:
            piece.add_done_callback(ended)
        if pieces:
            self.moves.append(times)
        return MovingLayer(layer, memory, coming)

    def _memory(self, size: int) -> T:
        if self._device.type == "cpu":
            return page_buffer(size)
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _layer_of(self, record: int) -> int:
        return next(i for i, first in enumerate(self.firsts[1:]) if record < first)

    def _records(self, layer: int) -> int:
        return self.firsts[layer + 1] - self.firsts[layer]

    def _size(self, layer: int) -> int:
        return self._records(layer) * self.records.size


class StreamedExperts:
    """Keeps the experts of a model in a file or in the host's memory, and reads those of each layer once per pass.

    ``folder``: folder of the file, or None for the host's memory; ``share``: share of the layers with experts for which
    the device's memory has room; there is always room for :data:`RING` layers.
    """

    ring: LayerRing

    def __init__(self, folder: Path | None, share: float) -> None:
        self.share = share
        self.file = None if folder is None else TierFile(folder, called="--experts-in")

    def lift(self, model: Transformer, values: Values) -> None:
        """Store the experts of ``model`` outside the device's memory, and replace them by modules that read them in
        time.

        A layer's module waits until all experts of the layer are in the device's memory. The arguments and errors are
        those of :meth:`weft.memory.resting_experts.RestingExperts.lift`.
        """
        mixtures: list[Any] = [block.ffn for block in blocks_with_experts(model)]
        device = model.mesh.device
        stored = stored_experts(mixtures, values, self.file, device)
        layers = round(self.share * len(mixtures))
        self.ring = LayerRing(stored.records, stored.firsts, layers, device)
        replace_experts(mixtures, stored, self.ring)

    def report(self) -> str:
        """Return a line for the user about the experts that were read, and the seconds for which computation waited."""
        ring, size = self.ring, self.ring.records.size
        where = "the host's memory" if self.file is None else self.file.folder
        return (
            f"{ring.counts['read']:,} experts moved from {where}, {ring.counts['read'] * size / 1e6:,.1f} MB, for "
            f"{ring.waited:.2f} s of which the computation waited; memory has room for {ring.count:,} of "
            f"{ring.records.count:,}, {ring.count * size / 1e6:,.1f} MB"
        )
