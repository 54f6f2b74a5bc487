"""Many adapters beside one model, each request with its own (S-LoRA, Sheng et al. 2023, 2311.03285).

Adapters rest in host memory. One that a request needs is copied into blocks of the cache, the same ones that keep keys
and values: requests share it, and when nobody uses it, it stays until its blocks are needed for something else. In a
step every adapter multiplies the rows of its own requests, all those of one form (rank and targets) in one call.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from weft.checkpoint.convert.peft import PeftAdapter, is_adapter, peft_name
from weft.errors import UsageError, WeftError
from weft.generate.cache import Pages
from weft.generate.keys import shelf_keys
from weft.generate.spans import Span
from weft.model_parameters import ADAPTERS, PROJECTIONS
from weft.models.adapters import Projections
from weft.models.transformer import Transformer

T = torch.Tensor

#: Weights that generation multiplies with others beforehand, so that nothing can be added to what they make.
ABSORBED = ("wkv_b",)


class Factors(NamedTuple):
    """What is added to one weight: its name in the layer, and where its two factors stand among the layer's numbers."""

    module: str
    name: str
    rank: int
    into: int
    out: int
    first: int


#: Where everything stands among the numbers of a layer. Adapters of one form can be multiplied together.
Form = tuple[Factors, ...]


@dataclass(frozen=True)
class HostAdapter:
    """An adapter in host memory: of every layer its form, and its numbers one behind the other."""

    forms: tuple[Form, ...]
    values: tuple[T, ...]


def layer_modules(model: Transformer) -> list[dict[str, Projections]]:
    """Of every layer, what an adapter may change, by name."""
    found: list[dict[str, Projections]] = [{} for _ in model.blocks]
    for module in model.modules():
        if isinstance(module, Projections):
            _, layer, name = module.path.split(".", 2)
            found[int(layer)][name] = module
    return found


def read_adapter(folder: Path, model: Transformer) -> HostAdapter:
    """The adapter that PEFT (or ``weft export``) wrote; :class:`WeftError` if it is not for ``model``."""
    if not is_adapter(folder):
        raise WeftError(f"{folder} has no adapter as PEFT writes it; write one with `weft export`")
    peft = PeftAdapter(folder)
    if peft.adapter.kind != "lora":
        raise WeftError(f"{folder} is a {peft.adapter.kind} adapter, which needs the weights themselves; "
                        "serve the model with it merged (`weft export --merge`)")  # fmt: skip
    unread, forms, values = dict(peft.sizes), [], []
    for number, modules in enumerate(layer_modules(model)):
        form, numbers, at = [], list[T](), 0
        for module, projections in modules.items():
            for name in PROJECTIONS.get(module, ()):
                logical = projections.logical.get(name)
                names = [peft_name(f"blocks.{number}.{module}{ADAPTERS}{name}.{part}") for part in "ab"]
                if names[0] not in unread or logical is None or name in ABSORBED:
                    continue
                (rank, into), (out, _) = sizes = [unread.pop(each) for each in names]
                if sizes != [(rank, logical.shape[1]), (logical.shape[0], rank)]:
                    raise WeftError(f"{folder} is an adapter for another model: {names[0]} and its partner are "
                                    f"{sizes}, and the weight is {tuple(logical.shape)} here")  # fmt: skip
                a, b = (peft.tensor(each) for each in names)
                numbers += [a.flatten(), (b * peft.adapter.scale).flatten()]
                form.append(Factors(module, name, rank, into, out, at))
                at += rank * (into + out)
        forms.append(tuple(form))
        values.append(torch.cat(numbers) if numbers else torch.empty(0))
    if unread:
        raise WeftError(
            f"{folder} adapts {next(iter(unread))}, which this model does not have, or not where it is read"
        )
    return HostAdapter(tuple(forms), tuple(values))


class Shelf:
    """The adapters that requests can name, and what of them is in the blocks of ``pages``, a layer's cache each."""

    def __init__(self, model: Transformer, pages: Sequence[Pages]) -> None:
        self.modules, self.pages = layer_modules(model), pages
        self.host: dict[str, HostAdapter] = {}
        self._forms: dict[tuple[Form, ...], int] = {}

    def add(self, name: str, adapter: HostAdapter) -> None:
        """Let requests name ``adapter``."""
        if name in self.host:
            raise UsageError(f"there is an adapter {name!r} already; give this one another name")
        self.host[name] = adapter
        self._forms.setdefault(adapter.forms, len(self._forms))

    def keys(self, name: str) -> list[bytes]:
        """By which the blocks of an adapter are found; their number is how many it needs."""
        if not name:
            return []
        blocks = max(-(-len(numbers) // self._room(pages)) for numbers, pages in self._layers(name))
        return shelf_keys(name, blocks)

    def load(self, name: str, table: Sequence[int]) -> None:
        """Copy an adapter into the blocks of ``table``."""
        for numbers, pages in self._layers(name):
            store = pages.room(max(table) + 1)
            filled = numbers.new_zeros(len(table) * self._room(pages))
            filled[: len(numbers)] = numbers
            store[:, list(table)] = filled.view(len(store), len(table), *store.shape[2:]).to(store)

    def _layers(self, name: str) -> Iterable[tuple[T, Pages]]:
        return zip(self.host[name].values, self.pages, strict=True)

    def _room(self, pages: Pages) -> int:
        """Numbers that fit into a layer's part of a block."""
        assert pages.store is not None
        return pages.store.numel() // pages.store.shape[1]

    @contextmanager
    def adapting(self, spans: Sequence[tuple[Span, str, Sequence[int]]]) -> Iterator[None]:
        """In here the layers add to the rows of each span what its adapter, by name and table, makes of them."""
        alike = defaultdict[tuple[int, int], list[tuple[Span, str, Sequence[int]]]](list)
        for span, name, table in spans:
            alike[self._forms[self.host[name].forms], span.last - span.first].append((span, name, table))
        step = StepAdapters(self.pages, [self._alike(some) for some in alike.values()])
        try:
            for number, modules in enumerate(self.modules):
                for name, module in modules.items():
                    module.beside = partial(step.add, number, name)
            yield
        finally:
            for modules in self.modules:
                for module in modules.values():
                    module.beside = None

    def _alike(self, some: Sequence[tuple[Span, str, Sequence[int]]]) -> "Alike":
        store = self.pages[0].store
        assert store is not None
        rows = torch.tensor([[*range(span.first, span.last)] for span, _, _ in some], device=store.device)
        tables = torch.tensor([list(table) for _, _, table in some], device=store.device)
        return Alike(self.host[some[0][1]].forms, rows, tables)


class Alike(NamedTuple):
    """Spans of equally many tokens with adapters of one form."""

    forms: tuple[Form, ...]
    rows: T  # [texts, tokens], places in the packed row
    tables: T  # [texts, blocks]


class StepAdapters:
    """What the adapters of a step add, layer by layer: the numbers of one layer are held at a time."""

    def __init__(self, pages: Sequence[Pages], groups: Sequence[Alike]) -> None:
        self.pages, self.groups = pages, groups
        self._layer, self._numbers = -1, list[T]()

    def _numbers_of(self, layer: int) -> list[T]:
        """Of every group ``[texts, numbers of a table]``."""
        if layer != self._layer:
            store = self.pages[layer].store
            assert store is not None
            self._numbers = [store[:, group.tables].transpose(0, 1).flatten(1) for group in self.groups]
            self._layer = layer
        return self._numbers

    def add(self, layer: int, module: str, x: T, names: Sequence[str], made: Sequence[T]) -> None:
        """Add to what the weights ``names`` made of ``x`` ``[1, tokens, in]``, in place."""
        for group, numbers in zip(self.groups, self._numbers_of(layer), strict=True):
            for one in group.forms[layer]:
                if one.module == module and one.name in names:
                    middle, last = one.first + one.rank * one.into, one.first + one.rank * (one.into + one.out)
                    a = numbers[:, one.first : middle].view(-1, one.rank, one.into).to(x.dtype)
                    b = numbers[:, middle:last].view(-1, one.out, one.rank).to(x.dtype)
                    low = x[0, group.rows] @ a.transpose(1, 2)  # [texts, tokens, rank]
                    made[names.index(one.name)][0].index_add_(
                        0, group.rows.flatten(), (low @ b.transpose(1, 2)).flatten(0, 1)
                    )
