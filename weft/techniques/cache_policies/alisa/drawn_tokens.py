"""Tokens that are drawn from those that a selector leaves out, each of which weighs as all that it stands for."""

from __future__ import annotations

from typing import NamedTuple

import torch

T = torch.Tensor


class DrawnTokens(NamedTuple):
    """Tokens that a selector has drawn from those that are left out. ``first``: index of the first among the places
    that are seen; all before it have been chosen for their weight. ``counts``: logarithm of the number of tokens that
    each stands for, ``[kv_heads, drawn]``. ``level``: quantile of the scores of the chosen ones; a token above it
    weighs no more than one at it would, or than itself once; None: each weighs as all that it stands for.
    """

    first: int
    counts: T
    level: float | None


class SeenTokens(NamedTuple):
    """Which tokens the new tokens of a piece see. ``places``: their positions, ``[kv_heads, keys]``. ``drawn``: those
    of them that stand for others, too; None: each stands for itself alone.
    """

    places: T
    drawn: DrawnTokens | None = None


def count_drawn(scores: T, drawn: DrawnTokens) -> None:
    """Let each of the drawn tokens weigh as all that it stands for. ``scores``: those of the places that are seen,
    ``[kv_heads, group, tokens, keys]``, changed in place.
    """
    first, counts = drawn.first, drawn.counts[:, None, None]
    own = scores[..., first : first + counts.shape[-1]]
    together = own + counts
    if drawn.level is not None and first:
        level = scores[..., :first].quantile(drawn.level, -1, keepdim=True)
        # a token that is drawn several times counts for less than one each time
        together = torch.minimum(together, torch.maximum(own, level + counts))
    own.copy_(together)
