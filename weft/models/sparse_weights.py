"""Weights with zeros that are held as bitmap and values, and multiplied as dense ones: load sparse, compute dense.

Generation with one text reads every weight once per token, so that its time is that of the bytes (Flash-LLM, Xia et al.
2023, 2309.10285). Bits and values are spread to a few dense elements at a time: in registers by a kernel in C
(``sparse_weights.c``) for few rows, in a buffer of some rows of the weight for many.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from weft.errors import UsageError
from weft.models.fused import times
from weft.models.native_library import compiled_library, pointer_to, run_in_parts
from weft.models.sparse_matrix import dense_rows, sparse_matrix

T = torch.Tensor

SOURCE = Path(__file__).with_suffix(".c")

#: The first part of the words of these forms, and the last one where values are rounded to bfloat16.
SPARSE, ROUNDED = "sparse", "bfloat16"

#: Most rows of an input that the kernel multiplies. For more, rows of the weight become dense, this many at a time.
FEW, TILE = 16, 256

#: Bits that the kernel reads at once.
WORD = 32

#: Elements of a weight from which on its rows are shared among threads.
SHARED = 1 << 18


class SparseWord(NamedTuple):
    """Meaning of a value of ``--weights`` such as ``sparse:0.6``. ``share``: fraction of each weight's elements that
    become zero before it is stored. ``narrow``: whether values are rounded to bfloat16.
    """

    share: float
    narrow: bool


def read_sparse_word(word: str) -> SparseWord | None:
    """Return the meaning of ``word``, a value of ``--weights``: ``sparse`` or ``sparse:SHARE``, either with
    ``:bfloat16`` after it; None for other words.

    Raises :class:`UsageError` if SHARE is not a number from 0 to below 1.
    """
    first, *others = word.split(":")
    if first != SPARSE:
        return None
    narrow = others[-1:] == [ROUNDED]
    numbers = others[:-1] if narrow else others
    try:
        share = float(*numbers)
    except (ValueError, TypeError):
        share = -1.0
    if not 0 <= share < 1:
        raise UsageError(
            f"weights cannot be {word!r}; give sparse:SHARE or sparse:SHARE:{ROUNDED}, SHARE from 0 to below 1"
        )
    return SparseWord(share, narrow)


@cache
def sparse_kernel(narrow: bool, *options: str) -> ctypes.CDLL | None:
    """Return the compiled kernel for values in bfloat16 (``narrow``) or float32; None without a compiler.

    ``options``: further options of the compiler.
    """
    library = compiled_library(SOURCE, f"-DNARROW={int(narrow)}", *options)
    if library is not None:
        for name in ("weft_sparse_times", "weft_sparse_spread"):
            getattr(library, name).restype = None
    return library


class Sparse(nn.Module):
    """A weight ``[out, in]`` that is held as a :class:`weft.models.sparse_matrix.SparseMatrix`.

    ``weight``: the weight, whose zeros are left out. If bfloat16 holds all its values exactly, as for most published
    models, they are kept in it. ``narrow``: whether other weights are rounded to bfloat16 too; if not, they keep their
    type. ``options``: further options of the kernel's compiler.
    """

    def __init__(self, weight: T, narrow: bool = False, *options: str) -> None:
        super().__init__()
        weight = weight.detach()
        rounded = weight.bfloat16()
        if narrow or torch.equal(rounded.to(weight.dtype), weight):
            weight = rounded
        self.matrix = sparse_matrix(weight)
        self.out, self.nbytes = len(weight), self.matrix.nbytes
        is_narrow = self.matrix.values.dtype == torch.bfloat16
        self.kernel = None
        if is_narrow or self.matrix.values.dtype == torch.float32:
            self.kernel = sparse_kernel(is_narrow, *options)
        parts = self.matrix[:3]
        self.pointers = [pointer_to(part) for part in parts]
        self.sizes = [ctypes.c_int64(n) for n in (self.out, self.matrix.columns)]

    def forward(self, x: T) -> T:
        """Multiply ``x`` ``[..., in]`` with the sparse weight: return ``[..., out]``."""
        rows = x.flatten(0, -2)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        few = len(rows) <= FEW and rows.dtype == torch.float32
        y = self._multiplied(rows) if few and self.kernel else self._by_tiles(rows)
        return y.to(x.dtype).unflatten(0, x.shape[:-1])

    def _by_tiles(self, rows: T) -> T:
        """Multiply ``rows`` ``[rows, in]`` with some dense rows of the weight after the other."""
        y = rows.new_empty(len(rows), self.out)
        for first in range(0, self.out, TILE):
            last = min(first + TILE, self.out)
            tile = self.dense(first, last).to(rows.dtype)
            y[:, first:last] = times(rows, tile)
        return y

    def dense(self, first: int, last: int) -> T:
        """Return the weight's rows ``first:last`` as a dense tensor with their zeros: ``[last - first, in]``."""
        if self.kernel is None:
            return dense_rows(self.matrix, first, last)
        tile = torch.empty(last - first, self.matrix.columns)
        at = pointer_to(tile)
        self.kernel.weft_sparse_spread(
            *self.pointers, at, ctypes.c_int64(first), ctypes.c_int64(last), *self.sizes
        )
        return tile

    def _multiplied(self, rows: T) -> T:
        """Multiply a few ``rows`` ``[rows, in]`` by the kernel."""
        kernel, count = self.kernel, ctypes.c_int64(len(rows))
        assert kernel is not None
        out, columns = self.sizes
        rows = nn.functional.pad(rows, (0, -columns.value % WORD)).contiguous()
        y = torch.empty(len(rows), self.out)
        x, to = map(pointer_to, (rows, y))

        def multiply(first: int, last: int) -> None:
            edges = ctypes.c_int64(first), ctypes.c_int64(last)
            kernel.weft_sparse_times(*self.pointers, x, to, *edges, out, columns, count)

        shares = self.out * columns.value >= SHARED
        run_in_parts(multiply, self.out, torch.get_num_threads() if shares else 1)
        return y
