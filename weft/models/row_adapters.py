"""Low-rank adapters on one model where every text of a row has its own (S-LoRA, Sheng et al. 2023, 2311.03285).

An adapter is a flat tensor of values per layer, in which the factors of all adapted weights follow each other. Texts
with equally many tokens, whose adapters have the same form (rank and targets), are multiplied with them in one call.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import torch

from weft.models.projections import Projections
from weft.models.transformer import Transformer

T = torch.Tensor


class Factors(NamedTuple):
    """Where the two factors of one weight's adapter are in the flat tensor of all adapter values of a layer.

    Factor ``a``, ``[rank, into]``, comes first. Factor ``b``, ``[out, rank]``, follows it.

    Attributes:
        ``module``: name in the layer of the module that has the weight.
        ``name``: name of the weight in the module.
        ``rank``: rank of the factors.
        ``into``: size of the weight's input.
        ``out``: size of the weight's output.
        ``first``: index in the flat tensor at which ``a`` begins.
    """

    module: str
    name: str
    rank: int
    into: int
    out: int
    first: int

    def of(self, numbers: T) -> tuple[T, T]:
        """Return the factors ``a`` ``[..., rank, into]`` and ``b`` ``[..., out, rank]`` as views of ``numbers``.

        ``numbers``: all adapter values of the layer, flat in the last dimension.
        """
        middle = self.first + self.rank * self.into
        last = self.first + self.rank * (self.into + self.out)
        a, b = numbers[..., self.first : middle], numbers[..., middle:last]
        return a.unflatten(-1, (self.rank, self.into)), b.unflatten(
            -1, (self.out, self.rank)
        )


#: Places of all factors among the numbers of a layer. Adapters of the same form can be multiplied together.
Form = tuple[Factors, ...]


@dataclass(frozen=True)
class HostAdapter:
    """A low-rank adapter in host memory.

    ``values``: for each layer, a flat tensor with the factors of all adapted weights. ``forms``: for each layer, where
    each factor is in the layer's tensor.
    """

    forms: tuple[Form, ...]
    values: tuple[T, ...]

    @property
    def digest(self) -> bytes:
        """Hash of all values of the adapter, and of the description of how its factors lie in them."""
        whole = blake2b(repr(self.forms).encode(), digest_size=16)
        for values in self.values:
            raw = values.detach().cpu().contiguous().flatten().view(torch.uint8)
            whole.update(raw.numpy().data)
        return whole.digest()


class AdapterBatch(NamedTuple):
    """Texts that are multiplied with their adapters in one call.

    They have equally many new tokens, and their adapters have the same form. ``forms``: for each layer, where each
    factor is in the layer's values. ``rows``: indices of the tokens in the packed row, ``[texts, tokens]``. ``tables``:
    for each text, the cache blocks that hold its adapter, ``[texts, blocks]``.
    """

    forms: tuple[Form, ...]
    rows: T  # [texts, tokens], places in the packed row
    tables: T  # [texts, blocks]


def layer_modules(model: Transformer) -> list[dict[str, Projections]]:
    """Return, for every layer of this rank, the modules that an adapter can change, by their names in the layer."""
    modules_by_layer: dict[str, dict[str, Projections]] = {
        layer: {} for layer in model.blocks
    }
    for module in model.modules():
        if isinstance(module, Projections):
            _, layer, name = module.path.split(".", 2)
            modules_by_layer[layer][name] = module
    return list(modules_by_layer.values())


def laid_out(factors: Iterable[tuple[str, str, T, T]]) -> tuple[Form, T]:
    """Concatenate the factors of a layer's adapter in one flat tensor. Return a description of where each factor is,
    and the tensor. ``factors``: for each adapted weight, the name of its module, the weight's name, and the factors
    ``a`` and ``b``.
    """
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
    """Return the shard of an adapter that belongs to this rank's shard of the model.

    The adapter of a weight has the factors ``a`` ``[rank, in]`` and ``b`` ``[out, rank]``. Where the weight is cut by
    rows, ``b`` is cut in the same way, and each rank has its own part of the output. Where the weight is cut by
    columns, ``a`` is cut, and the outputs of all ranks are added up, as those of the weight are.
    """
    parts = []
    layers = map(int, model.blocks)
    for layer, modules in zip(layers, layer_modules(model), strict=True):
        factors = []
        for form in adapter.forms[layer]:
            module, (a, b) = modules[form.module], form.of(adapter.values[layer])
            rows, columns = module.logical[form.name].box
            own_rows = module.own_rows.get(form.name, rows)
            own = a[:, slice(*columns)], b[slice(*own_rows)]
            factors.append((form.module, form.name, *own))
        parts.append(laid_out(factors))
    forms, values = zip(*parts, strict=True)
    return HostAdapter(forms, values)


#: Function that adds adapters to the outputs of a module: of the layer's index, the module's name in the layer, the
#: module's input, the names of its weights, and their products.
AddAdapters = Callable[[int, str, T, Sequence[str], Sequence[T]], None]


def adding(groups: Sequence[AdapterBatch], read: Callable[[int, T], T]) -> AddAdapters:
    """Return a function that adds, for each of ``groups``, the outputs of its adapters to its tokens.

    ``read``: a function from the index of a layer and tables ``[texts, blocks]`` to the adapter values in these cache
    blocks, ``[texts, values]``.
    """
    held: dict[int, list[T]] = {}  # the numbers of one layer at a time, by group

    def add(
        layer: int, module: str, x: T, names: Sequence[str], outputs: Sequence[T]
    ) -> None:
        """Add adapters to ``outputs``, the products of ``x`` ``[1, tokens, in]`` with the weights ``names``."""
        if layer not in held:
            held.clear()
            held[layer] = [read(layer, group.tables) for group in groups]
        for group, numbers in zip(groups, held[layer], strict=True):
            rows = group.rows
            for form in group.forms[layer]:
                if form.module == module and form.name in names:
                    a, b = (each.to(x.dtype) for each in form.of(numbers))
                    low = x[0, rows] @ a.transpose(1, 2)  # [texts, tokens, rank]
                    added = (low @ b.transpose(1, 2)).flatten(0, 1)
                    y = outputs[names.index(form.name)][0]
                    y.index_add_(0, rows.flatten(), added)

    return add


@contextmanager
def adapting(
    layers: Mapping[int, Mapping[str, Projections]], add: AddAdapters
) -> Iterator[None]:
    """Return a context in which modules add the outputs of adapters to their own outputs.

    ``layers``: the modules of each layer (:func:`layer_modules`), by the layer's index; ``add``: function from
    :func:`adding` that adds the adapters' outputs.
    """
    try:
        for number, modules in layers.items():
            for name, module in modules.items():
                module.beside = partial(add, number, name)
        yield
    finally:
        for modules in layers.values():
            for module in modules.values():
                module.beside = None
