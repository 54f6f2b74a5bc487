"""Elementwise parts of a block and their gradients, each in one pass over its rows.

A kernel in C that is compiled where it runs (``row_pieces.c``) computes rows of float32. PyTorch's operators, of which
each reads and writes whole tensors, compute others, and all rows on machines without a compiler.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from weft.models.fused import inverse_root_mean_square
from weft.models.native_library import pointer_to, threaded_library

T = torch.Tensor

SOURCE = Path(__file__).with_suffix(".c")

#: Parts of a block, by their numbers in C.
GATE, GATE_BACK, NORM, NORM_BACK = range(4)


class RowPieces(ctypes.Structure):
    """Tensors of a part, as the kernel reads them (``Pieces`` in C)."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "c", "d", "x", "y", "inverse", "sums")),
        *((name, ctypes.c_int64) for name in ("rows", "size")),
        ("eps", ctypes.c_float),
    ]  # fmt: skip


class NormedRows(NamedTuple):
    """Rows after RMSNorm, ``[rows, size]``, and the factor ``inverse`` ``[rows, 1]`` that was applied to each of them
    before the scale.
    """

    rows: T
    inverse: T


class NormGradients(NamedTuple):
    """Gradients of RMSNorm by its rows, ``[rows, size]``, and by its scale, ``[size]``."""

    rows: T
    scale: T


@cache
def pieces_kernel() -> ctypes.CDLL | None:
    """Return the compiled kernel; None if this machine has no compiler, or if compiling fails."""
    library = threaded_library(SOURCE)
    if library is not None:
        library.weft_pieces.restype = None
    return library


def _kernel_of(*tensors: T) -> ctypes.CDLL | None:
    """Return the kernel if it can read all of ``tensors``, else None."""
    fits = all(
        x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous()
        for x in tensors
    )
    return pieces_kernel() if fits else None


def _run(kernel: ctypes.CDLL, part: int, size: int, eps: float = 0, **given: T) -> None:
    """Run the part of a block with the number ``part`` on the tensors ``given``, by their names in C."""
    pointers = {name: pointer_to(x) for name, x in given.items()}
    pieces = RowPieces(**pointers, rows=len(given["a"]), size=size, eps=eps)
    kernel.weft_pieces(ctypes.byref(pieces), torch.get_num_threads(), part)


def gated(wide: T) -> T:
    """Return ``silu(gate) * up``, ``[rows, size]``, from ``wide`` ``[rows, 2 * size]``, which is gate beside up."""
    size = wide.shape[1] // 2
    if kernel := _kernel_of(wide):
        out = wide.new_empty(len(wide), size)
        _run(kernel, GATE, size, a=wide, x=out)
        return out
    gate, up = wide.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gate_gradients(wide: T, grad: T) -> tuple[T, T]:
    """Return the gradients by gate and up, ``[rows, size]`` each, from ``grad``, that of :func:`gated`'s result."""
    size = wide.shape[1] // 2
    if kernel := _kernel_of(wide, grad):
        of_gate, of_up = torch.empty_like(grad), torch.empty_like(grad)
        _run(kernel, GATE_BACK, size, a=wide, b=grad, x=of_gate, y=of_up)
        return of_gate, of_up
    gate, up = wide.chunk(2, -1)
    return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def normed_rows(x: T, scale: T, eps: float) -> NormedRows:
    """Return the rows ``x`` ``[rows, size]`` after RMSNorm. ``eps``: constant added to the mean square."""
    if kernel := _kernel_of(x, scale):
        out, inverse = torch.empty_like(x), x.new_empty(len(x), 1)
        _run(kernel, NORM, x.shape[1], eps, a=x, b=scale, x=out, inverse=inverse)
        return NormedRows(out, inverse)
    inverse = inverse_root_mean_square(x, eps)
    return NormedRows((x * inverse).mul_(scale), inverse)


def norm_gradients(grad: T, x: T, scale: T, inverse: T, plus: T) -> NormGradients:
    """Return the gradients by rows and scale of :func:`normed_rows`, with ``plus`` ``[rows, size]`` added to the first.

    ``grad``: the gradient of its rows. ``inverse``: the factors that it has returned. The other arguments are those of
    that call.
    """
    if kernel := _kernel_of(grad, x, scale, inverse, plus):
        out = torch.empty_like(x)
        sums = x.new_zeros(torch.get_num_threads(), x.shape[1])
        _run(
            kernel, NORM_BACK, x.shape[1], a=x, b=scale, c=grad, d=plus, x=out, inverse=inverse, sums=sums
        )  # fmt: skip
        return NormGradients(out, sums.sum(0))
    product = grad * x
    pull = (product @ scale)[:, None].mul_(inverse.pow(3)).div_(-x.shape[1])
    of_rows = (grad * scale).mul_(inverse).addcmul_(x, pull).add_(plus)
    return NormGradients(of_rows, inverse[:, 0] @ product)
