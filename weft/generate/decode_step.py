"""Decode steps, in which every text computes one token, from tensors that stay where they are on the device.

Such a step has few numbers: of every text its token, positions, cache slot and block table. They are copied to the
device at once, into tensors that always have the same addresses and that are padded to one of a few numbers of rows.
The pass reads nothing else from the host. So a GPU can record its kernels once (a CUDA graph) and launch all of them
together later, which saves the host's time of a launch per kernel. Other steps are computed as before: those with
prompts, drafts, adapters, several models, or texts that see other texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from threading import Lock
from typing import TYPE_CHECKING

import torch

from weft.models.attention_backend import DecodeRows
from weft.models.paged import KeyValuePages, Reading, StatePages, attending

if TYPE_CHECKING:
    from weft.generate.request import Request
    from weft.generate.scheduler import ScheduledStep
    from weft.models.transformer import Transformer

T = torch.Tensor

#: The cache of one layer.
LayerPages = KeyValuePages | StatePages

#: Function that prepares a pass for being repeated: of a function that computes the pass, one that computes it again
#: from the same tensors' present contents. Both return the logits, always in the same tensor if need be.
Recorder = Callable[[Callable[[], T]], Callable[[], T]]

#: Held while a thread records: a recording begins by waiting for the whole GPU, which ends one of another thread.
RECORDING = Lock()

#: The fewest blocks of a table. Tables are padded to this number times a power of two.
LEAST_BLOCKS = 32

#: Numbers of a row beside its table: token, position, tokens before it, and slot of the cache.
COLUMNS = 4


def decode_obstacle(model: Transformer, pages: Sequence[LayerPages]) -> str:
    """Return why decode steps of ``model`` cannot be recorded once and then repeated (:class:`RecordedStep`); "" if
    they can. ``pages``: the cache of each layer.
    """
    shape = model.shape
    if shape.kind:
        return "a plugin's model"
    if shape.mixtures:
        return "experts, whose tokens are counted on the host"
    if model.mesh.layout.world > 1:
        return "several ranks"
    if any(type(each) is not KeyValuePages for each in pages):
        return "layers without plain keys and values"
    if model.hooks.saver is not None:
        return "hooks of training"
    if any(getattr(module, "elsewhere", False) for module in model.modules()):
        return "weights that rest in a file"
    return ""


def decode_requests(step: ScheduledStep) -> list[Request]:
    """Return the requests of ``step`` if it is a pure decode step, else an empty list. In a decode step each request
    computes exactly one new token and wants only the logits of this token. No request has drafts or an adapter, or
    attends to other texts.
    """
    requests = list(step.work)
    for request in requests:
        plain = not (request.branches or request.context or request.adapter)
        if not plain or step.work[request] != 1 or request.wanted != 1:
            return []
        if request.table[0] < 0 or request.prompt_rows(1):
            return []
    return requests


def padded_count(count: int, least: int = 1) -> int:
    """Return the number to which a ``count`` of texts or blocks is padded, so that few passes are recorded. It is the
    smallest number that is at least ``count`` and is ``least`` multiplied by a power of two.
    """
    while least < count:
        least *= 2
    return least


class RecordedStep:
    """A decode step whose tensors stay at fixed addresses, so that a CUDA graph of it can be repeated with other texts.
    It has room for ``rows`` texts with tables of up to ``blocks`` cache blocks each. ``record``: function that takes
    the pass and returns one that repeats it.

    ``scratch``: number of a cache block that no text has. Rows without a text write there.
    """

    def __init__(
        self,
        model: Transformer,
        pages: Sequence[LayerPages],
        rows: int,
        blocks: int,
        scratch: int,
        record: Recorder,
    ) -> None:
        self.model, self.pages, self.size = model, pages, pages[0].size
        self.rows, self.scratch = rows, scratch
        device = model.mesh.device
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(
            (COLUMNS + blocks) * rows, dtype=torch.int32, pin_memory=on_gpu
        )
        self.numbers = self.host.to(device)
        self.copied = torch.cuda.Event() if on_gpu else None
        values = self.host.numpy()
        self.columns = values[: COLUMNS * rows].reshape(COLUMNS, rows)
        self.tables = values[COLUMNS * rows :].reshape(rows, blocks)
        # the table that each row has now
        self.held: list[list[int]] = [[] for _ in range(rows)]
        self.fill([])
        self.documents = torch.arange(rows + 1, dtype=torch.int32)
        self.replay = record(self.compute)

    def fill(self, requests: Sequence[Request]) -> None:
        """Set the inputs of the step to the next tokens of ``requests``, one row each, and queue their copy to the
        device.
        """
        if self.copied is not None:
            self.copied.synchronize()  # the host's tensor is still being read
        count, size = len(requests), self.size
        for row, request in enumerate(requests):
            table = request.table
            if self.held[row] != table:
                self.tables[row, : len(table)] = table
                self.held[row] = list(table)
        for row in range(count, self.rows):
            if self.held[row]:
                self.held[row] = []
        places = [request.computed for request in requests]
        self.columns[:, :count] = (
            [request.ids[-1] for request in requests],
            [request.offset + request.computed for request in requests],
            places,
            [
                request.table[place // size] * size + place % size
                for request, place in zip(requests, places, strict=True)
            ],
        )
        self.columns[:, count:] = [[0], [0], [0], [self.scratch * size]]
        self.tables[count:, 0] = self.scratch
        self.numbers.copy_(self.host, non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def compute(self) -> T:
        """Compute the pass from the tensors on the device; return the logits ``[rows, vocab]``."""
        columns = self.numbers[: COLUMNS * self.rows].view(COLUMNS, self.rows)
        tables = self.numbers[COLUMNS * self.rows :].view(self.rows, -1)
        # ids and slots, of the type that tables of embeddings and caches are looked up with
        wide = columns[::3].long()
        reading = Reading([], wide[1], rows=DecodeRows(tables, columns[2]))
        for pages in self.pages:
            pages.reading = reading
        with attending(self.model, self.pages):
            return self.model(wide[:1], columns[1:2], self.documents)[0]


class DecodeSteps:
    """The recorded decode steps of an engine, one for each padded number of texts and of blocks of a table. ``model``:
    the model; ``pages``: the cache of each layer; ``record``: function that takes a pass and returns one that repeats
    it, such as a :class:`GraphRecorder`.
    """

    def __init__(
        self, model: Transformer, pages: Sequence[LayerPages], record: Recorder
    ) -> None:
        self.model, self.pages, self.record = model, pages, record
        self.steps: dict[tuple[int, int], RecordedStep] = {}
        # the tensors that the recorded steps read: the caches', and addresses of the weights
        self.stores: list[T | None] = []
        self.weights: list[int] = []
        for each in pages:
            each.spare = 1

    def run(self, requests: Sequence[Request]) -> T:
        """Compute the next token's logits of ``requests``: ``[requests, vocab]``. They are valid until the next
        call.
        """
        most = max(len(request.table) for request in requests)
        self._make_room(max(max(request.table) for request in requests) + 1)
        step = self._step(len(requests), most)
        step.fill(requests)
        return step.replay()[: len(requests)]

    def weights_changed(self) -> None:
        """Forget all recorded steps if a weight lies elsewhere than at the last call. Steps read new values of weights
        that have changed in place, so that a policy that learns is recorded once.
        """
        tensors = chain(self.model.parameters(), self.model.buffers())
        weights = [tensor.data_ptr() for tensor in tensors]
        if weights != self.weights:
            self.steps.clear()
            self.weights = weights

    def record_all(self, limit: int) -> None:
        """Record the steps of up to ``limit`` texts with short tables now, so that no request waits for it. The cache
        must be allocated already.
        """
        self._make_room(0)
        rows = padded_count(limit)
        while rows:
            self._step(rows, 1)
            rows //= 2

    def _make_room(self, blocks: int) -> None:
        """Enlarge the caches to ``blocks`` blocks, and forget all steps that were recorded with other tensors."""
        store = self.pages[0].store
        assert store is not None
        if store.shape[1] <= blocks:
            for pages in self.pages:
                pages.room(blocks)
        stores = [pages.store for pages in self.pages]
        if [*map(id, stores)] != [*map(id, self.stores)]:
            self.steps.clear()
            self.stores = stores

    def _step(self, count: int, blocks: int) -> RecordedStep:
        key = padded_count(count), padded_count(blocks, LEAST_BLOCKS)
        if key not in self.steps:
            store = self.pages[0].store
            assert store is not None
            self.steps[key] = RecordedStep(
                self.model, self.pages, *key, store.shape[1] - 1, self.record
            )
        return self.steps[key]


def repeat_pass(compute: Callable[[], T]) -> Callable[[], T]:
    """Return ``compute`` itself. It takes the place of a :class:`GraphRecorder` on devices without graphs: every
    repetition launches its kernels one by one.
    """
    return compute


class GraphRecorder:
    """Records passes as CUDA graphs. A call takes a function that computes a pass, and returns a function that repeats
    this pass. All graphs share one pool of memory, because only one of them runs at a time.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream: torch.cuda.Stream | None = None

    def __call__(self, compute: Callable[[], T]) -> Callable[[], T]:
        """Record ``compute``; return a function that repeats it."""
        with RECORDING:
            return self._recorded(compute)

    def _recorded(self, compute: Callable[[], T]) -> Callable[[], T]:
        # PyTorch's own stream for this is that of the GPU on which a process has recorded first
        stream = self.stream = self.stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled, and libraries get their memory
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # other threads may use the GPU meanwhile
        with torch.cuda.graph(
            graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"
        ):
            logits = compute()

        def replay() -> T:
            graph.replay()
            return logits

        return replay
