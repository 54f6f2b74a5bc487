"""Bytes that attention moves between a device's memory and its fast memory, by block, beside the least possible.

FlashAttention (Dao et al. 2022, 2205.14135) holds a block of queries in fast memory and reads all keys and values for
it. Saha & Ye 2024 (2402.07443) prove that no order of these operations moves fewer bytes, up to a constant, if the fast
memory holds more numbers than the square of a head's width. Below that size, fewer are possible.
"""

from typing import NamedTuple

import numpy as np

from weft.shapes.shape import Num

#: Bytes of a number in attention's operands and results.
WIDTH = 2
#: The most query rows of a block; kernels take no more, whatever room there is.
LARGEST_BLOCK = 128


class AttentionTraffic(NamedTuple):
    """Bytes that one head moves in the forward pass of attention, for one sequence with a causal mask.

    ``block``: number of query rows per block. ``fused``: bytes of fused attention with such blocks. ``bound``: lower
    bound, up to a constant factor, for every algorithm. ``written``: bytes if scores are written to memory and read
    again.
    """

    block: Num
    fused: Num
    bound: Num
    written: Num


def query_block(fast: Num, head: Num) -> Num:
    """Return the largest number of query rows per block of fused attention that fit in fast memory.

    ``fast``: bytes of fast memory of one multiprocessor. ``head``: width of a head. Fast memory holds equally many rows
    of queries, keys, values and results.
    """
    return np.clip(np.floor(fast / (4 * WIDTH * head)), 1, LARGEST_BLOCK)


def fused_bytes(tokens: Num, head: Num, block: Num) -> Num:
    """Return the bytes that one head of fused attention moves in forward with a causal mask.

    ``tokens``: length of the sequence. ``head``: width of a head. ``block``: query rows of a block; keys and values are
    read once for each block, up to the block's last row.
    """
    blocks = np.ceil(tokens / block)
    rows = np.minimum(block * blocks * (blocks + 1) / 2, tokens * blocks)
    return WIDTH * head * (2 * tokens + 2 * rows)


def least_bytes(tokens: Num, head: Num, fast: Num) -> Num:
    """Return the bytes that no algorithm for exact attention undercuts, up to a constant factor.

    ``fast``: bytes of fast memory. Queries, keys, values and results are moved once at least. With room for more
    than ``head`` squared numbers the bound is that of FlashAttention; with less, that of a product of matrices in
    blocks. ``tokens``: length of the sequence; ``head``: width of a head.
    """
    room = fast / WIDTH
    large = tokens**2 * head**2 / room
    small = tokens**2 * head / np.sqrt(room)
    once = 4 * tokens * head
    # the mask leaves half of the scores
    return WIDTH * np.maximum(once, np.where(room >= head**2, large, small) / 2)


def attention_traffic(tokens: Num, head: Num, fast: Num) -> AttentionTraffic:
    """Return the bytes that one head of attention moves in forward: for three ways to compute attention.

    These are fused attention in blocks, a lower bound for every algorithm, and attention that writes its scores to
    memory.

    ``tokens``: length of the sequence. ``head``: width of a head. ``fast``: bytes of fast memory of a multiprocessor.
    """
    block = query_block(fast, head)
    written = WIDTH * (4 * tokens * head + 4 * tokens**2)
    return AttentionTraffic(
        block,
        fused_bytes(tokens, head, block),
        least_bytes(tokens, head, fast),
        written,
    )
