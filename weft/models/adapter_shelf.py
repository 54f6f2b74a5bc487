"""Many adapters beside one model, where each request may use its own (S-LoRA, Sheng et al. 2023, 2311.03285).

Adapters rest in host memory. An adapter that a request needs is copied into blocks of the key/value cache. Requests
share this copy; when no request uses the adapter, the copy stays until its blocks are needed. In a step every adapter
multiplies the rows of its own requests (:mod:`weft.models.row_adapters`).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import NamedTuple

import torch

from weft.models.paged import Pages
from weft.models.projections import Projections
from weft.models.row_adapters import (
    AdapterBatch,
    Form,
    HostAdapter,
    adapting,
    adding,
    layer_modules,
)
from weft.models.spans import Span
from weft.models.transformer import Transformer

T = torch.Tensor


class LentAdapter(NamedTuple):
    """The adapter that a request uses.

    ``name``: name under which the adapter was added to the :class:`AdapterShelf`; ``table``: numbers of the cache
    blocks that hold a copy of the adapter.
    """

    name: str
    table: Sequence[int]


class AdapterShelf:
    """The adapters that requests can name, held in host memory.

    Adapters in use are copied into blocks of the key/value cache. ``model``: the model that the adapters adapt;
    ``pages``: the cache of each layer.
    """

    def __init__(self, model: Transformer, pages: Sequence[Pages]) -> None:
        self.model, self.pages = model, pages
        self.host: dict[str, HostAdapter] = {}

    def add(self, name: str, adapter: HostAdapter) -> int:
        """Add an adapter under ``name``, and return the number of cache blocks that a copy of the adapter needs.

        ``adapter``: the part of the adapter that belongs to this rank's shard of the model (:func:`own_part`).
        """
        self.host[name] = adapter
        return max(
            -(-len(numbers) // pages.room(0)[:, 0].numel())
            for numbers, pages in self._layers(name)
        )

    @cached_property
    def _modules(self) -> list[dict[str, Projections]]:
        return layer_modules(self.model)

    def load(self, name: str, table: Sequence[int]) -> None:
        """Copy the adapter ``name`` into the cache blocks whose numbers are in ``table``."""
        for numbers, pages in self._layers(name):
            store = pages.room(max(table) + 1)
            filled = numbers.new_zeros(len(table) * store[:, 0].numel())
            filled[: len(numbers)] = numbers
            store[:, list(table)] = filled.view(
                len(store), len(table), *store.shape[2:]
            ).to(store)

    def _layers(self, name: str) -> Iterable[tuple[T, Pages]]:
        return zip(self.host[name].values, self.pages, strict=True)

    def adapting(
        self,
        spans: Sequence[Span],
        adapters: Sequence[LentAdapter | None],
        part: slice = slice(None),
    ) -> AbstractContextManager[None]:
        """Return a context in which the layers apply each request's adapter to the request's new tokens. ``spans``: the
        new tokens of each request. ``adapters``: for each request, its adapter; None for a request without an adapter.
        ``part``: the layers that run in the context; all by default.
        """
        alike = defaultdict[
            tuple[tuple[Form, ...], int], list[tuple[Span, Sequence[int]]]
        ](list)
        for span, lent in zip(spans, adapters, strict=True):
            if lent and span.last > span.first:
                alike[self.host[lent.name].forms, span.last - span.first].append(
                    (span, lent.table)
                )
        if not alike:
            return nullcontext()
        batches = [self._alike(forms, some) for (forms, _), some in alike.items()]
        modules = dict([*enumerate(self._modules)][part])
        return adapting(modules, adding(batches, self._read))

    def _alike(
        self, forms: tuple[Form, ...], some: Sequence[tuple[Span, Sequence[int]]]
    ) -> AdapterBatch:
        device = self.pages[0].room(0).device
        rows = torch.tensor(
            [[*range(span.first, span.last)] for span, _ in some], device=device
        )
        return AdapterBatch(
            forms, rows, torch.tensor([list(table) for _, table in some], device=device)
        )

    def _read(self, layer: int, tables: T) -> T:
        """Return the numbers in the blocks of ``tables`` ``[texts, blocks]``: ``[texts, numbers]``."""
        return self.pages[layer].room(0)[:, tables].transpose(0, 1).flatten(1)
