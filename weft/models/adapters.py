"""Projections that may have a low-rank adapter beside a frozen weight: LoRA (Hu et al. 2021) and its relatives.

Of kind ``qlora`` all projections' weights are stored in four bits (:mod:`weft.models.nf4`), adapted or not.

An adapter of a weight ``[out, in]`` is ``a`` ``[rank, in]`` and ``b`` ``[out, rank]``; what the weight makes of ``x``
grows by ``scale * b @ (a @ x)``. Nobody cuts the dimension ``rank``, and the others are those of the weight: of one
that is cut on ``in``, ``a`` is cut and ``b`` whole, of one that is cut on ``out`` it is the other way round. All that
follows from a parameter's dimensions (what is held, summed, counted, saved) therefore holds for adapters too.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
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

#: What stands for some weights that are multiplied with the same input: the product with each of them.
Products = Callable[[T], tuple[T, ...]]


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


class Projections(Module):
    """A module whose weights project, each with an adapter if the model's ``adapter`` targets it."""

    #: Names of the weights that may be one product each time, as they have the same input.
    TOGETHER: tuple[tuple[str, ...], ...] = ()

    def __init__(self, shape: ModelShape, mesh: Mesh, table: Table, path: str) -> None:
        super().__init__(mesh, table, path)
        self.adapter = shape.adapter
        self.own_rows: dict[str, tuple[int, int]] = {}
        self.adapters, self.quantized = nn.ModuleDict(), nn.ModuleDict()
        # in place of weights (weft.models.products)
        self.products: dict[tuple[str, ...], Products] = {}
        # Adds other adapters to what weights of some names made of an input, if set (weft.models.row_adapters).
        self.beside: Callable[[T, tuple[str, ...], tuple[T, ...]], None] | None = None

    def projection(self, name: str, own_rows: tuple[int, int] | None = None) -> None:
        """Register the weight ``name``. ``own_rows``: it is held whole, and this rank uses these rows of it."""
        whole, path = own_rows is not None, self.inside(name)
        stored, beside = (self.path + part + name for part in (QUANTIZED, ADAPTERS))
        if path in self.described:
            self.weight(name, whole)
        else:
            self.quantized[name] = Quantized(self.mesh, self.described, stored, whole)
        if own_rows is not None:
            self.own_rows[name] = own_rows
        if self.adapter is not None and f"{beside}.a" in self.described:
            scale = adapter_scale(self.adapter, path)
            self.adapters[name] = LowRank(
                self.mesh, self.described, beside, scale, whole
            )

    def merged(self, name: str) -> T:
        """The weight ``name`` with what its adapter adds, of a model on one device."""
        weight: T = (
            self._stored(name).dense(torch.float32)
            if name in self.quantized
            else getattr(self, name)
        )
        if name not in self.adapters:
            return weight
        adapter = self._adapter(name)
        weight = weight + adapter.scale * (adapter.b @ adapter.a)
        if adapter.has_magnitude:
            weight = (
                weight
                * (adapter.magnitude / row_norms(weight).to(weight.dtype))[:, None]
            )
        return weight

    def forget(self, *names: str) -> None:
        """Give back the memory of weights that :attr:`products` stand for, and of their adapters."""
        for name in names:
            for holder in (
                self._parameters,
                self.adapters._modules,
                self.quantized._modules,
            ):
                holder.pop(name, None)

    def own(self, name: str, values: T) -> T:
        """Of ``values``, whose rows are those of weight ``name``, what this rank uses."""
        return (
            own(values, *self.own_rows[name], self.mesh)
            if name in self.own_rows
            else values
        )

    def project(self, x: T, *names: str) -> tuple[T, ...]:
        """What the weights ``names`` and their adapters make of ``x``: ``[batch, seq, in]`` to ``[..., out]`` each."""
        made = self._project(x, *names)
        if self.beside is not None:
            self.beside(x, names, made)
        return made

    def _project(self, x: T, *names: str) -> tuple[T, ...]:
        if made_at_once := self.products.get(names):
            return made_at_once(x)
        dense = [name for name in names if name not in self.quantized]
        adapted = [name for name in names if name in self.adapters]
        weights = [self.own(name, getattr(self, name)) for name in dense]
        draws = (
            current_draws()
            if self.adapter is not None and self.adapter.dropout
            else None
        )
        together = [self._adapter(name).a for name in adapted] if draws is None else []
        made = project(x, *weights, *together) if weights or together else ()
        outputs = dict(zip(dense, made, strict=False))
        for name in names:
            if name in self.quantized:
                outputs[name] = self._project_quantized(name, x)
        lows = (
            made[len(dense) :]
            if draws is None
            else [self._project_dropped(name, x, draws) for name in adapted]
        )
        for name, low in zip(adapted, lows, strict=True):
            outputs[name] = self._adapt(name, outputs[name], low)
        return tuple(outputs[name] for name in names)

    def _project_quantized(self, name: str, x: T) -> T:
        first, _ = self.own_rows.get(name, (0, 0))
        y: T = self._stored(name).project(
            x, lambda values: self.own(name, values), first
        )
        return y

    def _project_dropped(self, name: str, x: T, draws: T) -> T:
        """What the first factor of an adapter makes of ``x``, of which some is dropped."""
        assert self.adapter is not None
        adapter = self._adapter(name)
        first, _ = adapter.logical["a"].box[1]
        return project(
            dropped(x, self.adapter.dropout, draws, f"{self.path}.{name}", first),
            adapter.a,
        )[0]

    def _adapter(self, name: str) -> Any:
        return self.adapters[name]

    def _stored(self, name: str) -> Any:
        return self.quantized[name]

    def _adapt(self, name: str, y: T, low: T) -> T:
        """``y`` of the weight ``name`` with what its adapter adds; ``low``: ``[batch, seq, rank]``."""
        adapter = self._adapter(name)
        b = self.own(name, adapter.b)
        y = y + project(low * adapter.scale, b)[0]
        if not adapter.has_magnitude:
            return y
        # The norm is taken as a constant (DoRA, Liu et al. 2024, section 4.3). To expand its square, as the part of the
        # weight stays, would save 1 % of a step of 1,024 tokens, and lose rows that an adapter nearly cancels.
        with torch.no_grad():
            weight = self.own(name, getattr(self, name))
            square = row_norms(weight + adapter.scale * multiply(b, adapter.a)).square()
            norm = (
                total_of_shares(square, adapter.logical["a"].cuts[1], self.mesh)
                .sqrt()
                .to(weight.dtype)
            )
        return y * (self.own(name, adapter.magnitude) / norm)


def row_norms(weight: T) -> T:
    """The norm of every row of ``[out, in]``: ``[out]``, float64, so that its rounding to less is the same however
    its sums are split."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64)


@torch.no_grad()
def merged_parameters(model: nn.Module) -> dict[str, T]:
    """The parameters of a model on one device by their names without adapters, which are merged into the weights."""
    merged = {
        n: p.detach()
        for n, p in model.named_parameters()
        if ADAPTERS not in n and QUANTIZED not in n
    }
    for path, module in model.named_modules():
        if isinstance(module, Projections) and module.adapter is not None:
            names = {*module.quantized, *module.adapters}
            merged |= {f"{path}.{name}": module.merged(name) for name in names}
        if isinstance(module, TokenRows):
            weight = base_weight(f"{path}.rows")
            merged[weight] = module.placed(merged[weight])
    return merged


def base_of(shape: ModelShape) -> ModelShape:
    """The model without its adapter."""
    return shape.model_copy(update={"adapter": None})


def base_weight(name: str) -> str:
    """The path of the weight that the adapter's parameter ``name`` belongs to."""
    rows = {rows: VOCABULARY[weight] for weight, rows in ROWS.items()}
    return rows.get(name) or name.rpartition(".")[0].replace(ADAPTERS, ".")
