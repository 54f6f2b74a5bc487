"""Base class of modules with linear projections, some of which run as one product.

Adapters of the weights are in :mod:`weft.models.adapters`.
"""

from collections.abc import Callable

import torch
from torch import nn

from weft.layout.boundary import own
from weft.layout.mesh import Mesh
from weft.models.fused import project
from weft.models.module import Module
from weft.recipe import ModelShape
from weft.shapes.parameters import Table

T = torch.Tensor

#: Function that replaces weights with the same input: it returns the product with each of them.
Products = Callable[[T], tuple[T, ...]]


class Projections(Module):
    """Base class of modules with linear projections, which have an adapter where ``adapter.targets`` names them.

    ``shape``: shape of the model; ``mesh``: ranks that share the model; ``table``: descriptions of the model's
    parameters; ``path``: name of this module in the model. ``TOGETHER`` (class attribute): groups of names of weights.
    The weights of a group have the same input, so that one product can compute all their outputs.
    """

    #: Names of the weights that may be one product each time, as they have the same input.
    TOGETHER: tuple[tuple[str, ...], ...] = ()

    def __init__(self, shape: ModelShape, mesh: Mesh, table: Table, path: str) -> None:
        super().__init__(mesh, table, path)
        self.adapter = shape.adapter
        self.own_rows: dict[str, tuple[int, int]] = {}
        self.adapters, self.quantized = nn.ModuleDict(), nn.ModuleDict()
        # in place of weights (weft.models.products)
        self.products: dict[tuple[str, ...], Products] = {}
        # Whether the weights are there only while the module computes (weft.memory.resting_layers).
        self.elsewhere = False
        # Adds other adapters to what weights of some names made of an input, if set (weft.models.row_adapters).
        self.beside: Callable[[T, tuple[str, ...], tuple[T, ...]], None] | None = None
        if self.adapter is not None:
            from weft.models.adapters import adapt, adapted_products

            self._adapt, self._adapted_products = adapt, adapted_products

    def projection(self, name: str, own_rows: tuple[int, int] | None = None) -> None:
        """Register the weight ``name`` of a projection, and its adapter if it has one. ``own_rows``: first row and end
        of the rows that this rank uses of a weight that every rank stores whole; None: the weight is cut over ranks as
        the parameter table says.
        """
        whole = own_rows is not None
        if self.inside(name) in self.described:
            self.weight(name, whole)
        if own_rows is not None:
            self.own_rows[name] = own_rows
        if self.adapter is not None:
            self._adapt(self, name, whole)

    def forget(self, *names: str) -> None:
        """Free the memory of the weights ``names``, which :attr:`products` replace, and of their adapters."""
        for name in names:
            self._parameters.pop(name, None)
            self.adapters._modules.pop(name, None)
            self.quantized._modules.pop(name, None)

    def own(self, name: str, values: T) -> T:
        """Return the rows of ``values`` that this rank uses.

        ``values``: a tensor with all rows of the weight ``name`` that are stored on this rank.
        """
        if name in self.own_rows:
            return own(values, *self.own_rows[name], self.mesh)
        return values

    def project(self, x: T, *names: str) -> tuple[T, ...]:
        """Project ``x`` ``[batch, seq, in]`` with the weights ``names`` and their adapters.

        Returns a tensor ``[batch, seq, out]`` for each weight.
        """
        if products := self.products.get(names):
            outputs = products(x)
        elif self.adapter is None:
            weights = (self.own(name, getattr(self, name)) for name in names)
            outputs = project(x, *weights)
        else:
            outputs = self._adapted_products(self, x, names)
        if self.beside is not None:
            self.beside(x, names, outputs)
        return outputs
