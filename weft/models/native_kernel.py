"""Attention of single tokens to keys and values in cache blocks, by a kernel in C that is compiled where it runs.

The kernel (``native_kernel.c``) reads the blocks where they lie, as fast as memory gives them. A compiler makes it once
per machine and shape of a head (:mod:`weft.models.native_library`), in about half a second. Without a compiler there is
no kernel, and callers compute in another way.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from weft.models.native_library import compiled_library, pointer_to, run_in_parts
from weft.models.spans import Span

T = torch.Tensor

SOURCE = Path(__file__).with_suffix(".c")

#: Keys of a batch from which on its tokens are shared among threads: handing work on takes longer for fewer.
SHARED_KEYS = 2048

#: Elements of a head must be a multiple of this, and at most :data:`WIDEST`.
LANES, WIDEST = 16, 256


class TokenBatch(NamedTuple):
    """New tokens whose attention is one call of the kernel. All tensors are int32 and on the CPU.

    Attributes:
        ``tables``: cache blocks of each text, ``[texts, blocks]``; rows of shorter texts are padded.
        ``rows``: index of each token in the packed row.
        ``texts``: index in ``tables`` of each token's text.
        ``places``: number of tokens before each token in its text.
        ``keys``: largest number of keys that a token sees.
    """

    tables: T
    rows: T
    texts: T
    places: T
    keys: int


def batch_tokens(spans: Sequence[Span]) -> TokenBatch:
    """Return the new tokens of ``spans``, one span per text, as the batch for one call of the kernel."""
    blocks = max(len(span.table) for span in spans)
    tokens = [
        (row, text, span.past + row - span.first)
        for text, span in enumerate(spans)
        for row in range(span.first, span.last)
    ]
    rows, texts, places = torch.tensor(tokens, dtype=torch.int32).t().contiguous()
    tables = [[*span.table, *[0] * (blocks - len(span.table))] for span in spans]
    most = max(span.past + span.last - span.first for span in spans)
    return TokenBatch(
        torch.tensor(tables, dtype=torch.int32), rows, texts, places, most
    )


def attend_tokens(q: T, store: T, batch: TokenBatch, window: int, out: T) -> None:
    """Write the attention of the tokens of ``batch`` into ``out``. The kernel must exist (:func:`has_kernel`).

    ``q, out``: float32 ``[packed tokens, heads, width]``; ``store``: the cache of a layer, ``[2, blocks, size,
    kv_heads, width]``; ``window``: the number of tokens that a token sees, itself included; 0: all.
    """
    heads, width = q.shape[1:]
    size, kv_heads = store.shape[2:4]
    kernel = compiled_kernel(width, heads // kv_heads, size)
    assert kernel is not None
    q = q.contiguous()
    tensors = (q, *store, out, *batch[:4])
    pointers = [pointer_to(x) for x in tensors]
    blocks, scale = batch.tables.shape[1], ctypes.c_float(width**-0.5)

    def attend(first: int, last: int) -> None:
        scores = torch.empty(heads * batch.keys)
        numbers = (first, last, blocks, kv_heads, window)
        kernel(*pointers, *map(ctypes.c_int64, numbers), scale, pointer_to(scores))  # fmt: skip

    count, threads = len(batch.rows), torch.get_num_threads()
    shares = count >= 2 and count * batch.keys >= SHARED_KEYS
    run_in_parts(attend, count, threads if shares else 1)


def has_kernel(width: int, group: int, size: int) -> bool:
    """Return whether there is a kernel for heads of ``width`` elements, of which ``group`` share a key head, and for
    cache blocks of ``size`` tokens. A kernel that has not been compiled before is compiled now.
    """
    fits = width % LANES == 0 and 0 < width <= WIDEST
    return fits and compiled_kernel(width, group, size) is not None


@cache
def compiled_kernel(width: int, group: int, size: int) -> Callable[..., None] | None:
    """Compile the attention kernel, and return it as a function with the arguments of ``weft_attend`` in C.

    ``width``: elements of a head. ``group``: number of query heads that share a key head. ``size``: tokens of a cache
    block. Returns None if this machine has no compiler, or if compiling fails.
    """
    macros = f"-DWIDTH={width}", f"-DGROUP={group}", f"-DSIZE={size}"
    library = compiled_library(SOURCE, *macros)
    if library is None:
        return None
    function = library.weft_attend
    function.restype = None
    return function
