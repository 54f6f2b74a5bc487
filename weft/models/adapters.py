"""Low-rank adapters beside the frozen weights of projections: LoRA (Hu et al. 2021) and its relatives.

With kind ``qlora`` the weights of all projections are stored in four bits (:mod:`weft.models.nf4`), adapted or not.

An adapter of a weight ``[out, in]`` is ``a`` ``[rank, in]`` and ``b`` ``[out, rank]``; it adds ``scale * b @ (a @ x)``
to the product of the weight and ``x``. No axis cuts the dimension ``rank``, and the other dimensions are those of the
weight: where ``in`` is cut, ``a`` is cut and ``b`` is whole, and where ``out`` is cut, ``b`` is. All rules that follow
from a parameter's dimensions (what is held, summed, counted, saved) therefore hold for adapters too.

Functions here take the module whose weights are adapted, one of :mod:`weft.models.projections`.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from weft.layout.boundary import own, total_of_shares
from weft.layout.mesh import Mesh
from weft.models.drawing import current_draws
from weft.models.dropout import dropped
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
    """The trained factors that adapt a weight ``[out, in]`` (LoRA): ``a`` and ``b``, whose product is a matrix of low
    rank.

    With kind ``dora`` there is also ``magnitude`` ``[out]``, the trained norm of each row of the adapted weight. At the
    start the adapter changes nothing: ``b`` is zero, and ``magnitude`` has the norms of the weight's rows. ``mesh``:
    ranks that share the model; ``table``: descriptions of the model's parameters; ``path``: name of this module in the
    model; ``scale``: factor of the adapter's output; ``whole``: whether every rank of ``tp`` holds all of the weight.
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
    """Trained rows of an embedding or output layer ``[vocab, embed]``, in place of the weight's rows of some tokens.

    ``tokens``: ids of these tokens, ascending; ``part``: first id and end of the range of ids whose rows are in this
    rank's shard of the weight; ``mesh``: ranks that share the model; ``table``: descriptions of the model's parameters;
    ``path``: name of this module in the model. Every rank of ``tp`` holds all trained rows, and uses those in its
    range.
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
        """Return the result ``x`` of an embedding look-up with the trained rows in place of the weight's own.

        ``tokens``: ids ``[...]``; ``x``: the weight's rows for these ids, ``[..., embed]``.
        """
        known, (lo, hi) = self.tokens.to(tokens.device), self.own_rows
        if lo == hi:  # nothing is added, but all ranks have a gradient to sum up
            return x + own(self.rows, lo, hi, self.mesh).sum()
        place = torch.searchsorted(known[lo:hi], tokens).clamp(max=hi - lo - 1)
        learns = (known[lo:hi][place] == tokens)[..., None]
        return torch.where(
            learns, F.embedding(place, own(self.rows, lo, hi, self.mesh)), x
        )

    def placed(self, weight: T) -> T:
        """Return a copy of ``weight``, this rank's shard, in which the trained rows replace the weight's own rows."""
        index, rows = self._own()
        return weight.index_copy(0, index.to(weight.device), rows.to(weight.dtype))

    def scored(self, hidden: T, logits: T) -> T:
        """Replace the logits of tokens whose rows are trained by those that the trained rows give; return all logits.

        ``hidden``: input of the output layer, ``[..., embed]``; ``logits``: logits of this rank's range of the
        vocabulary, ``[..., vocab/tp]``.
        """
        index, rows = self._own()
        own_logits = F.linear(hidden, rows.to(hidden.dtype)).to(logits.dtype)
        return logits.index_copy(-1, index.to(logits.device), own_logits)

    def _own(self) -> tuple[T, T]:
        lo, hi = self.own_rows
        return self.tokens[lo:hi] - self.first, own(self.rows, lo, hi, self.mesh)


def adapt(module: Module, name: str, whole: bool) -> None:
    """Give ``module`` the quantised form and the adapter of its weight ``name``, as submodules.

    Each is made only if the parameter table describes it. ``whole``: whether every rank of ``tp`` holds all of the
    weight.
    """
    stored, beside = (module.path + part + name for part in (QUANTIZED, ADAPTERS))
    if module.inside(name) not in module.described:
        module.quantized[name] = Quantized(module.mesh, module.described, stored, whole)
    if module.adapter is not None and f"{beside}.a" in module.described:
        scale = adapter_scale(module.adapter, module.inside(name))
        module.adapters[name] = LowRank(
            module.mesh, module.described, beside, scale, whole
        )


def merged(module: Module, name: str) -> T:
    """Return the weight ``name`` of ``module``, ``[out, in]``, with its adapter merged into it. The model must be on
    one device, not cut over ranks.
    """
    if name in module.quantized:
        weight: T = module.quantized[name].dense(torch.float32)
    else:
        weight = getattr(module, name)
    if name not in module.adapters:
        return weight
    adapter = module.adapters[name]
    weight = weight + adapter.scale * (adapter.b @ adapter.a)
    if adapter.has_magnitude:
        norms = row_norms(weight).to(weight.dtype)
        weight = weight * (adapter.magnitude / norms)[:, None]
    return weight


def adapted_products(module: Module, x: T, names: Sequence[str]) -> tuple[T, ...]:
    """Return, for each of the weights ``names`` of ``module``, its product with ``x`` plus the output of its adapter:
    ``[batch, seq, out]`` each, in the order of ``names``. ``x``: ``[batch, seq, in]``.
    """
    dense = [name for name in names if name not in module.quantized]
    adapted = [name for name in names if name in module.adapters]
    weights = [module.own(name, getattr(module, name)) for name in dense]
    draws = current_draws() if module.adapter.dropout else None
    together = [module.adapters[name].a for name in adapted] if draws is None else []
    products = project(x, *weights, *together) if weights or together else ()
    outputs = dict(zip(dense, products, strict=False))
    for name in names:
        if name in module.quantized:
            outputs[name] = _project_quantized(module, name, x)
    lows: Sequence[T] = products[len(dense) :]
    if draws is not None:
        lows = [_project_dropped(module, name, x, draws) for name in adapted]
    for name, low in zip(adapted, lows, strict=True):
        outputs[name] = _adapt(module, name, outputs[name], low)
    return tuple(outputs[name] for name in names)


def _project_quantized(module: Module, name: str, x: T) -> T:
    first, _ = module.own_rows.get(name, (0, 0))
    y: T = module.quantized[name].project(x, partial(module.own, name), first)
    return y


def _project_dropped(module: Module, name: str, x: T, draws: T) -> T:
    """Return the product of ``x``, some of which is dropped, with the first factor of an adapter."""
    adapter = module.adapters[name]
    first, _ = adapter.logical["a"].box[1]
    x = dropped(x, module.adapter.dropout, draws, f"{module.path}.{name}", first)
    return project(x, adapter.a)[0]


def _adapt(module: Module, name: str, y: T, low: T) -> T:
    """Add an adapter's output to ``y``, the product with the weight ``name``; ``low``: ``[batch, seq, rank]``."""
    adapter = module.adapters[name]
    b = module.own(name, adapter.b)
    y = y + project(low * adapter.scale, b)[0]
    if not adapter.has_magnitude:
        return y
    # The norm is taken as a constant (DoRA, Liu et al. 2024, section 4.3). To expand its square, as the part of the
    # weight stays, would save 1 % of a step of 1,024 tokens, and lose rows that an adapter nearly cancels.
    with torch.no_grad():
        weight = module.own(name, getattr(module, name))
        square = row_norms(weight + adapter.scale * multiply(b, adapter.a)).square()
        total = total_of_shares(square, adapter.logical["a"].cuts[1], module.mesh)
        norm = total.sqrt().to(weight.dtype)
    return y * (module.own(name, adapter.magnitude) / norm)


def row_norms(weight: T) -> T:
    """Return the Euclidean norm of every row of a weight ``[out, in]``: ``[out]``, in float64.

    It is computed in float64, so that it does not depend on how ranks have split the sum, once it is rounded to a
    narrower type.
    """
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64)


@torch.no_grad()
def merged_parameters(model: nn.Module) -> dict[str, T]:
    """Return the parameters of a model on one device, by name. Adapters are merged into the weights and have no entries
    of their own.
    """
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
    """Return the shape of the base model: ``shape`` without its adapter."""
    return shape.model_copy(update={"adapter": None})


def base_weight(name: str) -> str:
    """Return the name, in the model, of the weight that an adapter changes. ``name``: full name of one of the adapter's
    parameters.
    """
    rows = {rows: VOCABULARY[weight] for weight, rows in ROWS.items()}
    return rows.get(name) or name.rpartition(".")[0].replace(ADAPTERS, ".")
