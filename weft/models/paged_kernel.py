"""Triton kernel of attention that reads keys and values from the blocks of a paged cache, where they lie.

A *tile* is some neighbouring new tokens of one text. A program computes the attention of all query heads that share a
key head, for one tile, over one share of the text's keys: with few tiles the keys are split over many programs. A
second kernel merges the shares by their log-sum-exps. Keys are looked up block by block in the text's table, so that
nothing is gathered or padded (PagedAttention, Kwon et al. 2023, 2309.06180; FlashAttention-2, Dao 2023, 2307.08691;
Flash-Decoding, Dao et al. 2023). With one fixed maximum for all shares their sums just add, and tiles of which a score
was too far from it are computed again (FlashDecoding++, Hong et al. 2023, 2311.01282).

Triton is imported with this file, so that only what uses the kernel may import this file. With ``TRITON_INTERPRET=1``
in the environment the kernel runs on the CPU, slowly, which proves its indices and masks.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.models.query_tiles import TileBatch

T = torch.Tensor

#: Programs per multiprocessor of a GPU that keep its memory busy.
PROGRAMS = 2

#: The least keys of a program's share, and the most shares of a text's keys.
LEAST_KEYS, MOST_SPLITS = 128, 64

#: The least sum of weights of a row that is exact with a fixed maximum, by the type in which weights are multiplied.
#: float16 has no numbers below 2**-24, so that smaller weights than this sum over many keys would be lost.
LEAST_SUM = {torch.float32: 2.0**-72, torch.bfloat16: 2.0**-72, torch.float16: 1.0}

#: Multiprocessors that are assumed where there is no GPU.
INTERPRETED_PROCESSORS = 8


@triton.jit
def _attend_tiles(  # type: ignore[no-untyped-def]
    q, keys, values, tables, rows, counts, places, texts, out, logs, again,
    scale, window, q_row, q_head, block_stride, token_stride, head_stride, table_row,
    out_split, out_row, out_head, log_split, log_row,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, TOKENS: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    FIXED: tl.constexpr, ONLY: tl.constexpr,
):  # fmt: skip
    """Attention of one tile for one key head over one share of the keys. Scores are in base 2.

    With ``FIXED`` nothing is subtracted from scores, and sums of values and of weights are stored as they are. With
    ``ONLY`` a tile is computed if ``again`` says so.
    """
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ONLY:  # noqa: SIM102 (what Triton compiles)
        if tl.load(again + tile) == 0:
            return
    row = tl.load(rows + tile).to(tl.int64)
    count = tl.load(counts + tile)
    place = tl.load(places + tile)
    text = tl.load(texts + tile).to(tl.int64)
    lane = tl.arange(0, TOKENS * GROUP_PAD)
    token = lane // GROUP_PAD
    member = lane % GROUP_PAD
    live = (token < count) & (member < GROUP)
    at = place + token
    query_head = head * GROUP + member
    wide = tl.arange(0, PADDED)
    inside = wide < WIDTH
    queries = tl.load(
        q + ((row + token) * q_row + query_head * q_head)[:, None] + wide[None, :],
        mask=live[:, None] & inside[None, :],
        other=0.0,
    )
    end = place + count
    begin = 0
    if window > 0:
        begin = tl.maximum(place - window + 1, 0)
    share = tl.cdiv(tl.cdiv(end - begin, tl.num_programs(2)), KEYS) * KEYS
    low = begin + split * share
    high = tl.minimum(low + share, end)
    best = tl.full([TOKENS * GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * GROUP_PAD], tl.float32)
    mean = tl.zeros([TOKENS * GROUP_PAD, PADDED], tl.float32)
    for start in range(low, high, KEYS):
        key = start + tl.arange(0, KEYS)
        there = key < high
        block = tl.load(tables + text * table_row + key // SIZE, mask=there, other=0)
        offset = (
            block.to(tl.int64) * block_stride
            + (key % SIZE) * token_stride
            + head * head_stride
        )
        k = tl.load(
            keys + offset[None, :] + wide[:, None],
            mask=there[None, :] & inside[:, None],
            other=0.0,
        )
        scores = tl.dot(queries, k, input_precision=PRECISION) * scale
        seen = there[None, :] & (key[None, :] <= at[:, None])
        if window > 0:
            seen = seen & (key[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        if FIXED:
            weights = tl.exp2(scores)
            total += tl.sum(weights, 1)
        else:
            larger = tl.maximum(best, tl.max(scores, 1))
            # a row that has seen no key yet stays zero, not nan
            base = tl.where(larger == float("-inf"), 0.0, larger)
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(best - base)
            total = total * shrink + tl.sum(weights, 1)
            mean = mean * shrink[:, None]
            best = larger
        v = tl.load(
            values + offset[:, None] + wide[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        mean += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    weight = tl.where(total > 0, total, 1.0)
    log = tl.where(total > 0, best + tl.log2(weight), float("-inf"))
    if FIXED:
        log = total
        weight = tl.full([TOKENS * GROUP_PAD], 1.0, tl.float32)
    to = (row + token) * out_row + query_head * out_head + split * out_split
    tl.store(
        out + to[:, None] + wide[None, :],
        (mean / weight[:, None]).to(out.dtype.element_ty),
        mask=live[:, None] & inside[None, :],
    )
    tl.store(
        logs + split * log_split + (row + token) * log_row + query_head, log, mask=live
    )


@triton.jit
def _add_shares(  # type: ignore[no-untyped-def]
    parts, totals, out, rows, counts, again, splits, least, part_split, part_row, part_head, log_split, log_row,
    out_row, out_head, WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Sum of all shares' sums, for one token of a tile and one query head; sets ``again`` if it is not exact."""
    tile, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows + tile).to(tl.int64) + token
    if token < tl.load(counts + tile):
        split, wide = tl.arange(0, SPLITS), tl.arange(0, PADDED)
        there, inside = split < splits, wide < WIDTH
        total = tl.load(totals + split * log_split + row * log_row + head, mask=there, other=0.0)  # fmt: skip
        part = tl.load(
            parts
            + row * part_row
            + head * part_head
            + split[:, None] * part_split
            + wide[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        weight, value = tl.sum(total, 0), tl.sum(part, 0)
        # not a number fails both comparisons
        largest = 3e38
        exact = (weight >= least) & (weight < largest)
        exact = exact & (tl.sum(tl.where(tl.abs(value) < largest, 0, 1), 0) == 0)
        if exact:
            tl.store(
                out + row * out_row + head * out_head + wide,
                (value / weight).to(out.dtype.element_ty),
                mask=inside,
            )
        else:
            tl.store(again + tile, 1)


@triton.jit
def _merge_shares(  # type: ignore[no-untyped-def]
    parts, logs, out, rows, counts, again, splits, part_split, part_row, part_head, log_split, log_row,
    out_row, out_head, WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, ONLY: tl.constexpr,
):  # fmt: skip
    """Weighted mean of the results of all shares, for one token of a tile and one query head. ``ONLY``: if ``again``
    says so of the tile.
    """
    tile, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ONLY:  # noqa: SIM102 (what Triton compiles)
        if tl.load(again + tile) == 0:
            return
    row = tl.load(rows + tile).to(tl.int64) + token
    if token < tl.load(counts + tile):
        split, wide = tl.arange(0, SPLITS), tl.arange(0, PADDED)
        there, inside = split < splits, wide < WIDTH
        log = tl.load(
            logs + split * log_split + row * log_row + head,
            mask=there,
            other=float("-inf"),
        )
        weight = tl.exp2(log - tl.max(log, 0))
        part = tl.load(
            parts
            + row * part_row
            + head * part_head
            + split[:, None] * part_split
            + wide[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        mean = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
        tl.store(
            out + row * out_row + head * out_head + wide,
            mean.to(out.dtype.element_ty),
            mask=inside,
        )


class KernelShape(NamedTuple):
    """Compile-time sizes of one program (thread block) of the attention kernel.

    Attributes:
        ``group_pad``: query heads of a key head, padded to a power of two.
        ``tokens``: tokens of a tile, a power of two.
        ``padded``: elements of a head, padded to a power of two.
        ``keys``: number of keys that one step of the loop reads.
        ``warps``: number of warps (32 threads each) of a program.
    """

    group_pad: int
    tokens: int
    padded: int
    keys: int
    warps: int


def kernel_shape(
    group: int, tokens: int, width: int, dtype: torch.dtype
) -> KernelShape:
    """Return the sizes with which the attention kernel is compiled. ``group``: query heads of a key head; ``tokens``:
    tokens of a tile; ``width``: elements of a head; ``dtype``: type of keys and values.
    """
    group_pad = triton.next_power_of_2(group)
    padded = max(16, triton.next_power_of_2(width))
    rows = tokens * group_pad
    # float32 is multiplied without tensor cores, from registers
    keys = 32 if dtype == torch.float32 or padded > 128 else 64
    return KernelShape(group_pad, tokens, padded, keys, 4 if rows <= 64 else 8)


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of the GPU ``device``. On a CPU, where Triton interprets the kernels, return
    a small number, so that tests also split the keys.
    """
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def splits_for(programs: int, keys: int, device: torch.device) -> int:
    """Return into how many shares the keys of every text are split, so that there are enough programs to keep the GPU
    busy. ``programs``: number of programs if keys are not split; ``keys``: largest number of keys of a text;
    ``device``: the GPU.
    """
    wanted = PROGRAMS * processors(device) // max(1, programs)
    return max(1, min(wanted, -(-keys // LEAST_KEYS), MOST_SPLITS))


def attend_tiles(q: T, store: T, tiles: TileBatch, window: int, out: T) -> None:
    """Compute the attention of the tokens of ``tiles`` to their texts, and write the result to ``out``.

    ``q``: the queries of all new tokens, ``[tokens, heads, width]``; ``out``: of the same shape. ``store``: cached keys
    and values, ``[2, blocks, size, kv_heads, width]``; ``window``: the number of tokens that a token sees, itself
    included; 0: all.
    """
    _attend_by_maxima(q, store, tiles, window, out, None)


def attend_tiles_fixed(q: T, store: T, tiles: TileBatch, window: int, out: T) -> None:
    """Do as :func:`attend_tiles`, but with the fixed maximum 0 in place of running maxima of the scores. Tiles in which
    that would not be exact are computed again with maxima of their own; the device decides this without the host.
    """
    heads, width = q.shape[1:]
    splits = _splits_of(store, tiles, q)
    parts = q.new_empty(splits, len(q), heads, width, dtype=torch.float32)
    totals = q.new_empty(splits, len(q), heads, dtype=torch.float32)
    again = torch.zeros(len(tiles.rows), dtype=torch.int32, device=q.device)
    _launch_shares(
        q, store, tiles, window, parts, totals, again, fixed=True, only=False
    )
    add: Any = _add_shares[len(tiles.rows), heads, tiles.tokens]
    add(
        parts, totals, out, tiles.rows, tiles.counts, again, splits, LEAST_SUM[store.dtype],
        parts.stride(0), parts.stride(1), parts.stride(2), totals.stride(0), totals.stride(1), out.stride(0),
        out.stride(1), WIDTH=width, PADDED=max(16, triton.next_power_of_2(width)),
        SPLITS=triton.next_power_of_2(splits), num_warps=4,
    )  # fmt: skip
    _attend_by_maxima(q, store, tiles, window, out, again)


def _splits_of(store: T, tiles: TileBatch, q: T) -> int:
    programs = len(tiles.rows) * store.shape[3]
    return tiles.splits or splits_for(programs, tiles.keys, q.device)


def _launch_shares(
    q: T, store: T, tiles: TileBatch, window: int, parts: T, logs: T, again: T, fixed: bool, only: bool
) -> None:  # fmt: skip
    """Launch a program for each tile, key head and share. ``parts``: ``[shares, tokens, heads, width]``."""
    keys, values = store[0], store[1]
    _, size, kv_heads, width = keys.shape
    group = q.shape[1] // kv_heads
    shape = kernel_shape(group, tiles.tokens, width, keys.dtype)
    launch: Any = _attend_tiles[len(tiles.rows), kv_heads, len(parts)]
    launch(
        q, keys, values, tiles.tables, tiles.rows, tiles.counts, tiles.places, tiles.texts, parts, logs, again,
        width**-0.5 * math.log2(math.e), window, q.stride(0), q.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), tiles.tables.stride(0),
        parts.stride(0), parts.stride(1), parts.stride(2), logs.stride(0), logs.stride(1),
        GROUP=group, GROUP_PAD=shape.group_pad, TOKENS=shape.tokens, SIZE=size, WIDTH=width, PADDED=shape.padded,
        KEYS=shape.keys, PRECISION="ieee", FIXED=fixed, ONLY=only, num_warps=shape.warps, num_stages=2,
    )  # fmt: skip


def _attend_by_maxima(
    q: T, store: T, tiles: TileBatch, window: int, out: T, again: T | None
) -> None:
    """Compute tiles by shares with maxima of their own. ``again``: 1 for each tile that is computed; None: all are."""
    heads, width = q.shape[1:]
    splits, only = _splits_of(store, tiles, q), again is not None
    flags = tiles.counts if again is None else again
    parts = out[None]
    if splits > 1:
        parts = q.new_empty(splits, len(q), heads, width, dtype=torch.float32)
    logs = q.new_empty(splits, len(q), heads, dtype=torch.float32)
    _launch_shares(q, store, tiles, window, parts, logs, flags, False, only)
    if splits == 1:
        return
    merge: Any = _merge_shares[len(tiles.rows), heads, tiles.tokens]
    merge(
        parts, logs, out, tiles.rows, tiles.counts, flags, splits, parts.stride(0), parts.stride(1), parts.stride(2),
        logs.stride(0), logs.stride(1), out.stride(0), out.stride(1), WIDTH=width,
        PADDED=max(16, triton.next_power_of_2(width)), SPLITS=triton.next_power_of_2(splits), ONLY=only, num_warps=4,
    )  # fmt: skip
