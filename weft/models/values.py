"""Initial values that are computed from other parameters: from base weights, magnitudes and four-bit codes."""

from collections.abc import Callable

import torch

from weft.layout.dims import Box, Logical
from weft.layout.mesh import Mesh
from weft.model_parameters import ADAPTERS, QUANTIZED
from weft.models import nf4
from weft.models.adapters import base_of, base_weight, row_norms
from weft.models.init import initial_values
from weft.models.transformer import Transformer
from weft.recipe import ModelShape

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
    described = dict(Transformer(base_of(shape), Mesh.single()).logical_parameters())

    def values(name: str, logical: Logical, box: Box) -> torch.Tensor:
        if QUANTIZED in name:
            path, _, stored = name.rpartition(".")
            weight = path.replace(QUANTIZED, ".")
            return nf4.stored_values(stored, *nf4.reader(base, weight, described[weight]), box)
        if ADAPTERS not in name:
            return base(name, logical, box)
        if not name.endswith(".magnitude"):
            return initial_values(name, logical, box, seed)
        weight = base_weight(name)
        rows = (box[0], (0, described[weight].shape[1]))
        return row_norms(base(weight, described[weight], rows))

    return values
