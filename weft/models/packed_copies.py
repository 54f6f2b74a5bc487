"""Packed copies of a model's weights beside its parameters, for a model that generates between updates.

:func:`weft.models.products.read_only` gives up the parameters, so that a model can only generate from then on. A policy
in reinforcement learning generates with weights that each update changes: its parameters must stay, and what is packed
is good for one version of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from weft.models.fused import project
from weft.models.lean_block import make_lean
from weft.models.products import OUTPUT, Packed, join_products, multiplied
from weft.models.projections import Products, Projections
from weft.models.transformer import Block, Transformer

if TYPE_CHECKING:
    from weft.models.row_layers import ProductKeeper, RowLayers


class PackedCopies:
    """Copies of the weights of ``model`` in the order that the CPU's kernels read, with which passes without gradients
    take fewer and faster operators.

    There are none until :meth:`renew`. They take as much memory as the weights that they copy. Weights for which the
    CPU has no such kernel are used where they lie: on other devices, in float64, in few bits, and with adapters on
    several ranks. Nothing is copied where all passes have few rows, and a kernel of Weft's own computes these
    (:mod:`weft.models.row_layers`).

    Attributes:
        ``renewed``: how often they were made.
        ``rows``: how many texts get a token in a pass, at most; 0: not known.
        ``keeper``: keeps what products make of the rows of each pass; None: nothing does. It keeps nothing where blocks
            with packed weights would take longer for it.
    """

    def __init__(self, model: Transformer) -> None:
        self.model, self.renewed = model, 0
        self.rows = 0
        self.keeper: ProductKeeper | None = None
        self._layers: RowLayers | None = None

    def renew(self) -> None:
        """Copy the weights as they are now, with adapters merged into them, and use the copies from now on."""
        model = self.model
        alone = model.mesh.layout.world == 1
        if model.mesh.device.type != "cpu" or not (alone or model.shape.adapter is None):  # fmt: skip
            return
        self.drop()
        few = self._use_few_rows()
        if not few:
            self._pack(alone)
        make_lean(model)
        lean = any(isinstance(b, Block) and b.lean for b in model.blocks.values())
        if self.keeper is not None and lean:
            # which would need the time of more operators for every token
            self.keeper.drop("no kernel for few rows writes")
        elif self.keeper is not None:
            self._keep_products(self.keeper)
        self.renewed += 1

    def _pack(self, alone: bool) -> None:
        """Pack all weights. ``alone``: whether one rank has the whole model."""
        model = self.model
        for module in model.modules():
            if isinstance(module, Projections) and not (module.elsewhere or module.quantized):  # fmt: skip
                join_products(module, _packed, keep=True)
        rows = model.embedding.rows if model.shape.tied else model.rows
        if (
            alone
            and rows is None
            and (head := _packed([OUTPUT], model.output.detach()))
        ):
            model.logits = partial(multiplied, product=head)

    def _use_few_rows(self) -> bool:
        """Let a kernel compute passes of few rows with the weights where they lie. Return whether it does."""
        if not self.rows:
            return False
        from weft.models.row_layers import UNIT, RowLayers, RowOutput, serves

        model = self.model
        if not serves(model, self.rows):
            return False
        layers = self._layers = model.woven = RowLayers(model, self.keeper)
        weight = model.output.detach()
        if not any(n % UNIT for n in weight.shape):
            model.logits = RowOutput(weight, layers.width, layers.group)
        return True

    def _keep_products(self, keeper: ProductKeeper) -> None:
        """Let ``keeper`` keep what products make of the rows of passes, also of those that no kernel computes."""
        for module in self.model.modules():
            if isinstance(module, Projections):
                for names in module.TOGETHER:
                    product = module.products.get(names)
                    module.products[names] = KeptProduct(module, names, product, keeper)  # fmt: skip

    def __enter__(self) -> None:
        """Use copies within the context."""
        self.renew()

    def __exit__(self, *_: object) -> None:
        self.drop()

    def drop(self) -> None:
        """Use the parameters again, and free the memory of the copies."""
        for module in self.model.modules():
            if isinstance(module, Projections):
                module.products.clear()
            elif isinstance(module, Block):
                module.lean = None
        self.model.logits = None
        if self._layers is not None:
            self.model.woven = self._layers = None


class KeptProduct:
    """Product of an input with weights, whose results something else keeps as well.

    ``module``: the module with the weights. ``names``: their names. ``product``: what multiplies in their place; None:
    they are multiplied where they lie. ``keeper``: keeps the results.
    """

    def __init__(
        self,
        module: Projections,
        names: tuple[str, ...],
        product: Products | None,
        keeper: ProductKeeper,
    ) -> None:
        self.module, self.names, self.product, self.keeper = (
            module,
            names,
            product,
            keeper,
        )

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Multiply ``x`` ``[batch, seq, in]``: return a tensor ``[batch, seq, out]`` for each weight."""
        if self.product is not None:
            outputs = self.product(x)
        else:
            own = [self.module.own(name, getattr(self.module, name)) for name in self.names]  # fmt: skip
            outputs = project(x, *own)
        joined = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        self.keeper.keep(self.module.path, self.names, joined.flatten(0, -2))
        return outputs


def _packed(names: Sequence[str], weight: torch.Tensor) -> Packed | None:
    """Return a packed copy of ``weight``, or None if the CPU has no kernel for it. ``names``: has no effect here."""
    product = Packed(weight)
    return product if product.packed else None
