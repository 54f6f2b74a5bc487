"""Measures peak rates of devices and memory in use; flops of a model are in :mod:`weft.shapes.shape`."""

import contextlib
import re
import resource
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

#: Dense peaks in TFLOP/s (bfloat16, float32 without tensor cores) from NVIDIA's data sheets, no sparsity. The first
#: that is a word of the device's name counts.
PEAKS: dict[str, tuple[float, float]] = {
    "B200": (2250, 75), "H100 PCIe": (756, 51), "H200": (989, 67), "H100": (989, 67), "A100": (312, 19.5),
    "L40S": (362, 91.6), "L40": (181, 90.5), "L4": (121, 30.3), "A10G": (70, 31.5), "A10": (125, 31.2),
    "RTX 4090": (165.2, 82.6),
}  # fmt: skip


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the dense peak of ``device`` in flop/s for matrix products of type ``dtype``, from the table
    :data:`PEAKS`.

    For a GPU that the table lacks, the peak is measured by a matrix product. Returns None for a CPU, whose measured
    peak changes from one moment to the next with the load of the machine.
    """
    if device.type != "cuda":
        return None
    if dtype != torch.float64:
        for name, (half, single) in PEAKS.items():
            if re.search(rf"\b{name}\b", torch.cuda.get_device_name(device)):
                # half the rate of bfloat16
                tf32 = torch.get_float32_matmul_precision() != "highest"
                return 1e12 * (
                    half if dtype != torch.float32 else max(single, tf32 * half / 2)
                )
    return measured_flops(device, dtype)


def measured_flops(
    device: torch.device, dtype: torch.dtype, seconds: float = 0.2, size: int = 1024
) -> float:
    """Return the best measured rate of ``device``, in flop/s, for products of two square matrices of type ``dtype``
    with ``size`` rows.

    The measurement takes about ``seconds``.
    """
    from torch.utils.benchmark import Timer

    a = torch.rand(size, size, device=device, dtype=dtype)
    timer = Timer(
        "torch.mm(a, a, out=out)",
        globals={"a": a, "out": a.clone()},
        num_threads=torch.get_num_threads(),
    )
    return 2.0 * size**3 / min(timer.blocked_autorange(min_run_time=seconds).times)


class MemoryUse(NamedTuple):
    """Memory of this rank in GiB: ``now``, the present use, and ``peak``, the largest use so far.

    On a GPU it is the memory that the CUDA allocator has allocated, otherwise the resident memory of the process.
    """

    now: float
    peak: float


def memory_gib(device: torch.device) -> MemoryUse:
    if device.type == "cuda":
        now, peak = (
            torch.cuda.memory_allocated(device),
            torch.cuda.max_memory_allocated(device),
        )
    else:
        now, peak = psutil.Process().memory_info().rss, peak_resident()
    return MemoryUse(now / 2**30, peak / 2**30)


def peak_resident() -> int:
    """Return the peak resident memory of this process in bytes."""
    # ru_maxrss starts at what the process that started this one had
    with contextlib.suppress(OSError):
        if match := re.search(
            r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()
        ):
            return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
