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
    """Gather ``x`` ``[batch, seq/cp, ...]`` over the ranks of ``cp``: return ``[batch, seq, ...]``, in the order of
    ranks.

    In backward, the gradient of ``x`` is summed over the ranks.
    """
    if mesh.size("cp") == 1:
        return x
    return spmd.all_gather(
        x.contiguous(), mesh.group("cp"), src=S(1), dst=R, op_dtype=x.dtype,
        backward_options={"op_dtype": x.dtype},
    )  # fmt: skip


def gathered_positions(length: int, layout: Layout) -> list[int]:
    """Return, for each token in the result of :func:`gather_keys`, its position in the sequence.

    ``length``: tokens of a sequence with padding.
    """
    return [
        token
        for rank in range(layout.cp)
        for first, last in owned_ranges(length, layout, rank)
        for token in range(first, last)
    ]
