"""Low-rank adapters on one model where every text in a row has its own (S-LoRA, Sheng et al. 2023, 2311.03285).

An adapter is a list of numbers per layer, in which the factors of the weights that it changes follow each other. Texts
of equally many tokens whose adapters have one form (rank and targets) are multiplied with them in one call.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from weft.models.projections import Projections
from weft.models.transformer import Transformer

T = torch.Tensor


class Factors(NamedTuple):
    """What is added to one weight: its name in the layer, and where its two factors stand among the layer's numbers."""

    module: str
    name: str
    rank: int
    into: int
    out: int
    first: int

    def of(self, numbers: T) -> tuple[T, T]:
        """``a`` ``[..., rank, into]`` and ``b`` ``[..., out, rank]`` among ``numbers``, ``[..., all of a layer]``."""
        middle = self.first + self.rank * self.into
        last = self.first + self.rank * (self.into + self.out)
        a, b = numbers[..., self.first : middle], numbers[..., middle:last]
        return a.unflatten(-1, (self.rank, self.into)), b.unflatten(
            -1, (self.out, self.rank)
        )


#: Where everything stands among the numbers of a layer. Adapters of one form can be multiplied together.
Form = tuple[Factors, ...]


@dataclass(frozen=True)
class HostAdapter:
    """An adapter in host memory: of every layer its form, and its numbers one behind the other."""

    forms: tuple[Form, ...]
    values: tuple[T, ...]


class AdapterBatch(NamedTuple):
    """Texts of equally many tokens with adapters of one form, which lie in blocks."""

    forms: tuple[Form, ...]
    rows: T  # [texts, tokens], places in the packed row
    tables: T  # [texts, blocks]


def layer_modules(model: Transformer) -> list[dict[str, Projections]]:
    """Of every layer that this rank has, what an adapter may change, by name."""
    modules_by_layer: dict[str, dict[str, Projections]] = {
        layer: {} for layer in model.blocks
    }
    for module in model.modules():
        if isinstance(module, Projections):
            _, layer, name = module.path.split(".", 2)
            modules_by_layer[layer][name] = module
    return list(modules_by_layer.values())


def laid_out(factors: Iterable[tuple[str, str, T, T]]) -> tuple[Form, T]:
    """The form and the numbers of a layer, of module and name of each weight and its ``a`` and ``b``."""
    form = list[Factors]()
    numbers = [torch.empty(0)]
    at = 0
    for module, name, a, b in factors:
        rank, into = a.shape
        form.append(Factors(module, name, rank, into, len(b), at))
        numbers += [a.flatten(), b.flatten()]
        at += a.numel() + b.numel()
    return tuple(form), torch.cat(numbers)


def own_part(adapter: HostAdapter, model: Transformer) -> HostAdapter:
    """What an adapter of the whole model is to this rank's part of it: its layers' factors, cut as the weights are.

    Of a weight that is cut by rows, ``b`` is, and what is added too; of one that is cut by columns, ``a`` is, and what
    is added is a share of the sum that the weight's product is a share of.
    """
    parts = []
    for layer, modules in zip(
        map(int, model.blocks), layer_modules(model), strict=True
    ):
        factors = []
        for form in adapter.forms[layer]:
            module, (a, b) = modules[form.module], form.of(adapter.values[layer])
            rows, columns = module.logical[form.name].box
            own_rows = module.own_rows.get(form.name, rows)
            factors.append(
                (form.module, form.name, a[:, slice(*columns)], b[slice(*own_rows)])
            )
        parts.append(laid_out(factors))
    forms, values = zip(*parts, strict=True)
    return HostAdapter(forms, values)


@contextmanager
def adapting(
    layers: Sequence[dict[str, Projections]],
    groups: Sequence[AdapterBatch],
    read: Callable[[int, T], T],
) -> Iterator[None]:
    """In here ``layers`` add to the rows of each of ``groups`` what its adapters make of them.

    ``read``: the numbers of a layer ``[texts, numbers]`` in the blocks of tables ``[texts, blocks]``.
    """
    step = StepAdapters(groups, read)
    try:
        for number, modules in enumerate(layers):
            for name, module in modules.items():
                module.beside = partial(step.add, number, name)
        yield
    finally:
        for modules in layers:
            for module in modules.values():
                module.beside = None


class StepAdapters:
    """What the adapters of a step add, layer by layer: the numbers of one layer are held at a time."""

    def __init__(
        self, groups: Sequence[AdapterBatch], read: Callable[[int, T], T]
    ) -> None:
        self.groups, self.read = groups, read
        self._layer, self._numbers = -1, list[T]()

    def _numbers_of(self, layer: int) -> list[T]:
        """Of every group ``[texts, numbers of a table]``."""
        if layer != self._layer:
            self._layer, self._numbers = (
                layer,
                [self.read(layer, group.tables) for group in self.groups],
            )
        return self._numbers

    def add(
        self, layer: int, module: str, x: T, names: Sequence[str], outputs: Sequence[T]
    ) -> None:
        """Add the adapters' products to ``outputs``, in place.

        ``outputs`` are the products of ``x`` ``[1, tokens, in]`` with the weights ``names``.
        """
        for group, numbers in zip(self.groups, self._numbers_of(layer), strict=True):
            for form in group.forms[layer]:
                if form.module == module and form.name in names:
                    a, b = (each.to(x.dtype) for each in form.of(numbers))
                    low = x[0, group.rows] @ a.transpose(1, 2)  # [texts, tokens, rank]
                    outputs[names.index(form.name)][0].index_add_(
                        0, group.rows.flatten(), (low @ b.transpose(1, 2)).flatten(0, 1)
                    )
