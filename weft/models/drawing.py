"""The random bits of the tokens that are being computed, for modules that drop values or draw what a token takes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_draws: ContextVar[torch.Tensor | None] = ContextVar("draws", default=None)


@contextmanager
def drawing(draws: Sequence[torch.Tensor]) -> Iterator[None]:
    """Return a context in which modules apply dropout, and derive from the random bits ``draws`` which elements are
    dropped.

    ``draws``: a sequence with one tensor of bits of the tokens (:func:`weft.models.dropout.token_draws`), or an empty
    sequence. If it is empty, nothing is dropped.
    """
    token = _draws.set(draws[0] if draws else None)
    try:
        yield
    finally:
        _draws.reset(token)


def current_draws() -> torch.Tensor | None:
    """Return the random bits of the tokens that are being computed (:func:`weft.models.dropout.token_draws`).

    None where nothing is dropped: outside :func:`drawing`, and without gradients.
    """
    return _draws.get() if torch.is_grad_enabled() else None
