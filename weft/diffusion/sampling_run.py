"""Execution of one rank's part of a sampling table: its rows in order, and transfers beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from weft.diffusion.sampling_actions import A, E, K, N, O, P, U, piece_of
from weft.diffusion.sampling_check import RunnableTable
from weft.diffusion.sampling_table import DenoisingRow, SamplingTable
from weft.schedule.actions import Action, Value
from weft.schedule.lower import FREE, RECV, SEND
from weft.schedule.pipeline_wire import Specs, Wire

if TYPE_CHECKING:
    from weft.diffusion.tile_mix import TileMix

T = torch.Tensor
#: Attends with queries, keys and values ``[batch, heads, tokens, head_dim]``.
Attend = Callable[[T, T, T], T]


class TokenDenoiser(Protocol):
    """Interface of a denoiser that can be run layer by layer, for any of a sample's tokens.

    Attributes:
        ``layers``, ``heads``, ``head_dim``, ``width``: sizes of the model.
        ``copies``: number of rows of its batch for each sample: 2 with guidance, else 1.
    """

    layers: int
    heads: int
    head_dim: int
    width: int
    copies: int

    def prepare(self, places: T, step: int) -> Any:
        """Return the inputs that all layers share for the tokens at ``places`` ``[tokens]`` in step ``step``."""

    def embed(self, latents: T, prepared: Any) -> T:
        """Return the first layer's input for ``latents`` ``[samples, tokens, values]``.

        ``prepared``: shared inputs of these tokens, from :meth:`prepare`.
        """

    def layer(self, index: int, hidden: T, prepared: Any, attend: Attend) -> T:
        """Return the output of layer ``index`` for the input ``hidden`` ``[samples, tokens, width]``.

        The layer calls ``attend`` once, for its self-attention. ``prepared``: shared inputs of these tokens, from
        :meth:`prepare`.
        """

    def final(self, hidden: T, prepared: Any) -> T:
        """Return the predicted velocity ``[samples, tokens, values]`` from the last layer's output ``hidden``.

        ``prepared``: shared inputs of these tokens, from :meth:`prepare`.
        """


class TokenSampler(Protocol):
    """Interface of samplers that update the latents of a block by the velocity that the denoiser predicts."""

    def update(self, latents: T, velocity: T, step: int, memory: dict[str, Any]) -> T:
        """Return the latents of a block after ``step``, from its present latents and the predicted ``velocity``.

        ``memory``: state of the sampler for one block, kept between steps.
        """


@dataclass
class SamplingRun:
    """Measurements of one rank while it ran its part of a sampling table, the schedule of denoising over ranks.

    Attributes:
        ``bytes_sent``: bytes that the rank has sent.
        ``peak_bytes``: largest number of bytes of values (latents, activations, keys) that the rank held at once.
        ``actions``: number of actions of each kind.
        ``order``: blocks of a sample's tokens in the order in which this rank finished them, each with the number of
            updates of latents that the rank had made by then.
    """

    bytes_sent: int = 0
    peak_bytes: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    order: list[tuple[int, int]] = field(default_factory=list)


class SampleSource(NamedTuple):
    """Source of the initial noise, and receiver of the finished blocks of samples.

    Attributes:
        ``batch``: number of samples.
        ``values``: number of values of a token.
        ``dtype``: type of all tensors.
        ``noise``: function that returns the noise ``[samples, tokens, values]`` of tokens ``first`` to ``end - 1`` of a
            block. It must not depend on the rank.
        ``take``: called on rank 0 with each finished block, and its latents ``[samples, tokens, values]``.
        ``device``: device of all tensors.
        ``patch``: height and width of a token in pixels, for tables of tiles.
    """

    batch: int
    values: int
    dtype: torch.dtype
    noise: Callable[[int, int, int], T]
    take: Callable[[int, T], None]
    device: torch.device = torch.device("cpu")
    patch: int = 1


def value_specs(
    runnable: RunnableTable, denoiser: TokenDenoiser, source: SampleSource
) -> Callable[[Value], Specs]:
    """Return a function that gives shape and dtype of every value (a tensor that ranks send each other), for the
    receiver. ``runnable``: the sampling table; ``denoiser``: the model; ``source``: gives sizes and type of the
    samples.
    """
    actions, blocks = runnable.actions, runnable.source.blocks
    rows = source.batch * denoiser.copies

    def spec(value: Value) -> Specs:
        piece = piece_of(value)
        if piece is None:
            row = actions.row_writing(value)
            tokens = sum(blocks[block] for block in row.queries)
            tokens += sum(key.end - key.first for key in actions.joined(row))
            return [((rows, tokens, denoiser.width), source.dtype)]
        tokens = piece.end - piece.first
        if piece.kind in ("z", "v"):
            return [((source.batch, tokens, source.values), source.dtype)]
        shape = (2, rows, denoiser.heads, tokens, denoiser.head_dim)
        return [(shape, source.dtype)]

    return spec


def mix_of(table: SamplingTable, source: SampleSource) -> TileMix | None:
    """Return the object that joins and guides the tiles of ``table``; None if the table has no tiles. ``source``: gives
    the size of tokens and patches.
    """
    if table.tiles is None:
        return None
    from weft.diffusion.tile_mix import TileMix

    return TileMix(table.tiles, source.values, source.patch)


class _Held:
    """Values by name, with the bytes of the memory behind them."""

    def __init__(self) -> None:
        self.values: dict[Value, Any] = {}
        self.users: Counter[int] = Counter()
        self.bytes = self.peak = 0

    def put(self, value: Value, x: Any) -> None:
        self.values[value] = x
        if isinstance(x, torch.Tensor):
            memory = x.untyped_storage()
            self.users[memory.data_ptr()] += 1
            if self.users[memory.data_ptr()] == 1:
                self.bytes += memory.nbytes()
                self.peak = max(self.peak, self.bytes)

    def drop(self, value: Value) -> None:
        x = self.values.pop(value)
        if isinstance(x, torch.Tensor):
            memory = x.untyped_storage()
            self.users[memory.data_ptr()] -= 1
            if not self.users[memory.data_ptr()]:
                del self.users[memory.data_ptr()]
                self.bytes -= memory.nbytes()


class _Walk:
    """One rank's walk through its actions."""

    def __init__(
        self,
        runnable: RunnableTable,
        rank: int,
        denoiser: TokenDenoiser,
        sampler: TokenSampler,
        source: SampleSource,
        wire: Wire | None,
    ) -> None:
        self.runnable, self.table, self.actions = runnable, runnable.source, runnable.actions  # fmt: skip
        self.denoiser, self.sampler, self.source, self.wire = denoiser, sampler, source, wire  # fmt: skip
        self.queue = runnable.lowered.ranks[rank]
        self.at = 0
        self.mix = mix_of(self.table, source)
        self.held = _Held()
        self.run = SamplingRun()
        self.memories: dict[tuple[int, ...], dict[str, Any]] = {}
        self.prepared: tuple[DenoisingRow, Any] | None = None
        self.arrivals: dict[int, list[Value]] = {}
        for action in self.queue:
            if action.kind == RECV:
                self.arrivals.setdefault(action.peer, []).append(action.writes[0])

    def all(self) -> SamplingRun:
        for peer, values in self.arrivals.items():
            values.reverse()
            for _ in range(min(self.runnable.window, len(values))):
                self._ask(peer)
        while self.at < len(self.queue):
            self._next()
        if self.wire is not None:
            self.wire.flush()
            self.run.bytes_sent = self.wire.bytes_sent
        self.run.peak_bytes = self.held.peak
        return self.run

    def _ask(self, peer: int) -> None:
        if self.wire is not None and self.arrivals[peer]:
            self.wire.ask(self.arrivals[peer].pop(), peer)

    def _next(self) -> None:
        action = self.queue[self.at]
        self.at += 1
        self.run.actions[action.kind] += 1
        if action.kind in (SEND, RECV):
            self._move(action)
        elif action.kind == FREE:
            for value in action.reads:
                self.held.drop(value)
        else:
            compute = {N: self._noise, E: self._embed, K: self._layer, P: self._predict, U: self._update,
                       O: self._finish}  # fmt: skip
            compute[action.kind](action)

    def _move(self, action: Action) -> None:
        assert self.wire is not None
        if action.kind == SEND:
            value = action.reads[0]
            self.wire.send(value, self.held.values[value], action.peer, self.runnable.window)  # fmt: skip
            return
        purpose = next((a for a in self.queue[self.at :] if a.peer < 0), action)
        value = action.writes[0]
        self.held.put(value, self.wire.take(value, action.peer, str(purpose)))
        self._ask(action.peer)

    def _prepare(self, row: DenoisingRow) -> Any:
        """Return what the layers need for the tokens of ``row``: those that join it, then its own."""
        if self.prepared is None or self.prepared[0] != row:
            table = self.table
            spans = [
                (table.places[key.block] + key.first, table.places[key.block] + key.end)
                for key in self.actions.joined(row)
            ]
            spans += [
                (table.places[block], table.places[block] + table.blocks[block])
                for block in row.queries
            ]
            places = torch.cat([torch.arange(*span) for span in spans])
            if table.tiles is not None:  # each is an image of its own
                places = places % table.tiles.tokens
            prepared = self.denoiser.prepare(places.to(self.source.device), row.step)
            self.prepared = row, (places, prepared)
        return self.prepared[1]

    def _noise(self, action: Action) -> None:
        for value in action.writes:
            piece = piece_of(value)
            assert piece is not None
            drawn = self.source.noise(value.microbatch, piece.first, piece.end)
            # a copy, so that no piece keeps all noise in memory
            drawn = drawn.to(self.source.device, self.source.dtype, copy=True)
            self.held.put(value, drawn.contiguous())

    def _embed(self, action: Action) -> None:
        row = self.actions.row_of(action)
        _, prepared = self._prepare(row)
        read = [self.held.values[value] for value in action.reads]
        if self.mix is not None and row.queries[0] == self.table.guide:
            read = [self.mix.reduced(dict(enumerate(read)))]
        latents = torch.cat(read, dim=1)  # [samples, tokens, values]
        self.held.put(action.writes[0], self.denoiser.embed(latents, prepared))

    def _layer(self, action: Action) -> None:
        """Run a layer: what stands in the table behind ``action`` up to its attention happens as the layer attends."""
        row = self.actions.row_of(action)
        places, prepared = self._prepare(row)
        closing: list[Action] = []

        def attend(q: T, k: T, v: T) -> T:
            keys = torch.stack((k, v))  # [2, batch, heads, tokens, head_dim]
            joined = self._put_keys(action, row, keys)
            while self.queue[self.at].kind != A:
                self._next()
            closing.append(self.queue[self.at])
            self.at += 1
            self.run.actions[A] += 1
            return self._attention(row, q, joined, closing[0].reads[1:], places)

        hidden = self.denoiser.layer(
            action.stage, self.held.values[action.reads[0]], prepared, attend
        )
        self.held.put(closing[0].writes[0], hidden)

    def _put_keys(self, action: Action, row: DenoisingRow, keys: T) -> T:
        """Keep the pieces of ``keys`` that rows read, and return those of the tokens that have joined."""
        joined = sum(key.end - key.first for key in self.actions.joined(row))
        starts, at = {}, joined
        for block in row.queries:
            starts[block] = at
            at += self.table.blocks[block]
        for value in action.writes:
            piece = piece_of(value)
            if piece is None:
                self.held.put(value, None)
                continue
            start = starts[value.microbatch % self.actions.count]
            part = keys[..., start + piece.first : start + piece.end, :]
            self.held.put(value, part.contiguous())
        return keys[..., :joined, :]

    def _attention(
        self, row: DenoisingRow, q: T, joined: T, reads: tuple[Value, ...], places: T
    ) -> T:
        """Return the attention of ``q`` to the keys of ``row`` that are not fully masked, in the order of places."""
        table = self.table
        apart = sorted(
            (table.places[key.block] + key.first, table.places[key.block] + key.end, key.far, self.held.values[value])
            for key, value in zip((k for k in row.keys if not k.joined), reads, strict=True)
        )  # fmt: skip
        at, parts = 0, list(apart)
        for key in self.actions.joined(row):
            size, start = key.end - key.first, table.places[key.block] + key.first
            parts.append((start, start + size, key.far, joined[..., at : at + size, :]))
            at += size
        parts.sort(key=lambda part: part[0])
        k, v = torch.cat([part[3] for part in parts], dim=-2)
        mask = None
        if table.window is not None:
            there = torch.cat([torch.arange(*part[:2]) for part in parts])
            far = torch.cat([torch.full((part[1] - part[0],), part[2]) for part in parts])  # fmt: skip
            apart_units = places[:, None] // table.unit - there[None] // table.unit
            mask = (apart_units.abs() <= table.window) | far[None]  # [queries, keys]
            mask = mask.to(q.device)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def _predict(self, action: Action) -> None:
        _, prepared = self._prepare(self.actions.row_of(action))
        predicted = self.denoiser.final(self.held.values[action.reads[0]], prepared)
        self.held.put(action.writes[0], predicted.contiguous())

    def _guided(self, row: DenoisingRow, predictions: list[T]) -> T:
        """Return the prediction for the tile of ``row``; ``predictions``: its own and those of its guides."""
        assert self.mix is not None
        tiles = {row.queries[0]: predictions[0]}
        small, weight = None, 0.0
        for guide, predicted in zip(row.guides, predictions[1:], strict=True):
            if guide.block == self.table.guide:
                small, weight = predicted, guide.weight
            else:
                tiles[guide.block] = predicted
        return self.mix.mixed(row.queries[0], tiles, small, weight)

    def _update(self, action: Action) -> None:
        row = self.actions.row_of(action)
        hidden, *latents = (self.held.values[value] for value in action.reads)
        if self.mix is None:
            _, prepared = self._prepare(row)
            velocity = self.denoiser.final(hidden, prepared)
        else:
            velocity = self._guided(row, [hidden, *latents[1:]])
            latents = latents[:1]
        sizes = [self.table.blocks[block] for block in row.queries]
        # the tokens that have joined are of another block's latents
        velocity = velocity[:, velocity.shape[1] - sum(sizes) :]
        for block, z, v in zip(row.queries, latents, velocity.split(sizes, dim=1), strict=True):  # fmt: skip
            memory = self.memories.setdefault((block,), {})
            fresh = self.sampler.update(z, v, row.step, memory)
            for value in action.writes:
                if value.microbatch % self.actions.count != block:
                    continue
                piece = piece_of(value)
                assert piece is not None
                whole = (piece.first, piece.end) == (0, fresh.shape[1])
                part = fresh[:, piece.first : piece.end]
                self.held.put(value, fresh if whole else part.contiguous())
            if row.step + 1 == self.table.steps:
                del self.memories[block,]

    def _finish(self, action: Action) -> None:
        block = action.microbatch % self.actions.count
        self.run.order.append((block, self.run.actions[U]))
        self.source.take(block, self.held.values[action.reads[0]])


def run_sampling(
    runnable: RunnableTable,
    rank: int,
    denoiser: TokenDenoiser,
    sampler: TokenSampler,
    source: SampleSource,
    wire: Wire | None = None,
) -> SamplingRun:
    """Run the part of ``rank`` in a sampling table. Every rank of the table calls it with its own number.

    ``runnable``: the table; ``denoiser``, ``sampler``: the model and the sampler; ``source``: gives the noise, and gets
    finished samples. ``wire``: sends and receives values, with :func:`value_specs` as its spec; None if the table has
    one rank. Raises :class:`weft.net.lost.PeerLost` naming a rank that does not deliver in time.
    """
    with torch.no_grad():
        return _Walk(runnable, rank, denoiser, sampler, source, wire).all()
