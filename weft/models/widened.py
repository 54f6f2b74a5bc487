"""Products in 16 bits on a processor that multiplies them more slowly than float32.

A CPU without instructions for bfloat16 converts each element where it is used: a product of backward took 21.9 s that
takes 53 ms in float32. Here tiles of the factors are converted to float32 and results are rounded once, so that weights
and activations stay in 16 bits. Sums are float32 either way.
"""

import time
from collections.abc import Callable
from functools import cache

import torch

from weft.models.numbers import has_numbers

T = torch.Tensor

#: Rows of the left factor, and elements of the right one, that are float32 at once: 4 MiB, which fit in caches.
ROWS, NUMBERS = 1024, 2**20


#: Beyond this share of float32's time, a product in 16 bits does not pay. A CPU with instructions for bfloat16 takes
#: 0.65, one with AVX-512 alone 2.7, one with AVX2 alone 30.
SLOW = 1.5


#: Types that :func:`multiplies_slowly` has found slow; a compiler can read this set.
MULTIPLIED_SLOWLY: set[torch.dtype] = set()


@cache
def multiplies_slowly(dtype: torch.dtype) -> bool:
    """Return whether the CPU multiplies matrices of ``dtype`` more slowly than float32; measured once in a process.

    The processor time of this thread alone is measured, so that other work on the machine does not count.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    a, b = torch.ones(64, 256), torch.ones(256, 256)
    narrow = a.to(dtype), b.to(dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = _least_seconds(lambda: narrow[0] @ narrow[1])
        slow = seconds > SLOW * _least_seconds(lambda: a @ b)
    finally:
        torch.set_num_threads(threads)
    if slow:
        MULTIPLIED_SLOWLY.add(dtype)
    return slow


def _least_seconds(call: Callable[[], object]) -> float:
    """Processor seconds of the fastest of six calls; one before these prepares kernels."""
    call()
    seconds = []
    for _ in range(6):
        begun = time.thread_time()
        call()
        seconds.append(time.thread_time() - begun)
    return min(seconds)


def is_widened(x: T) -> bool:
    """Return whether products of ``x`` are computed in float32 although the type of ``x`` has fewer bits."""
    return x.device.type == "cpu" and multiplies_slowly(x.dtype) and has_numbers(x)


def multiply(a: T, b: T, plus: T | None = None, out: T | None = None) -> T:
    """Return ``a @ b`` of ``[m, k]`` and ``[k, n]``. No gradient is recorded.

    ``plus``: a tensor ``[m, n]`` to add; ``out``: the tensor to write to. Both may be the same tensor.
    """
    if not is_widened(a):
        if plus is None:
            return torch.mm(a, b, out=out)
        return torch.addmm(plus, a, b, out=out)
    out = a.new_empty(len(a), b.shape[1]) if out is None else out
    by_columns = b.stride(0) == 1  # tiles are read as they lie in memory
    for start in range(0, len(a), ROWS):
        rows = slice(start, start + ROWS)
        added = None if plus is None else plus[rows]
        times = _times_columns if by_columns else _times_rows
        times(a[rows].float(), b, added, out[rows])
    return out


def _times_columns(left: T, b: T, plus: T | None, out: T) -> None:
    """Write ``out = left @ b (+ plus)``, some columns at a time."""
    columns = max(64, NUMBERS // max(1, len(b)))
    for start in range(0, b.shape[1], columns):
        at = slice(start, start + columns)
        right = b[:, at].float()
        if plus is None:
            out[:, at] = left @ right
        else:
            out[:, at] = torch.addmm(plus[:, at].float(), left, right)


def _times_rows(left: T, b: T, plus: T | None, out: T) -> None:
    """Write ``out = left @ b (+ plus)``, as a sum over some rows of ``b`` at a time."""
    total = left.new_zeros(out.shape) if plus is None else plus.float()
    rows = max(64, NUMBERS // max(1, b.shape[1]))
    for start in range(0, len(b), rows):
        at = slice(start, start + rows)
        total.addmm_(left[:, at], b[at].float())
    out.copy_(total)


def widened(*xs: T) -> tuple[T, ...]:
    """Return the tensors ``xs``, converted to float32 if the CPU multiplies their own type more slowly."""
    return tuple(x.float() if is_widened(x) else x for x in xs)


def widened_note(dtype: str, device: torch.device) -> str:
    """Return the line that a run prints if products are computed in float32 although weights have fewer bits, else "".

    ``dtype``: name of the weights' type; ``device``: device of the run.
    """
    if device.type != "cpu" or not multiplies_slowly(getattr(torch, dtype)):
        return ""
    return (
        f"this CPU multiplies {dtype} slowly: products are computed in float32 by tiles, "
        f"what is stored stays {dtype}"
    )
