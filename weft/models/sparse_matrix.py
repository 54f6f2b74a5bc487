"""A matrix of which most elements are zero, stored as a bitmap and values.

The form is that of SparTA's and Flash-LLM's sparse tiles in its simplest shape: a bit for each element, and the values
of the elements that are not zero, row after row. A matrix of ``n`` elements takes ``n / 8`` bytes for the bits, the
values, and 8 bytes for the beginning of each row.
"""

from typing import NamedTuple

import torch

T = torch.Tensor

#: What follows the weight's name in the names of the tensors of a stored weight: bitmap, values, offsets. The bitmap
#: has the weight's own name, so that other programs refuse it for its shape.
VALUES, OFFSETS = ".values", ".offsets"
PARTS = ("", VALUES, OFFSETS)


class SparseMatrix(NamedTuple):
    """A matrix ``[rows, columns]`` as a bitmap and values.

    Attributes:
        ``bitmap``: uint8 ``[rows, ceil(columns / 8)]``. Bit ``i % 8`` of byte ``i // 8`` of a row is set if the element
            in column ``i`` is not zero.
        ``values``: the elements that are not zero, row after row.
        ``offsets``: int64 ``[rows + 1]``, where the values of each row begin; the last entry is their number.
        ``columns``: the number of columns.
    """

    bitmap: T
    values: T
    offsets: T
    columns: int

    @property
    def nbytes(self) -> int:
        """Number of bytes of the bitmap, the values and the offsets together."""
        return self.bitmap.nbytes + self.values.nbytes + self.offsets.nbytes


def sparse_matrix(weight: T) -> SparseMatrix:
    """Return ``weight`` ``[rows, columns]`` as a bitmap and values, which keep their type."""
    rows, columns = weight.shape
    kept = weight != 0
    bits = torch.nn.functional.pad(kept, (0, -columns % 8)).unflatten(1, (-1, 8))
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=weight.device)
    bitmap = (bits * powers).sum(2, dtype=torch.uint8)  # [rows, bytes]
    offsets = torch.zeros(rows + 1, dtype=torch.int64, device=weight.device)
    offsets[1:] = kept.sum(1).cumsum(0)
    return SparseMatrix(bitmap, weight[kept], offsets, columns)


def dense_rows(matrix: SparseMatrix, first: int, last: int) -> T:
    """Return the rows ``first:last`` of ``matrix`` as a dense tensor with their zeros: ``[last - first, columns]``."""
    bits = torch.arange(8, dtype=torch.uint8, device=matrix.bitmap.device)
    kept = (matrix.bitmap[first:last, :, None] >> bits & 1).bool()
    kept = kept.flatten(1)[:, : matrix.columns]
    at, end = (int(matrix.offsets[i]) for i in (first, last))
    dense = torch.zeros(
        kept.shape, dtype=matrix.values.dtype, device=matrix.values.device
    )
    return dense.masked_scatter_(kept, matrix.values[at:end])
