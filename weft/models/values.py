"""Initial values that are computed from other parameters: from base weights, magnitudes and four-bit codes."""

from collections.abc import Callable, Sequence
from functools import cache

import torch

from weft.layout.dims import Box, Logical, extents
from weft.layout.mesh import Mesh
from weft.models.init import initial_values
from weft.models.transformer import Transformer
from weft.recipe import ModelShape
from weft.shapes.parameters import ADAPTERS, QUANTIZED, ROWS, VOCABULARY

#: Gives the values of a part of a logical parameter.
Values = Callable[[str, Logical, Box], torch.Tensor]


def seeded_values(seed: int) -> Values:
    return lambda name, logical, box: initial_values(name, logical, box, seed)


def with_adapter(base: Values, shape: ModelShape, seed: int) -> Values:
    """The values of ``shape``, whose weights are ``base``'s and whose adapter is new. Without an adapter just ``base``.

    All are functions of logical tensors, so that every layout begins with the same.
    """
    if shape.adapter is None:
        return base
    from weft.models import nf4
    from weft.models.adapters import base_of, base_weight, row_norms

    described = dict(Transformer(base_of(shape), Mesh.single()).logical_parameters())
    tokens = () if shape.adapter.tokens == "new" else shape.adapter.tokens

    def values(name: str, logical: Logical, box: Box) -> torch.Tensor:
        if QUANTIZED in name:
            path, _, stored = name.rpartition(".")
            weight = path.replace(QUANTIZED, ".")
            reader = nf4.row_reader(base, weight, described[weight])
            return nf4.stored_values(stored, reader, box)
        if ADAPTERS not in name:
            return base(name, logical, box)
        weight = base_weight(name)
        if name in ROWS.values():
            return rows_of(
                base, weight, described[weight], tokens[slice(*box[0])], box[1:]
            )
        if not name.endswith(".magnitude"):
            return initial_values(name, logical, box, seed)
        rows = (box[0], (0, described[weight].shape[1]))
        return row_norms(base(weight, described[weight], rows))

    return values


def rows_of(
    base: Values, name: str, logical: Logical, rows: Sequence[int], columns: Box
) -> torch.Tensor:
    """Some rows of a parameter of ``base``'s, in ascending order."""
    if not rows:
        return torch.empty(0, *extents(columns))
    if rows[-1] - rows[0] + 1 == len(rows):
        return base(name, logical, ((rows[0], rows[-1] + 1), *columns))
    return torch.cat([base(name, logical, ((row, row + 1), *columns)) for row in rows])


#: Rows of a vocabulary that are read together for their mean.
READ = 4096


def grown(base: Values, small: ModelShape, vocab: int) -> Values:
    """``base``, the values of ``small``, for a ``vocab`` that is larger: new rows are the mean of the old ones.

    So the new tokens are as likely as others on average, and every rank that has some of these rows computes the same.
    """
    base_shape = small.model_copy(update={"adapter": None})
    described = dict(Transformer(base_shape, Mesh.single()).logical_parameters())

    @cache
    def mean(name: str, columns: Box) -> torch.Tensor:
        total = torch.zeros(extents(columns), dtype=torch.float64)
        count = described[name].shape[0]
        for first in range(0, count, READ):
            part = base(
                name, described[name], ((first, min(first + READ, count)), *columns)
            )
            total += part.double().sum(0)
        return (total / count).to(part.dtype)

    def values(name: str, logical: Logical, box: Box) -> torch.Tensor:
        if name not in VOCABULARY.values() or logical.shape[0] != vocab:
            return base(name, logical, box)
        (lo, hi), columns, old = box[0], box[1:], described[name].shape[0]
        kept = (
            base(name, described[name], ((min(lo, old), min(hi, old)), *columns))
            if lo < old
            else None
        )
        if hi <= old and kept is not None:
            return kept
        added = mean(name, columns).expand(hi - max(lo, old), *extents(columns))
        return added if kept is None else torch.cat((kept, added))

    return values
