"""Forward passes over pieces of many texts at once; earlier tokens are kept in pages per layer.

A pass is the same for texts of one model and of several (:mod:`weft.generate.span_groups`): layers run in stretches,
between which tokens are grouped anew or an early exit is made. During a stretch, the attention of its layers is
replaced by the layers' pages (:mod:`weft.models.paged`). Their blocks are listed in the scheduler's tables
(:mod:`weft.generate.block_pool`).
"""

from collections.abc import Callable, Sequence
from threading import Lock

import torch

from weft.generate.block_contents import LayerPart, layer_parts, read_pages, write_pages
from weft.generate.cache_policy import CachePolicy, check_policy
from weft.generate.decode_step import (
    DecodeSteps,
    GraphRecorder,
    Recorder,
    decode_obstacle,
    decode_requests,
)
from weft.generate.early_exit import EarlyExit
from weft.generate.layer_stream import LayerStream, streaming
from weft.generate.packed_row import PackedRow, TextSlice, pack, parts_of
from weft.generate.scheduler import ScheduledStep
from weft.generate.span_groups import RowGroups, SpanGroup, joined_rows
from weft.generate.written_passes import WrittenPasses
from weft.models.adapter_shelf import AdapterShelf
from weft.models.backend_choice import choose_backend
from weft.models.borrowed_keys import LentBlocks
from weft.models.invariant import TILE, invariant
from weft.models.lean_block import make_lean
from weft.models.paged import KeyValuePages, Pages, attending, check_serves, layer_pages
from weft.models.queued_copy import queued_copy
from weft.models.row_adapters import HostAdapter
from weft.models.transformer import Transformer

T = torch.Tensor


def select_blocks(
    pages: Sequence[Pages], policy: CachePolicy, model: Transformer, size: int
) -> None:
    """Let selectors of ``policy`` choose the cached tokens that new tokens attend to, in every layer.

    ``pages``: the cache of each layer of ``model``; ``size``: tokens of a cache block. Raises :class:`UsageError` for a
    model that the policy cannot serve.
    """
    check_policy(policy, model, size)
    for each in pages:
        assert isinstance(each, KeyValuePages)
        each.selector = policy.selector(size)


def pooled(hidden: T, last: bool) -> T:
    """Return the mean over tokens of ``hidden`` ``[tokens, embed]``, or with ``last`` the last token's row: float32
    ``[embed]``.
    """
    return hidden[-1].float() if last else hidden.float().mean(0)


class PagedReader:
    """Computes parts of many texts in one forward pass of ``model``. Up to ``depth`` passes may be under way at once.
    ``size``: tokens of a cache block. ``alike``: whether logits are bitwise equal however texts are packed.
    ``attention``: name of the attention backend (:mod:`weft.models.attention_backend`); "": the fastest one.
    ``policy``: chooses the cached tokens that new tokens attend to; None: all of them.

    Attributes:
        ``decoding``: computes decode steps from recorded passes; None: every pass is launched anew.
        ``kept``: keeps what passes compute of each token; None: nothing does.
    """

    depth = 1
    decoding: DecodeSteps | None = None
    kept: WrittenPasses | None = None

    def __init__(
        self,
        model: Transformer,
        size: int = 16,
        alike: bool = False,
        attention: str = "",
        policy: CachePolicy | None = None,
    ) -> None:
        """Create a reader. ``alike``: a token's results do not depend on the rest of the batch
        (:mod:`weft.models.invariant`).
        """
        self.model, self.size, self.pages, self.alike = (
            model,
            size,
            layer_pages(model, size),
            alike,
        )
        make_lean(model)
        if policy is not None:
            select_blocks(self.pages, policy, model, size)
        self.shelf = AdapterShelf(model, self.pages)
        # models of the same shape that requests name instead of `model`
        self.others: dict[str, Transformer] = {}
        self.lent: LentBlocks = {}
        # of requests whose keys go to other engines while they are computed
        self.streams: list[LayerStream] = []
        # held while the memory of any layer's cache is replaced
        self.growing = Lock()
        backend = choose_backend(attention, model.mesh.device)
        if attention:
            check_serves(backend, model, size)
        for each in self.pages:
            each.lent, each.growing = self.lent, self.growing
            if isinstance(each, KeyValuePages):
                each.backend = backend

    def start(
        self, step: ScheduledStep, early: EarlyExit | None = None
    ) -> Callable[[], T]:
        """Launch the forward pass of a step. Return a function that waits for the logits ``[rows, vocab]``: the wanted
        rows of all texts of the step, one text after the other.

        ``early``: the early exit that the pass makes; None: none.
        """
        streamed = self._streamed(step)
        if self.decoding is not None and early is None and not streamed:
            requests = decode_requests(step)
            if requests and self.pages[0].store is not None:
                self.change_blocks(step.copies, step.loads)
                decoded = self.decoding.run(requests)
                return lambda: decoded
        # a plugin's model cannot remember: it reads all again
        parts = parts_of(step, bool(self.model.shape.kind))
        if self.kept is not None:
            self.kept.begin(step, [part.rows for part in parts])
        with streaming(streamed):
            logits = self.read(parts, step.copies, step.loads, early)
        if self.kept is not None:
            self.kept.end(logits)
        return lambda: logits

    def _streamed(self, step: ScheduledStep) -> list[tuple[LayerStream, int]]:
        """The streams of requests in the step, and how many tokens of each text are computed after it.

        Single tokens that were written are worth no frames.
        """
        if any(request.adapter in self.others for request in step.work):
            return []  # a layer's keys are written in several turns
        return [
            (stream, stream.request.computed + step.work[stream.request])
            for stream in self.streams
            if step.work.get(stream.request, 0) > bool(stream.request.written)
        ]

    def record_decoding(self, record: Recorder) -> str:
        """Compute decode steps from recorded passes from now on. Return why the model does not permit this; "" if it
        does. ``record``: function that takes a pass and returns one that repeats it.
        """
        why = "invariant passes" if self.alike else ""
        if any(getattr(each, "selector", None) for each in self.pages):
            why = "a cache policy"
        why = why or decode_obstacle(self.model, self.pages)
        if not why:
            self.decoding = DecodeSteps(self.model, self.pages, record)
        return why

    def record_graphs(self) -> str:
        """Record decode steps as CUDA graphs from now on. Return why this is not possible; "" if it is."""
        if self.model.mesh.device.type != "cuda":
            return "no GPU"
        return self.record_decoding(GraphRecorder())

    def weights_changed(self) -> None:
        """Forget the recorded decode steps if the model's parameters have other memory since."""
        if self.decoding is not None:
            self.decoding.weights_changed()

    @torch.inference_mode()
    def reserve(self, blocks: int) -> None:
        """Prepare the caches for ``blocks`` blocks at once. This is done in two cases only: for a cache in the host's
        memory, where unused blocks take no memory; and if decode steps are recorded, as each growth of the cache
        makes the recordings useless.
        """
        if self.decoding is None and self.model.mesh.device.type != "cpu":
            return
        for pages in self.pages:
            pages.reserved = blocks + 1
            if pages.store is not None:
                pages.room(blocks)

    def change_blocks(
        self, copies: Sequence[tuple[int, int]], loads: Sequence[tuple[str, list[int]]]
    ) -> None:
        """Copy cache blocks, and load adapters into others.

        ``copies``: pairs of cache blocks (from, to); ``loads``: pairs of an adapter's name and its blocks.
        """
        for pages in self.pages if copies else ():
            pages.copy(copies)
        for load in loads:
            self.shelf.load(*load)

    def add_adapter(self, name: str, adapter: HostAdapter) -> int:
        """Register ``adapter`` under ``name`` for later requests. Return the number of cache blocks that it needs."""
        return self.shelf.add(name, adapter)

    def block_form(self) -> list[LayerPart]:
        """Return, for each layer, the form of a cache block of the whole model: type, heads and shape of its values.
        The cache must be allocated already.
        """
        return layer_parts(self.model, self.pages)

    def read_blocks(self, table: Sequence[int], tokens: int) -> T:
        """Copy the first ``tokens`` tokens of the cache blocks in ``table`` to the host. Return uint8 ``[blocks,
        bytes]``: for each block the bytes of one layer after the other.
        """
        return read_pages(self.pages, self.block_form(), table, tokens)

    def write_blocks(self, table: Sequence[int], tokens: int, rows: T) -> None:
        """Write ``rows``, which :meth:`read_blocks` has returned, to the first ``tokens`` tokens of the cache blocks in
        ``table``.
        """
        write_pages(self.pages, self.block_form(), table, tokens, rows)

    def embed(self, ids: Sequence[int], last: bool) -> T:
        """Return the mean of the final hidden states of the text ``ids``, or with ``last`` the last token's hidden
        state: float32 ``[embed]``.
        """
        row, ends = (
            torch.tensor([ids, range(len(ids))], device=self.model.mesh.device),
            torch.tensor([0, len(ids)]),
        )
        return pooled(self.model.hidden(row[:1], row[1:], ends.int())[0], last)

    def close(self) -> None:
        """Do nothing: a model on one rank has no other ranks to end."""

    def read(
        self,
        parts: Sequence[TextSlice],
        copies: Sequence[tuple[int, int]] = (),
        loads: Sequence[tuple[str, list[int]]] = (),
        early: EarlyExit | None = None,
    ) -> T:
        """Run a forward pass over ``parts`` and return the logits ``[rows, vocab]``: the wanted rows of all parts, one
        part after the other.

        ``copies``: pairs of cache blocks (from, to) that are copied before the pass. ``loads``: pairs of an adapter's
        name and the blocks into which it is loaded before the pass. ``early``: where the pass shows early logits;
        None: nowhere.
        """
        return self.read_row(pack(parts), copies, loads, early)

    def read_row(
        self,
        row: PackedRow,
        copies: Sequence[tuple[int, int]] = (),
        loads: Sequence[tuple[str, list[int]]] = (),
        early: EarlyExit | None = None,
    ) -> T:
        """Run a forward pass over ``row`` and return the logits ``[wanted rows, vocab]``. The other arguments are those
        of :meth:`read`.
        """
        device, count = self.model.mesh.device, len(row.ids)
        filled = [0] * (-count % TILE if self.alike else 0)
        numbers = queued_copy([row.ids + filled, row.positions + filled], device)
        self.change_blocks(copies, loads)
        if self.model.shape.kind:  # a plugin's model, which has no layers
            only = queued_copy(row.wanted, device)
            ends = torch.tensor([0, *(span.last for span in row.spans)]).int()
            return self.model(numbers[:1], numbers[1:], ends, only=only)[0]
        named = [lent.name if lent else "" for lent in row.adapters]
        models = [self.others.get(name, self.model) for name in named]
        pairs = zip(named, row.adapters, strict=True)
        adapters = [None if name in self.others else lent for name, lent in pairs]
        groups = RowGroups(row._replace(adapters=adapters), models, numbers, self.size)
        with invariant(self.alike):
            x = joined_rows(
                ((each.rows, each.model.embedding(each.ids)) for each in groups.at(0)),
                count,
            )
            for layers, some in groups.stretches(early.layer if early else 0):
                results = ((each.rows, self._through(layers, each, x)) for each in some)
                x = joined_rows(results, count)
                if early is not None and layers.stop == early.layer:
                    early.take(groups.logits(x))
            return groups.logits(x)

    def _through(self, layers: range, group: SpanGroup, x: T) -> T:
        """Run ``layers`` on the tokens of ``group``, of the hidden states ``x`` of all tokens; return their output."""
        model, part = group.model, slice(layers.start, layers.stop)
        pages, reading = self.pages[part], group.reading
        for each in pages:
            each.reading = reading
        adapting = self.shelf.adapting(reading.spans, group.adapters, part)
        with attending(model, pages, part), adapting:
            own = x[:, group.rows]
            y = model.run_blocks(layers, own, group.rope, group.documents)
            return model.packed(y)
