"""Low-rank adapters beside the frozen weights of projections: LoRA (Hu et al. 2021) and its relatives.

Of kind ``qlora`` all projections' weights are stored in four bits (:mod:`weft.models.nf4`), adapted or not.

An adapter of a weight ``[out, in]`` is ``a`` ``[rank, in]`` and ``b`` ``[out, rank]``; what the weight makes of ``x``
grows by ``scale * b @ (a @ x)``. Nobody cuts the dimension ``rank``, and the others are those of the weight: of one
that is cut on ``in``, ``a`` is cut and ``b`` whole, of one that is cut on ``out`` it is the other way round. All that
follows from a parameter's dimensions (what is held, summed, counted, saved) therefore holds for adapters too.

Functions here take the module whose weights are adapted, which is one of :mod:`weft.models.projections`.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.layout.boundary import own, total_of_shares
from weft.layout.mesh import Mesh
from weft.models.dropout import current_draws, dropped
from weft.models.fused import project
from weft.models.module import Module
from weft.models.nf4 import Quantized
from weft.models.widened import multiply
from weft.recipe import ModelShape
from weft.shapes.parameters import (
    ADAPTERS,
    QUANTIZED,
    ROWS,
    VOCABULARY,
    Table,
    adapter_scale,
)

T = torch.Tensor


class LowRank(Module):
    """The adapter of a weight ``[out, into]``; of kind ``dora`` also the weight's ``magnitude``, a number per row.

    ``b`` is zero at the start, and the magnitude that of the weight, so that nothing changes.
    """

    def __init__(
        self, mesh: Mesh, table: Table, path: str, scale: float, whole: bool
    ) -> None:
        super().__init__(mesh, table, path)
        self.scale = scale
        self.weight("a", whole)
        self.weight("b", whole)
        self.has_magnitude = self.inside("magnitude") in table
        if self.has_magnitude:
            self.weight("magnitude", whole)


class TokenRows(Module):
    """Rows of a weight ``[vocab, embed]`` that learn, for ``tokens`` in ascending order; they stand for its own.

    ``part``: the first and last of the tokens that this rank's part of the weight has rows for. Every rank of ``tp``
    has all rows that learn, and uses those of its part.
    """

    def __init__(
        self, tokens: Sequence[int], part: tuple[int, int], mesh: Mesh, table: Table,
        path: str,
    ) -> None:  # fmt: skip
        super().__init__(mesh, table, path)
        first, last = part
        self.tokens, self.first = torch.tensor(tokens), first
        self.own_rows = bisect_left(tokens, first), bisect_left(tokens, last)
        self.weight("rows", whole=True)

    def looked_up(self, tokens: T, x: T) -> T:
        """``x``, what the weight has for ``tokens`` (``[..., embed]``), with the rows that learn in its place."""
        known, (lo, hi) = self.tokens.to(tokens.device), self.own_rows
        if lo == hi:  # nothing is added, but all ranks have a gradient to sum up
            return x + own(self.rows, lo, hi, self.mesh).sum()
        place = torch.searchsorted(known[lo:hi], tokens).clamp(max=hi - lo - 1)
        learns = (known[lo:hi][place] == tokens)[..., None]
        return torch.where(
            learns, F.embedding(place, own(self.rows, lo, hi, self.mesh)), x
        )

    def placed(self, weight: T) -> T:
        """This rank's part of the weight, with the rows that learn in it."""
        index, rows = self._own()
        return weight.index_copy(0, index.to(weight.device), rows.to(weight.dtype))

    def scored(self, hidden: T, logits: T) -> T:
        """``logits`` of this rank's part of the weight, ``[..., vocab/tp]``, with those of the rows that learn."""
        index, rows = self._own()
        own_logits = F.linear(hidden, rows.to(hidden.dtype)).to(logits.dtype)
        return logits.index_copy(-1, index.to(logits.device), own_logits)

    def _own(self) -> tuple[T, T]:
        lo, hi = self.own_rows
        return self.tokens[lo:hi] - self.first, own(self.rows, lo, hi, self.mesh)


def adapt(module: Module, name: str, whole: bool) -> None:
    """Register what the table has in the place of the weight ``name``, and beside it."""
    stored, beside = (module.path + part + name for part in (QUANTIZED, ADAPTERS))
    if module.inside(name) not in module.described:
        module.quantized[name] = Quantized(module.mesh, module.described, stored, whole)
    if module.adapter is not None and f"{beside}.a" in module.described:
        scale = adapter_scale(module.adapter, module.inside(name))
        module.adapters[name] = LowRank(
            module.mesh, module.described, beside, scale, whole
        )


def merged(module: Module, name: str) -> T:
    """The weight ``name`` with what its adapter adds, of a model on one device."""
    weight: T = (
        _stored(module, name).dense(torch.float32)
        if name in module.quantized
        else getattr(module, name)
    )
    if name not in module.adapters:
        return weight
    adapter = _adapter(module, name)
    weight = weight + adapter.scale * (adapter.b @ adapter.a)
    if adapter.has_magnitude:
        norms = row_norms(weight).to(weight.dtype)
        weight = weight * (adapter.magnitude / norms)[:, None]
    return weight


def adapted_products(module: Module, x: T, names: Sequence[str]) -> tuple[T, ...]:
    """What the weights ``names`` of a module and their adapters make of ``x``."""
    assert module.adapter is not None
    dense = [name for name in names if name not in module.quantized]
    adapted = [name for name in names if name in module.adapters]
    weights = [module.own(name, getattr(module, name)) for name in dense]
    draws = current_draws() if module.adapter.dropout else None
    together = [_adapter(module, name).a for name in adapted] if draws is None else []
    products = project(x, *weights, *together) if weights or together else ()
    outputs = dict(zip(dense, products, strict=False))
    for name in names:
        if name in module.quantized:
            outputs[name] = _project_quantized(module, name, x)
    lows = (
        products[len(dense) :]
        if draws is None
        else [_project_dropped(module, name, x, draws) for name in adapted]
    )
    for name, low in zip(adapted, lows, strict=True):
        outputs[name] = _adapt(module, name, outputs[name], low)
    return tuple(outputs[name] for name in names)


def _project_quantized(module: Module, name: str, x: T) -> T:
    first, _ = module.own_rows.get(name, (0, 0))
    y: T = _stored(module, name).project(
        x, lambda values: module.own(name, values), first
    )
    return y


def _project_dropped(module: Module, name: str, x: T, draws: T) -> T:
    """What the first factor of an adapter makes of ``x``, of which some is dropped."""
    assert module.adapter is not None
    adapter = _adapter(module, name)
    first, _ = adapter.logical["a"].box[1]
    return project(
        dropped(x, module.adapter.dropout, draws, f"{module.path}.{name}", first),
        adapter.a,
    )[0]


def _adapter(module: Module, name: str) -> Any:
    return module.adapters[name]


def _stored(module: Module, name: str) -> Any:
    return module.quantized[name]


def _adapt(module: Module, name: str, y: T, low: T) -> T:
    """``y`` of the weight ``name`` with what its adapter adds; ``low``: ``[batch, seq, rank]``."""
    adapter = _adapter(module, name)
    b = module.own(name, adapter.b)
    y = y + project(low * adapter.scale, b)[0]
    if not adapter.has_magnitude:
        return y
    # The norm is taken as a constant (DoRA, Liu et al. 2024, section 4.3). To expand its square, as the part of the
    # weight stays, would save 1 % of a step of 1,024 tokens, and lose rows that an adapter nearly cancels.
    with torch.no_grad():
        weight = module.own(name, getattr(module, name))
        square = row_norms(weight + adapter.scale * multiply(b, adapter.a)).square()
        norm = (
            total_of_shares(square, adapter.logical["a"].cuts[1], module.mesh)
            .sqrt()
            .to(weight.dtype)
        )
    return y * (module.own(name, adapter.magnitude) / norm)


def row_norms(weight: T) -> T:
    """The norm of every row of ``[out, in]``: ``[out]``, float64, so that its rounding to less is the same however
    its sums are split."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64)


@torch.no_grad()
def merged_parameters(model: nn.Module) -> dict[str, T]:
    """The parameters of a model on one device by their names without adapters, which are merged into the weights."""
    weights = {
        n: p.detach()
        for n, p in model.named_parameters()
        if ADAPTERS not in n and QUANTIZED not in n
    }
    for path, module in model.named_modules():
        if isinstance(module, Module) and getattr(module, "adapter", None):
            names = {*module.quantized, *module.adapters}
            weights |= {f"{path}.{name}": merged(module, name) for name in names}
        if isinstance(module, TokenRows):
            weight = base_weight(f"{path}.rows")
            weights[weight] = module.placed(weights[weight])
    return weights


def base_of(shape: ModelShape) -> ModelShape:
    """The model without its adapter."""
    return shape.model_copy(update={"adapter": None})


def base_weight(name: str) -> str:
    """The path of the weight that the adapter's parameter ``name`` belongs to."""
    rows = {rows: VOCABULARY[weight] for weight, rows in ROWS.items()}
    return rows.get(name) or name.rpartition(".")[0].replace(ADAPTERS, ".")
