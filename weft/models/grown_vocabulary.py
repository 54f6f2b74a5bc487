"""Values of a model whose vocabulary grows: new rows are the mean of the old ones."""

from functools import cache

import torch

from weft.layout.dims import Box, Logical, extents
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.models.values import Values
from weft.recipe import ModelShape
from weft.shapes.parameters import VOCABULARY

T = torch.Tensor

#: Rows of a vocabulary that are read together for their mean.
READ = 4096


def grown(base: Values, small: ModelShape, vocab: int) -> Values:
    """Return a function that gives the values of a model whose vocabulary grows to ``vocab`` tokens.

    Each new row of embedding and output layer is the mean of the old rows, so that new tokens are about as likely as
    the average token. Every rank that holds new rows computes the same ones. ``base``: values of the model ``small``.
    """
    base_shape = small.model_copy(update={"adapter": None})
    described = dict(Transformer(base_shape, Mesh.single()).logical_parameters())

    @cache
    def mean(name: str, columns: Box) -> T:
        total = torch.zeros(extents(columns), dtype=torch.float64)
        count = described[name].shape[0]
        for first in range(0, count, READ):
            part = base(
                name, described[name], ((first, min(first + READ, count)), *columns)
            )
            total += part.double().sum(0)
        return (total / count).to(part.dtype)

    def values(name: str, logical: Logical, box: Box) -> T:
        if name not in VOCABULARY.values() or logical.shape[0] != vocab:
            return base(name, logical, box)
        (lo, hi), columns, old = box[0], box[1:], described[name].shape[0]
        parts = []
        if lo < old:
            rows = lo, min(hi, old)
            parts.append(base(name, described[name], (rows, *columns)))
        if hi > old or not parts:
            new = hi - max(lo, old)
            parts.append(mean(name, columns).expand(new, *extents(columns)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return values
