"""What all that saves and loads knows of the format: which rank writes which box of a tensor, and digests.

:mod:`weft.checkpoint.format` has the rest, which only the process that writes and those that load need.
"""

import math

import xxhash

from weft.errors import WeftError
from weft.layout.dims import Box, extents, part

#: The file whose presence makes a folder a checkpoint.
ROOT = "weft.json"

#: What AdamW keeps of every parameter, running averages of its gradient and of the square, as checkpoints name it.
MOMENTS = ("exp_avg", "exp_avg_sq")

#: Bytes of a block, about. A block is the unit of reading and of verifying.
BLOCK = 1 << 20


class DamagedCheckpoint(WeftError):
    """A checkpoint that cannot be read: what is stored is not what was saved, or of a format that this Weft does not
    know. The message names the file and, where known, the tensor."""


def digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def volume(box: Box) -> int:
    return math.prod(extents(box))


def meet(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, if there is any."""
    both = tuple(
        (max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True)
    )
    return both if all(lo < hi for lo, hi in both) else None


def share(box: Box, itemsize: int, replica: int, replicas: int, key: int) -> Box | None:
    """What the holder ``replica`` of ``box`` writes, if ``replicas`` ranks hold it: its part of the rows.

    A small box is not divided: one of the holders writes it, the others get None. Together they write each element
    once, without a message between them. ``key``: any number that they have in common.
    """
    if not volume(box):
        return None
    (lo, hi), *rest = box or ((0, 1),)
    if replicas == 1 or not box:
        return box if key % replicas == replica else None
    if volume(box) * itemsize < replicas * BLOCK // 16 or hi - lo < replicas:
        return box if key % replicas == replica else None
    first, last = part(hi - lo, replicas, replica)
    return ((lo + first, lo + last), *rest)
