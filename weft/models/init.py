"""Initial values that do not depend on the layout: every rank draws just the rows it owns, always the same numbers."""

import zlib

import torch

from weft.layout.dims import Box, Logical, extents

#: Elements drawn from one generator. A logical tensor is a stack of such blocks of rows.
BLOCK = 1 << 18


def initial_values(name: str, logical: Logical, box: Box, seed: int) -> torch.Tensor:
    """The part ``box`` of parameter ``name``'s initial value, float32."""
    shape = extents(box)
    if logical.std is None:
        return torch.ones(shape)
    if logical.std == 0 or 0 in shape:
        return torch.zeros(shape)
    (lo, hi), inner = box[0], box[1:]
    width = logical.numel // logical.shape[0]
    rows = max(1, BLOCK // width)
    parts = []
    for block in range(lo // rows, -(-hi // rows)):
        generator = torch.Generator().manual_seed(
            zlib.crc32(f"{seed}/{name}/{block}".encode())
        )
        count = min(rows, logical.shape[0] - block * rows)
        values = torch.randn((count, *logical.shape[1:]), generator=generator)
        first = block * rows
        parts.append(
            values[
                (
                    slice(max(lo - first, 0), hi - first),
                    *(slice(a, b) for a, b in inner),
                )
            ]
        )
    return torch.cat(parts) * logical.std
