"""Projections of a pass in parts, whose weight gradients are added up where they are computed.

Autograd writes the gradient that each part gives a weight to a tensor of its own, and then adds these tensors, each as
large as the weight. With few tokens in a part this costs a good share of the products' own time. Here one product
computes the gradient for the tokens of all parts. As no other rank waits for it, it is computed while this rank waits
for gradients of activations (Domino, Wang et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weft.layout.pending import Backlog, working_beside
from weft.models import fused
from weft.models.projections import Projections
from weft.models.widened import multiply

T = torch.Tensor

#: Groups of weights with the same input whose gradients may be left for later: about a layer's, to bound memory.
LEFT = 4


class PartGradients:
    """Sums over the parts of a pass of the gradients of weights that have the same input.

    ``weights``: number of these weights; ``parts``: number of parts; ``backlog``: where the work is left when all parts
    have given what it takes. The attribute ``totals`` has each weight's sum so far, or None.
    """

    def __init__(self, weights: int, parts: int, backlog: Backlog) -> None:
        self.parts, self.backlog = parts, backlog
        self.totals: list[T | None] = [None] * weights
        self._inputs: list[T] = []
        self._grads: list[Sequence[T | None]] = []

    def add(self, x: T, grads: Sequence[T | None]) -> None:
        """Note what a part adds: ``grad.T @ x`` for each weight. ``x``: ``[tokens, in]``; ``grads``: ``[tokens, out]``
        for each weight; None for a weight without a gradient.
        """
        self._inputs.append(x)
        self._grads.append(grads)
        if len(self._inputs) == self.parts:
            self.backlog.add(self.add_up)

    def add_up(self) -> None:
        """Compute what the noted parts add, by one product for each weight."""
        if not self._inputs:
            return
        x = _joined(self._inputs)
        for number, grads in enumerate(zip(*self._grads, strict=True)):
            learning = [g for g in grads if g is not None]
            if not learning:
                continue
            g, total = _joined(learning), self.totals[number]
            if total is None:
                self.totals[number] = multiply(g.t(), x)
            else:
                multiply(g.t(), x, plus=total, out=total)
        self._inputs, self._grads = [], []


def _joined(parts: Sequence[T]) -> T:
    """Join tensors along the tokens; a single one is returned itself."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


class _Sum(torch.autograd.Function):
    """Joins the gradients of all parts: forward returns an empty tensor for parts to depend on, in the weight's place;
    backward, which autograd calls after that of all parts, returns their sum.
    """

    @staticmethod
    def forward(ctx: Any, weight: T, gradients: PartGradients, number: int) -> T:
        ctx.gradients, ctx.number = gradients, number
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T | None, ...]:
        gradients: PartGradients = ctx.gradients
        gradients.add_up()
        total, gradients.totals[ctx.number] = gradients.totals[ctx.number], None
        return total, None, None


class _PartProject(torch.autograd.Function):
    """The products of :func:`weft.models.fused.project` for one part."""

    @staticmethod
    def forward(
        ctx: Any, x: T, weights: Sequence[T], gradients: PartGradients, *ends: T
    ) -> tuple[T, ...]:
        of_x, _, _, *learn = ctx.needs_input_grad
        kept = weights if of_x else [None] * len(weights)
        ctx.save_for_backward(x if any(learn) else None, *kept)
        ctx.gradients = gradients
        rows = x.flatten(0, 1)  # [batch * seq, in]
        return tuple(fused.times(rows, w).unflatten(0, x.shape[:2]) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: T) -> tuple[T | None, ...]:
        x, *weights = ctx.saved_tensors
        of_x, _, _, *learn = ctx.needs_input_grad
        flat = [g.flatten(0, 1) for g in grads]
        d_x: T | None = None
        if of_x:
            for g, w in zip(flat, weights, strict=True):
                d_x = fused.times(g, w.t(), plus=d_x)
            assert d_x is not None
            d_x = d_x.view(*grads[0].shape[:2], -1)
        if any(learn):
            learning = [g if learns else None for g, learns in zip(flat, learn, strict=True)]  # fmt: skip
            ctx.gradients.add(x.detach().flatten(0, 1), learning)
        return d_x, None, None, *(g.new_empty(0) for g in grads)


class PartProducts:
    """Products of the parts of one pass with ``weights``, ``[out, in]`` each, that all have the same input. Backward
    gives each weight the sum of its gradients over the parts. ``parts``: number of parts; ``backlog``: where the work
    for these sums is left.
    """

    def __init__(self, weights: Sequence[T], parts: int, backlog: Backlog) -> None:
        self.weights = weights
        self.gradients = PartGradients(len(weights), parts, backlog)
        self.ends = [
            _Sum.apply(weight, self.gradients, number)
            for number, weight in enumerate(weights)
        ]

    def __call__(self, x: T) -> tuple[T, ...]:
        """Return the product of ``x`` ``[batch, seq, in]`` with each weight, ``[batch, seq, out]``."""
        products: tuple[T, ...] = _PartProject.apply(
            x, self.weights, self.gradients, *self.ends
        )
        return products


@contextmanager
def adding_in_place(modules: Sequence[Any], x: T, parts: int) -> Iterator[None]:
    """Return a context in which projections of ``modules`` compute weight gradients once for all parts, while gradients
    of activations travel. It changes nothing without gradients, and for modules whose weights are adapted, replaced or
    elsewhere.

    ``x``: an input of the pass, whose device says whether gradients written by hand pay; ``parts``: number of parts.
    """
    changed: list[tuple[Projections, tuple[str, ...]]] = []
    by_hand = fused.own_gradients_pay(x) and fused.current_tape() is None
    pays = by_hand and torch.is_grad_enabled()
    backlog = Backlog(LEFT)
    for module in modules if pays else ():
        plain = isinstance(module, Projections) and not (
            module.adapter or module.beside or module.elsewhere or module.products
        )
        for names in module.TOGETHER if plain else ():
            weights = [module.own(name, getattr(module, name)) for name in names]
            module.products[names] = PartProducts(weights, parts, backlog)
            changed.append((module, names))
    try:
        with working_beside(backlog):
            yield
    finally:
        for module, names in changed:
            del module.products[names]
