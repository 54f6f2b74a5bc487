"""Statistics and derivatives of rows of logits by a kernel in C that is compiled where it runs.

The kernel (``logit_kernel.c``) does all for one row before it looks at the next one, so that the row stays in the
processor's cache. A compiler makes it once per machine (:mod:`weft.models.native_library`). Without one, callers
compute in another way.
"""

from __future__ import annotations

import ctypes
from collections import UserDict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weft.models.loss import differentiated
from weft.models.native_library import pointer_to, threaded_library

if TYPE_CHECKING:
    import torch.distributed as dist

T = torch.Tensor

SOURCE = Path(__file__).with_suffix(".c")


class LogitRows(ctypes.Structure):
    """Rows of logits, as the kernel reads them (``Rows`` in C)."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "labels", "scales", "results")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
    ]  # fmt: skip


@cache
def logit_kernel() -> ctypes.CDLL | None:
    """Return the compiled kernel; None if this machine has no compiler, or if compiling fails."""
    library = threaded_library(SOURCE)
    if library is not None:
        library.weft_logits.restype = None
    return library


def kernel_serves_logits(logits: T) -> bool:
    """Return whether the kernel can compute rows such as those of ``logits``: float32 and contiguous on the CPU, on a
    machine with a compiler. The kernel is compiled if it has not been compiled before.
    """
    fits = logits.device.type == "cpu" and logits.dtype == torch.float32
    return fits and logits.is_contiguous() and logit_kernel() is not None


def measured_logits(logits: T, labels: T) -> T:
    """Return for each row of ``logits`` ``[rows, n]`` its log-sum-exp, the mean of its values under their softmax, the
    largest value, and the value of its label: float64 ``[rows, 4]``. ``labels``: ``[rows]``; the value of one that is
    no column is 0.
    """
    results = torch.empty(len(logits), 4, dtype=torch.float64)
    _run(logits, labels, None, results)
    return results


def _run(logits: T, labels: T, scales: T | None, results: T) -> None:
    """Run the kernel in as many threads as PyTorch has. The arguments are those of ``Rows`` in C."""
    library = logit_kernel()
    assert library is not None
    # which the kernel takes as addresses
    here = (labels >= 0) & (labels < logits.shape[1])
    columns = torch.where(here, labels, -1).long().contiguous()
    scales = None if scales is None else scales.float().contiguous()
    pointers = [pointer_to(each) for each in (logits, columns, scales, results)]
    rows = LogitRows(*pointers, *logits.shape)
    library.weft_logits(ctypes.byref(rows), torch.get_num_threads())


class KeptLogits(UserDict[int, T]):
    """Logits that are known, by the first token of their chunk (:func:`weft.models.loss.linear_cross_entropy`). They
    are in no dict, because a check of types would look into one.
    """

    def differentiate(
        self, logits: T, y: T, scale: T, bonus: T | None, first: int,
        group: dist.ProcessGroup | None,
    ) -> T:  # fmt: skip
        """Return the loss of some tokens, and overwrite their ``logits`` ``[tokens, vocab/tp]`` by its derivatives, as
        :func:`weft.models.loss.differentiated` does.
        """
        plain = bonus is None and group is None and not first
        if not (plain and kernel_serves_logits(logits)):
            return differentiated(logits, y, scale, bonus, first, group)
        losses = torch.empty(len(logits), dtype=torch.float64)
        _run(logits, y, scale, losses)
        return losses.sum()
