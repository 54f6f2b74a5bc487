"""Projections of a pass in parts, whose weight gradients are added up where they are computed.

Autograd writes the gradient that each part gives a weight to a tensor of its own, and then adds these tensors, each as
large as the weight. With few tokens in a part this costs a good share of the products' own time. Here the products of
later parts are added to that of the first, in the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weft.models import fused
from weft.models.projections import Projections
from weft.models.widened import multiply

T = torch.Tensor


class PartGradients:
    """Sum of the gradients that the parts of a pass have given one weight so far: ``total``, None before the first."""

    total: T | None = None

    def add(self, grad: T, x: T) -> None:
        """Add ``grad.T @ x``. ``grad``: ``[tokens, out]``; ``x``: ``[tokens, in]``."""
        if self.total is None:
            self.total = multiply(grad.t(), x)
        else:
            multiply(grad.t(), x, plus=self.total, out=self.total)


class _Sum(torch.autograd.Function):
    """Joins the gradients of all parts: forward returns an empty tensor for parts to depend on, in the weight's place;
    backward, which autograd calls after that of all parts, returns their sum.
    """

    @staticmethod
    def forward(ctx: Any, weight: T, gradients: PartGradients) -> T:
        ctx.gradients = gradients
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T | None, None]:
        total, ctx.gradients.total = ctx.gradients.total, None
        return total, None


class _PartProject(torch.autograd.Function):
    """The products of :func:`weft.models.fused.project` for one part."""

    @staticmethod
    def forward(
        ctx: Any,
        x: T,
        weights: Sequence[T],
        gradients: Sequence[PartGradients],
        *ends: T,
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
        for of_weight, g, learns in zip(ctx.gradients, flat, learn, strict=True):
            if learns:
                of_weight.add(g, x.detach().flatten(0, 1))
        return d_x, None, None, *(g.new_empty(0) for g in grads)


class PartProducts:
    """Products of the parts of one pass with ``weights``, ``[out, in]`` each, that all have the same input. Backward
    gives each weight the sum of its gradients over the parts.
    """

    def __init__(self, weights: Sequence[T]) -> None:
        self.weights = weights
        self.gradients = [PartGradients() for _ in weights]
        pairs = zip(weights, self.gradients, strict=True)
        self.ends = [_Sum.apply(*pair) for pair in pairs]

    def __call__(self, x: T) -> tuple[T, ...]:
        """Return the product of ``x`` ``[batch, seq, in]`` with each weight, ``[batch, seq, out]``."""
        products: tuple[T, ...] = _PartProject.apply(
            x, self.weights, self.gradients, *self.ends
        )
        return products


@contextmanager
def adding_in_place(modules: Sequence[Any], x: T) -> Iterator[None]:
    """Return a context in which projections of ``modules`` add the weight gradients of parts in place. It changes
    nothing without gradients, and for modules whose weights are adapted, replaced or elsewhere.

    ``x``: an input of the pass, whose device says whether gradients written by hand pay.
    """
    changed: list[tuple[Projections, tuple[str, ...]]] = []
    by_hand = fused.own_gradients_pay(x) and fused.current_tape() is None
    pays = by_hand and torch.is_grad_enabled()
    for module in modules if pays else ():
        plain = isinstance(module, Projections) and not (
            module.adapter or module.beside or module.elsewhere or module.products
        )
        for names in module.TOGETHER if plain else ():
            weights = [module.own(name, getattr(module, name)) for name in names]
            module.products[names] = PartProducts(weights)
            changed.append((module, names))
    try:
        yield
    finally:
        for module, names in changed:
            del module.products[names]
