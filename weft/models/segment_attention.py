"""Attention of short segments together with its gradients, by a kernel in C that is compiled where it runs.

Where the gradient of attention's result is known already, both are one pass over queries and keys
(:mod:`weft.models.known_block`). Segments may share prompts (:mod:`weft.data.shared_prompts`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from weft.models.native_library import pointer_to, threaded_library

T = torch.Tensor

SOURCE = Path(__file__).with_suffix(".c")

#: Most keys of a segment for which the kernel is used: what a task reads stays in the caches.
MOST_KEYS = 512

#: Most bytes of room that threads have for sums of gradients of all keys. Fewer threads compute where they need more;
#: if fewer than half of them could, the kernel is not used.
MOST_ROOM = 256 << 20

#: Heads must have a multiple of so many elements, and at most so many. Keys are padded to a multiple of the latter.
UNIT, WIDEST = 16, 256


class SegmentPass(ctypes.Structure):
    """A pass of segments, as the kernel reads it (``Pass`` in C)."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("heads", "bias", "cos", "sin", "grad", "of_heads", "out", "own")),
        *((name, ctypes.c_void_p) for name in ("edges", "parents")),
        *((name, ctypes.c_int64) for name in ("own_step", "tokens", "segments", "kv_heads", "group", "keys")),
        ("scale", ctypes.c_float),
    ]  # fmt: skip


class AttentionPass(NamedTuple):
    """Result of attention, ``[tokens, heads * width]``, and the gradient ``heads`` of its queries, keys and values
    before they were rotated, beside each other, ``[tokens, elements]``.
    """

    out: T
    heads: T


@cache
def segments_kernel(width: int) -> ctypes.CDLL | None:
    """Compile the kernel for heads of ``width`` elements; None if this machine has no compiler, or if compiling
    fails.
    """
    if width % UNIT or not 0 < width <= WIDEST:
        return None
    library = threaded_library(SOURCE, f"-DWIDTH={width}")
    if library is not None:
        library.weft_segments.restype = None
    return library


class SegmentKeys(NamedTuple):
    """Segments of a row: where each begins and the last one ends (``edges``), the segment that each follows, or -1
    (``parents``), and the largest number of queries and keys of one.
    """

    edges: Sequence[int]
    parents: Sequence[int]
    queries: int
    keys: int


def segment_keys(cu_seqlens: T) -> SegmentKeys:
    """Return the segments that ``cu_seqlens`` gives, int32 ``[segments + 1]``, or ``[2, segments + 1]`` where documents
    share prompts.
    """
    shared = cu_seqlens.dim() > 1
    edges = (cu_seqlens[0] if shared else cu_seqlens).tolist()
    parents = cu_seqlens[1].tolist()[:-1] if shared else [-1] * (len(edges) - 1)
    lengths = [b - a for a, b in pairwise(edges)]
    keys = [n + (lengths[p] if p >= 0 else 0) for n, p in zip(lengths, parents, strict=True)]  # fmt: skip
    return SegmentKeys(edges, parents, max(lengths, default=0), max(keys, default=0))


def attend_and_differentiate(
    heads: T, bias: T | None, cos: T, sin: T, grad: T, sizes: Sequence[int], cu_seqlens: T
) -> AttentionPass | None:  # fmt: skip
    """Compute attention and its gradients, if the kernel can, else return None.

    ``heads``: queries, keys and values, ``[tokens, elements]``, of which each has so many elements as ``sizes`` say.
    ``bias``: what is added to them, ``[elements]``, or None. ``cos``, ``sin``: of their rotation, ``[1, tokens, 1,
    width / 2]``. ``grad``: gradient of the result, ``[tokens, heads * width]``.
    """
    width = 2 * cos.shape[-1]
    given = (heads, cos, sin, grad)
    fits = all(x.dtype == torch.float32 and x.is_contiguous() for x in given)
    segments = segment_keys(cu_seqlens)
    whole = segments.edges[0] == 0 and segments.edges[-1] == len(heads)
    if not (fits and whole) or segments.keys > MOST_KEYS or heads.device.type != "cpu":
        return None
    kernel = segments_kernel(width)
    if kernel is None:
        return None
    kv_heads, all_threads = sizes[1] // width, torch.get_num_threads()
    count, keys = segments.queries, segments.keys
    padded = -(-keys // 64) * 64
    of_task = 4 * (keys + count) * width + 2 * padded * (width + count)
    own_step = max(1, 2 * len(heads) * sizes[1] + of_task)  # 0 without tokens
    threads = min(all_threads, MOST_ROOM // (4 * own_step))
    if 2 * threads < all_threads:
        return None
    own, out = heads.new_empty(threads * own_step), torch.empty_like(grad)
    of_heads = torch.empty_like(heads)
    listed = [torch.tensor(each, dtype=torch.int32) for each in segments[:2]]
    tensors = (heads, bias, cos, sin, grad, of_heads, out, own, *listed)
    numbers = SegmentPass(
        *map(pointer_to, tensors), own_step, len(heads), len(segments.parents), kv_heads, sizes[0] // sizes[1],
        keys, width**-0.5,
    )  # fmt: skip
    kernel.weft_segments(ctypes.byref(numbers), threads)
    return AttentionPass(out, of_heads)
