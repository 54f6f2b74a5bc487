"""Products with the weights of single neurons by a kernel in C, which is compiled where it runs.

With one text a token uses each weight once. Gathering and widening the weights of active neurons for a product then
takes longer than the product. The kernel (``neuron_kernel.c``) reads them where they lie. A compiler makes it once per
machine (:mod:`weft.models.native_library`); without one, callers compute in another way.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

from weft.models.native_library import compiled_library, pointer_to, run_in_parts

T = torch.Tensor

SOURCE = Path(__file__).with_suffix(".c")

#: The most tokens for which the kernel computes: for more, products of matrices are faster.
FEW = 16

#: The least neurons that a thread of its own computes.
SHARED = 64


@cache
def neuron_kernel(stored: torch.dtype) -> ctypes.CDLL | None:
    """Return the compiled kernel for weights of the type ``stored``; None for other types than bfloat16 and float32, or
    on a machine without a compiler.
    """
    if stored not in (torch.bfloat16, torch.float32):
        return None
    narrow = int(stored == torch.bfloat16)
    library = compiled_library(SOURCE, f"-DNARROW={narrow}")
    if library is not None:
        for name in ("weft_neuron_gates", "weft_neuron_sums"):
            getattr(library, name).restype = None
    return library


def kernel_for(x: T, stored: torch.dtype) -> ctypes.CDLL | None:
    """Return the kernel if it computes for tokens ``x`` ``[tokens, embed]``: a few, in float32 on the CPU. ``stored``:
    type of the weights.
    """
    fits = len(x) <= FEW and x.dtype == torch.float32 and x.device.type == "cpu"
    return neuron_kernel(stored) if fits else None


def gate_values(library: ctypes.CDLL, x: T, gate: T) -> T:
    """Return the positive parts of the gates of tokens ``x`` ``[tokens, embed]``: ``[tokens, neurons]``. ``gate``: the
    gate weight ``[neurons, embed]``, in the type for which ``library`` is compiled.
    """
    x, gate = x.contiguous(), gate.contiguous()
    out = x.new_empty(len(x), len(gate))

    def run(first: int, last: int) -> None:
        library.weft_neuron_gates(
            *map(pointer_to, (gate, x, out)),
            *map(ctypes.c_int64, (first, last, len(gate), *x.shape)),
        )

    run_in_parts(run, len(gate), _thread_count(len(gate)))
    return out


def neuron_sums(
    library: ctypes.CDLL, x: T, memory: T, records: T, neurons: T, active: T, gates: T | None
) -> T:  # fmt: skip
    """Return what some neurons add to the feed-forward's output for tokens ``x``, of the shape of ``x``.

    ``memory``: weights as records of bytes, uint8 ``[records, size]``; each has ``up`` and ``down``, and before these
    the gate, if ``gates`` is None. ``records``: which of the records are the neurons', int64 ``[neurons]``;
    ``neurons``: their indices in the layer, likewise. ``active``: which neurons of the layer each token uses, bool
    ``[tokens, neurons of the layer]``; ``gates``: the values of their gates, of the same shape.
    """
    x, active = x.contiguous(), active.contiguous()
    gates = gates if gates is None else gates.contiguous()
    parts = dict[int, T]()

    def run(first: int, last: int) -> None:
        out = torch.zeros_like(x)
        those = records[first:last], neurons[first:last], active, gates, x, out
        sizes = memory.shape[1], last - first, active.shape[1], *x.shape
        library.weft_neuron_sums(
            pointer_to(memory), *map(pointer_to, those), *map(ctypes.c_int64, sizes)
        )
        parts[first] = out

    run_in_parts(run, len(records), _thread_count(len(records)))
    # in the order of the neurons, whichever thread was first
    return sum((parts[first] for first in sorted(parts)[1:]), parts[0])


def _thread_count(neurons: int) -> int:
    """Return in how many threads the kernel computes so many ``neurons``."""
    return min(torch.get_num_threads(), neurons // SHARED)
