"""Batch-invariant forward passes: a token's results do not depend, to the last bit, on the other tokens in the batch.

The order in which kernels add up depends on the shapes of their arguments: a product of one row has other last bits
than the same row in a product of many rows, and attention splits keys by their number (He et al. 2025, "Defeating
Nondeterminism in LLM Inference"). Within :func:`invariant`, products take :data:`TILE` rows each, the last tile padded,
and every query attends by itself, with its keys split at multiples of :data:`KEYS` positions in the text. An engine
that reads texts piece by piece, beside other texts, then computes the same values as training does for whole texts.
Other operations (norms, activations, softmax) work row by row; with a multiple of :data:`TILE` rows no SIMD vector has
a remainder.

PyTorch does not promise any of this. Tests verify it for this PyTorch on the CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

T = torch.Tensor

TILE, KEYS = 16, 64

_on: ContextVar[bool] = ContextVar("invariant", default=False)


@contextmanager
def invariant(on: bool = True) -> Iterator[None]:
    """Return a context in which a token's results are bitwise the same in whatever batch it is computed.

    The number of tokens of a row must be a multiple of :data:`TILE`. If ``on`` is False, results inside the context may
    depend on the batch, even if the context is nested in one with ``on`` True.
    """
    token = _on.set(on)
    try:
        yield
    finally:
        _on.reset(token)


def is_invariant() -> bool:
    """Return whether the code runs inside the context :func:`invariant`, where the results of a token must not depend
    on its batch.
    """
    return _on.get()
