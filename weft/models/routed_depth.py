"""Feed-forwards of adaptive depth and width (Duo-LLM, 2410.10846): a token takes a big module, a small one, or none.

In training a token's module is drawn at random in each layer, so that every path through the layers is trained. The
draws are those of dropout (:func:`weft.models.dropout.token_draws`): they depend on the sample, the position in it and
the layer alone, and every layout makes the same. Elsewhere all tokens take the big modules, unless :func:`on_paths`
says otherwise.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from weft.layout.boundary import gather_tokens, scatter_tokens
from weft.models.drawing import current_draws
from weft.models.dropout import BITS, STEP, mixed_bits
from weft.models.feed_forward import FeedForward
from weft.models.module import Module
from weft.shapes.parameters import layer_table

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.models.graph_parts import Steps
    from weft.recipe import ModelShape

T = torch.Tensor

#: What a token can take in a layer, as numbers in paths.
SKIP, SMALL, BIG = range(3)
CHOICES = ("skip", "small", "big")

_paths: ContextVar[T | None] = ContextVar("paths", default=None)


@contextmanager
def on_paths(paths: T) -> Iterator[None]:
    """Return a context in which each token takes given modules of every :class:`DuoFeedForward`. ``paths``: for each
    layer and token, an index in :data:`CHOICES`, ``[layers, batch, seq]``, or of a shape that broadcasts to it.
    """
    token = _paths.set(paths)
    try:
        yield
    finally:
        _paths.reset(token)


def drawn_choices(draws: T, path: str) -> T:
    """Draw a module for each token: an index in :data:`CHOICES`, all three with equal probability, ``[batch, seq]``.
    ``draws``: random bits of the tokens, ``[batch, seq]``; ``path``: name of the feed-forward, which makes layers draw
    differently.
    """
    own = zlib.crc32(path.encode()) * STEP % (1 << 62)
    bits = mixed_bits(draws ^ own) & ((1 << BITS) - 1)
    return bits * len(CHOICES) >> BITS


class DuoFeedForward(Module):
    """A big and a small dense feed-forward; each token takes one of them or none. Inside the context :func:`on_paths`,
    the context says which module a token takes. Outside it, a token takes a random one while the model is trained, and
    the big one otherwise.

    ``shape``: shape of the model; ``mesh``: ranks that share the model; ``layer``: index of the layer.
    """

    def __init__(self, shape: ModelShape, mesh: Mesh, layer: int) -> None:
        table, self.path = layer_table(shape, layer), f"blocks.{layer}.ffn"
        super().__init__(mesh, table, self.path)
        self.layer = layer
        self.big, self.small = (
            FeedForward(shape, mesh, table, f"{self.path}.{name}")
            for name in ("big", "small")
        )

    def early(self, x: T, whole: T, seen: object) -> None:
        """Do nothing and return None: only a mixture of experts, which has the same method, begins work before
        attention.
        """

    def share(self, whole: T) -> T:
        """Map ``whole`` ``[batch, seq, embed]`` to this rank's part of the output, of the same shape. The output is the
        sum of the parts over the ranks of ``tp``.
        """
        paths, draws = _paths.get(), current_draws()
        if paths is not None:
            choice = paths[self.layer]
        elif draws is not None:
            choice = drawn_choices(draws, self.path)
        else:
            return self.big.share(whole)
        big, small = (
            module.share(whole).masked_fill((choice != number)[..., None], 0)
            for module, number in ((self.big, BIG), (self.small, SMALL))
        )
        return big + small

    def forward(self, x: T, seen: object = None, early: object = None) -> T:
        """Map ``x`` ``[batch, seq/tp, embed]`` to the output of the same shape; ``seen`` and ``early`` are not used."""
        return scatter_tokens(self.share(gather_tokens(x, self.mesh)), self.mesh)

    def steps(self, x: T, seen: object = None, early: object = None) -> Steps:
        """Compute :meth:`forward` as a generator that never yields, because no transfer interrupts this feed-forward. A
        mixture of experts has the same method. The generator returns the result.
        """
        yield from ()
        return self(x)
