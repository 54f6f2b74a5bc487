"""Rates that the probe measures through PyTorch, beside native ones: STREAM's triad in C and a product by OpenBLAS.

    python bench/planner/native.py [--rounds N] [--out bench/results/planner_native.json]

Both sides take turns, and processor time counts, so that other programs on the machine disturb both alike. The triad is
``a = b + 3 c`` over three arrays of 32 MiB (McCalpin), compiled by ``cc -O3 -march=native``; the product is
768 x 768 x 768 in float32 on one thread, by the OpenBLAS that comes with NumPy.
"""

import argparse
import ctypes
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from script import run

from weft.errors import WeftError
from weft.rehearse.machine_probe import peaks, triad

#: Numbers of an array of the triad, and rows of the product's square factors, as in the probe.
NUMBERS, ROWS = 2**23, 768
SOURCE = """
void triad(float *restrict a, const float *restrict b, const float *restrict c, long n) {
    for (long i = 0; i < n; i++) a[i] = b[i] + 3.0f * c[i];
}
"""


def quickest(call: Callable[[], Any], turns: int = 5) -> float:
    """Return the median processor seconds of a call, as the probe takes them."""
    call()
    taken = []
    for _ in range(turns):
        begun = time.process_time()
        call()
        taken.append(time.process_time() - begun)
    return median(taken)


def native_triad(folder: Path) -> Callable[[], float]:
    """Compile the triad; return a function that measures its bytes per second."""
    source, library = folder / "triad.c", folder / "triad.so"
    source.write_text(SOURCE)
    command = [
        "cc",
        "-O3",
        "-march=native",
        "-shared",
        "-fPIC",
        str(source),
        "-o",
        str(library),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise WeftError(f"cc cannot compile the triad: {error}") from None
    loop = ctypes.CDLL(str(library)).triad
    loop.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long]
    arrays = [np.ones(NUMBERS, dtype=np.float32) for _ in range(3)]

    def once() -> None:  # holds the arrays as long as it is called
        loop(*(array.ctypes.data for array in arrays), NUMBERS)

    return lambda: 3 * 4 * NUMBERS / quickest(once)


def native_product() -> Callable[[], float]:
    """Return a function that measures FLOP/s of a product by the OpenBLAS of NumPy (OMP_NUM_THREADS=1)."""
    a = np.random.default_rng(0).random((ROWS, ROWS), dtype=np.float32)
    out = np.empty_like(a)
    return lambda: 2 * ROWS**3 / quickest(lambda: np.matmul(a, a, out=out))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Rates of the probe beside native ones."
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        stream, product = native_triad(Path(folder)), native_product()
        rounds = [
            {"triad": triad(), "native triad": stream(), "product": peaks()["float32"], "native product": product()}
            for _ in range(options.rounds)
        ]  # fmt: skip
    measured: dict[str, Any] = {
        name: median(each[name] for each in rounds) / 1e9 for name in rounds[0]
    }
    ratios = {
        name: round(median(each[name] / each[f"native {name}"] for each in rounds), 3)
        for name in ("triad", "product")
    }
    measured = {name: round(rate, 2) for name, rate in measured.items()}
    record = {
        "command": f"python bench/planner/native.py --rounds {options.rounds}",
        "unit": "GB/s and GFLOP/s of one thread",
        "rates": measured,
        "probe over native": ratios,
    }
    print(json.dumps(record, indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
