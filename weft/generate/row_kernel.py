"""Weights of tokens, nuclei and draws from rows of logits by a kernel in C that is compiled where it runs.

The kernel (``row_kernel.c``) does all for one row before it looks at the next one, so that the row stays in the
processor's cache. The border of a nucleus (Holtzman et al. 2019, 1904.09751) is looked for without sorting, between two
weights: each pass sums up the weights above a third one between them, which then takes the place of one of the two. A
compiler makes the kernel once per machine (:mod:`weft.models.native_library`). Without one, callers compute in another
way.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import log
from pathlib import Path
from typing import NamedTuple

import torch

from weft.generate.sampling import Sampling
from weft.models.native_library import compiled_library, pointer_to, run_in_parts

T = torch.Tensor

SOURCE = Path(__file__).with_suffix(".c")

#: Values of a row that the kernel sums up at once.
BLOCK = 64

#: Logarithm of e to base two.
LOG2_E = 1 / log(2)


class RowPenalties(NamedTuple):
    """Penalties of rows of logits.

    Attributes:
        ``ids``: tokens that are penalised, row after row, int64 ``[tokens]``.
        ``often``: how often each of them has been written, float32 ``[tokens]``.
        ``settings``: ``repetition``, ``presence`` and ``frequency`` of each row, float32 ``[rows, 3]``.
        ``counts``: how many of ``ids`` belong to each row.
    """

    ids: T
    often: T
    settings: T
    counts: Sequence[int]


def kernel_serves(values: T) -> bool:
    """Return whether the kernel can compute rows such as those of ``values``: float32 on the CPU, on a machine with a
    compiler. The kernel is compiled if it has not been compiled before.
    """
    fits = values.device.type == "cpu" and values.dtype == torch.float32
    return fits and row_kernel() is not None


def draw_row_tokens(
    values: T,
    hows: Sequence[Sampling],
    numbers: T,
    penalties: RowPenalties | None = None,
) -> T:
    """Draw a token from each row of logits ``values`` ``[rows, vocab]``, and return the token ids, int64 ``[rows]``.
    The id is -1 for a row with NaN or infinity, or with nothing but -inf.

    ``hows``: settings of sampling of each row, of which ``top_k`` does not count. ``numbers``: random numbers in
    [0, 1), float64 ``[rows]``. ``penalties``: penalties that change the logits; None: there are none.
    """
    tokens = torch.empty(len(values), dtype=torch.int64)
    run_kernel(values, hows, (numbers, tokens), None, penalties)
    return tokens


def row_weights(
    values: T, hows: Sequence[Sampling], penalties: RowPenalties | None = None
) -> T:
    """Return for each row of logits ``values`` ``[rows, vocab]`` the weights of its tokens, in proportion to their
    probabilities. Tokens that ``top_p`` or ``min_p`` of the row's settings ``hows`` leave out have weight 0; ``top_k``
    does not count. ``penalties``: penalties that change the logits; None: there are none.
    """
    weights = torch.empty_like(values, memory_format=torch.contiguous_format)
    run_kernel(values, hows, (None, None), weights, penalties)
    return weights


def run_kernel(
    values: T,
    hows: Sequence[Sampling],
    draws: tuple[T | None, T | None],
    weights: T | None,
    penalties: RowPenalties | None,
) -> None:
    """Run the kernel on the rows of ``values``, in as many threads as PyTorch has.

    ``draws``: random numbers and tensor for tokens of :func:`draw_row_tokens`; ``weights``: tensor for the weights of
    :func:`row_weights`, whose other arguments these are.
    """
    library = row_kernel()
    assert library is not None
    values, (rows, vocab) = values.contiguous(), values.shape
    blocks = -(-vocab // BLOCK)
    scales = values.new_tensor([LOG2_E / max(how.temperature, 1e-37) for how in hows])
    least = values.new_tensor([how.min_p for how in hows])
    shares = torch.tensor([how.top_p for how in hows], dtype=torch.float64)
    changes: tuple[T | None, ...] = None, None, None, None
    if penalties is not None:
        ends = torch.tensor([*accumulate(penalties.counts, initial=0)])
        changes = ends, *penalties[:3]
    given = (scales, least, shares, *draws, *changes)

    def run(first: int, last: int) -> None:
        room = values.new_empty(vocab) if weights is None else weights
        sums = values.new_empty(1 if weights is None else rows, blocks)
        pointers = [pointer_to(each) for each in (values, room, sums, *given)]
        sizes = (first, last, vocab, 0 if weights is None else vocab)
        library.weft_draw_tokens(*pointers, *map(ctypes.c_int64, sizes))

    run_in_parts(run, rows, min(rows, torch.get_num_threads()))


@cache
def row_kernel() -> ctypes.CDLL | None:
    """Return the compiled kernel; None if this machine has no compiler, or if compiling fails."""
    library = compiled_library(SOURCE, f"-DBLOCK={BLOCK}")
    if library is not None:
        library.weft_draw_tokens.restype = None
    return library
