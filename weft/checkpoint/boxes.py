"""Boxes of tensors in checkpoints: which rank writes which box, and checksums. :mod:`weft.checkpoint.format` has the
rest of the format."""

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
    """Error of a checkpoint whose stored bytes differ from the saved ones, or whose format this version of Weft cannot
    read.

    The message names the file and, if known, the tensor.
    """


def checksum(data: bytes | memoryview) -> str:
    """Return the xxh3-128 digest of ``data`` as hexadecimal text."""
    return xxhash.xxh3_128_hexdigest(data)


def volume(box: Box) -> int:
    """Return the number of elements in ``box``, a rectangular region of a tensor."""
    return math.prod(extents(box))


def intersection(a: Box, b: Box) -> Box | None:
    """Return the intersection of the boxes ``a`` and ``b`` (rectangular regions of one tensor), or None if they share
    no element.
    """
    both = tuple(
        (max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True)
    )
    return both if all(lo < hi for lo, hi in both) else None


def replica_share(
    box: Box, itemsize: int, replica: int, replicas: int, key: int
) -> Box | None:
    """Return the part of ``box`` that this replica writes, so that all replicas together write each element once.

    ``box``: region of a tensor that all replicas hold; ``itemsize``: bytes of an element; ``replica``: number of this
    replica; ``replicas``: number of all replicas; ``key``: an integer that is equal on all replicas, such as a hash of
    the tensor's name. A large box is divided by rows among the replicas. A small box is written whole by one replica,
    which ``key`` chooses; the others get None. An empty box gives None on all.
    """
    if not volume(box):
        return None
    (lo, hi), *rest = box or ((0, 1),)
    if volume(box) * itemsize < replicas * BLOCK // 16 or hi - lo < replicas:
        return box if key % replicas == replica else None
    first, last = part(hi - lo, replicas, replica)
    return ((lo + first, lo + last), *rest)
