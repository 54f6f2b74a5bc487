"""Random initial values that do not depend on the layout: each rank draws only its own rows, always the same."""

import zlib

import torch

from weft.layout.dims import Box, Logical, extents, slices

#: Elements drawn from one generator. A logical tensor is a stack of such blocks of rows.
BLOCK = 1 << 18


def initial_values(name: str, logical: Logical, box: Box, seed: int) -> torch.Tensor:
    """Return the rectangle ``box`` of the random initial value of the parameter ``name``, in float32.

    ``logical``: the whole tensor. The values depend on ``seed`` and ``name``, and not on the box.
    """
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
        number = zlib.crc32(f"{seed}/{name}/{block}".encode())
        generator = torch.Generator().manual_seed(number)
        first = block * rows
        count = min(rows, logical.shape[0] - first)
        values = torch.randn((count, *logical.shape[1:]), generator=generator)
        own = (max(lo - first, 0), hi - first), *inner
        parts.append(values[slices(own)])
    return torch.cat(parts) * logical.std
