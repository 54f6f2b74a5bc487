"""Keys and values of all ranks of ``cp``, for attention in which every token sees every other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import spmd_types as spmd
import torch
from spmd_types import R, S

from weft.layout.layout import Layout
from weft.layout.sequence import owned_ranges

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh

T = torch.Tensor


def gather_keys(x: T, mesh: Mesh) -> T:
    """Return ``x`` ``[batch, seq/cp, ...]`` of all ranks of ``cp``, one rank's tokens after the other's.

    Its gradients on the ranks are summands of the whole gradient.
    """
    if mesh.size("cp") == 1:
        return x
    return spmd.all_gather(
        x.contiguous(), mesh.group("cp"), src=S(1), dst=R, op_dtype=x.dtype,
        backward_options={"op_dtype": x.dtype},
    )  # fmt: skip


def gathered_positions(length: int, layout: Layout) -> list[int]:
    """Return the position in its sequence of each token that :func:`gather_keys` returns.

    ``length``: tokens of a sequence with padding.
    """
    return [
        token
        for rank in range(layout.cp)
        for first, last in owned_ranges(length, layout, rank)
        for token in range(first, last)
    ]
