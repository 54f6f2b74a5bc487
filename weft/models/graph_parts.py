"""A forward pass in parts with an autograd graph each, so that other work can run between parts.

A module that can be suspended is a generator that yields where a part ends. Where a later part reads a result of an
earlier part, the graph is cut: the later part gets a detached leaf, and backward of the earlier part begins with the
leaf's gradient.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

T = torch.Tensor

#: A forward pass that yields where it may be left, and returns its result.
Steps = Generator[None, None, T]


class GraphPart:
    """A part of a forward pass with an autograd graph of its own, so that its backward can run separately.

    Later parts use results of this part in the form of detached leaf tensors. The attribute ``read`` lists pairs of
    such a result and the leaf that stands for it in a later part.
    """

    def __init__(self) -> None:
        self.read: list[tuple[T, T]] = []

    def backward(self) -> None:
        """Run backward of this part. Call it after backward of all parts that read this part's results."""
        reads = [(x, leaf.grad) for x, leaf in self.read if leaf.grad is not None]
        self.read = []
        if reads:
            values, gradients = zip(*reads, strict=True)
            torch.autograd.backward(values, gradients)


_running: ContextVar[GraphPart | None] = ContextVar("part", default=None)


def current_part() -> GraphPart | None:
    """Return the :class:`GraphPart` to which the present computation belongs; None outside :func:`running`."""
    return _running.get()


@contextmanager
def running(part: GraphPart) -> Iterator[None]:
    """Return a context whose computations belong to ``part``: :func:`current_part` returns it there."""
    token = _running.set(part)
    try:
        yield
    finally:
        _running.reset(token)


def read(x: T, maker: GraphPart | None) -> T:
    """Return ``x`` for use in the running part: a detached leaf if another part has computed ``x``.

    ``maker``: the part that has computed ``x``. If it is None, ``x`` belongs to no part and is returned unchanged.
    """
    if maker is None or maker is current_part() or not x.requires_grad:
        return x
    leaf = x.detach().requires_grad_()
    maker.read.append((x, leaf))
    return leaf


def result_of(steps: Steps) -> T:
    """Run a forward pass that is written as a generator to its end, and return its result. ``steps``: the generator; it
    yields where a caller could do other work, of which nothing is done here.
    """
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
