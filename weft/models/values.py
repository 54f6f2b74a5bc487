"""Functions that read or compute initial values of parameters: random ones, and base weights with an adapter."""

from collections.abc import Callable, Sequence

import torch

from weft.layout.dims import Box, Logical, extents
from weft.layout.mesh import Mesh
from weft.models.init import initial_values
from weft.models.transformer import model_class
from weft.recipe import ModelShape
from weft.shapes.parameters import ADAPTERS, QUANTIZED, ROWS

T = torch.Tensor

#: Function that returns the values of a part of a logical parameter.
Values = Callable[[str, Logical, Box], T]


def seeded_values(seed: int) -> Values:
    """Return a function that draws random initial values (:func:`initial_values`) with the seed ``seed``."""
    return lambda name, logical, box: initial_values(name, logical, box, seed)


def with_adapter(base: Values, shape: ModelShape, seed: int) -> Values:
    """Return a function that gives the initial values of a model of ``shape``: base weights and a new adapter.

    ``base``: the values of the base weights, returned as they are if the shape has no adapter. The values do not depend
    on the layout; random ones depend on ``seed`` alone.
    """
    if shape.adapter is None:
        return base
    from weft.models import nf4
    from weft.models.adapters import base_of, base_weight, row_norms

    plain = base_of(shape)
    described = dict(model_class(plain)(plain, Mesh.single()).logical_parameters())
    tokens = () if shape.adapter.tokens == "new" else shape.adapter.tokens

    def values(name: str, logical: Logical, box: Box) -> T:
        if QUANTIZED in name:
            path, _, stored = name.rpartition(".")
            weight = path.replace(QUANTIZED, ".")
            reader = nf4.row_reader(base, weight, described[weight])
            return nf4.stored_values(stored, reader, box)
        if ADAPTERS not in name:
            return base(name, logical, box)
        weight = base_weight(name)
        if name in ROWS.values():
            rows = tokens[slice(*box[0])]
            return rows_of(base, weight, described[weight], rows, box[1:])
        if not name.endswith(".magnitude"):
            return initial_values(name, logical, box, seed)
        whole_rows = (box[0], (0, described[weight].shape[1]))
        return row_norms(base(weight, described[weight], whole_rows))

    return values


def rows_of(
    base: Values, name: str, logical: Logical, rows: Sequence[int], columns: Box
) -> T:
    """Read some rows of the parameter ``name``, and of these the range ``columns`` of columns.

    ``base``: a function that returns the values of a box of a parameter. ``logical``: the parameter's whole tensor.
    ``rows``: ascending indices.
    """
    if not rows:
        return torch.empty(0, *extents(columns))
    if rows[-1] - rows[0] + 1 == len(rows):
        return base(name, logical, ((rows[0], rows[-1] + 1), *columns))
    return torch.cat([base(name, logical, ((row, row + 1), *columns)) for row in rows])
