"""Packed copies of a model's weights beside its parameters, for a model that generates between updates.

:func:`weft.models.products.read_only` gives up the parameters, so that a model can only generate from then on. A policy
in reinforcement learning generates with weights that each update changes: its parameters must stay, and what is packed
is good for one version of them.
"""

from collections.abc import Sequence
from functools import partial

import torch

from weft.models.lean_block import make_lean
from weft.models.products import OUTPUT, Packed, join_products, multiplied
from weft.models.projections import Projections
from weft.models.transformer import Block, Transformer


class PackedCopies:
    """Copies of the weights of ``model`` in the order that the CPU's kernels read, with which passes without gradients
    take fewer and faster operators.

    There are none until :meth:`renew`. They take as much memory as the weights that they copy. Weights for which the
    CPU has no such kernel are used where they lie: on other devices, in float64, in few bits, and with adapters on
    several ranks. ``renewed`` (attribute): how often they were made.
    """

    def __init__(self, model: Transformer) -> None:
        self.model, self.renewed = model, 0

    def renew(self) -> None:
        """Copy the weights as they are now, with adapters merged into them, and use the copies from now on."""
        model = self.model
        alone = model.mesh.layout.world == 1
        if model.mesh.device.type != "cpu" or not (alone or model.shape.adapter is None):  # fmt: skip
            return
        self.drop()
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
        make_lean(model)
        self.renewed += 1

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


def _packed(names: Sequence[str], weight: torch.Tensor) -> Packed | None:
    """Return a packed copy of ``weight``, or None if the CPU has no kernel for it. ``names``: has no effect here."""
    product = Packed(weight)
    return product if product.packed else None
