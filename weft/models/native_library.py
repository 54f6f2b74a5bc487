"""Kernels in C that are compiled where they run, once per machine, and the threads that call them.

The compiled files are kept in the cache folder (:func:`weft.cache.cache_root`).
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from re import MULTILINE, findall

import torch

from weft.cache import build_once, cache_root
from weft.errors import WeftError

#: How kernels are compiled. Sums may be computed in any order, but numbers that are not finite stay what they are.
FLAGS = (
    "-O3", "-march=native", "-shared", "-fPIC", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math",
    "-fno-math-errno", "-ffp-contract=fast",
)  # fmt: skip

#: Seconds that a compiler may take.
COMPILE_S = 60.0


def compiled_library(source: Path, *options: str) -> ctypes.CDLL | None:
    """Compile the C file ``source`` for this machine, and return it as a loaded library.

    ``options``: further options of the compiler, such as macros. Returns None if this machine has no compiler, or if
    compiling fails.
    """
    if not sys.platform.startswith("linux"):
        return None
    with suppress(OSError, WeftError, subprocess.SubprocessError):
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        if not compiler:
            return None
        command = [*compiler.split(), *FLAGS, *options, str(source), "-o"]
        name = sha256(repr([*command, _processor()]).encode() + _text(source))

        def build(folder: Path) -> None:
            subprocess.run(
                [*command, str(folder / "kernel.so")],
                check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=COMPILE_S,
            )  # fmt: skip

        folder = build_once(cache_root() / f"kernel-{name.hexdigest()[:24]}", build)
        return ctypes.CDLL(str(folder / "kernel.so"))
    return None


def _text(source: Path) -> bytes:
    """Return the bytes of a C file, and of the files beside it that it includes."""
    text = source.read_bytes()
    included = findall(rb'^#include "([^"]+)"', text, MULTILINE)
    return text + b"".join(_text(source.parent / name.decode()) for name in included)


def threaded_library(source: Path, *options: str) -> ctypes.CDLL | None:
    """Return :func:`compiled_library` of a kernel whose threads are those of PyTorch's own operators, as it calls
    functions of libgomp. Returns None also if PyTorch has another library of threads.
    """
    with suppress(OSError, AttributeError):
        # names of libraries that are loaded already are bound to a new one if they are seen by all
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
        return compiled_library(source, *options)
    return None


def _processor() -> str:
    """Return what tells processors apart for which compilers make different code."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


@cache
def kernel_threads(threads: int) -> ThreadPoolExecutor:
    """Return a pool of ``threads`` threads in which parts of a kernel's work run. Every call with the same number
    returns the same pool.
    """
    return ThreadPoolExecutor(threads, "kernel")


def run_in_parts(run: Callable[[int, int], None], count: int, threads: int) -> None:
    """Call ``run`` with the first index and the end of each of as many parts of ``count`` rows as there are
    ``threads``, each in a thread of its own, and wait for all. An error of a thread is raised here.
    """
    if threads <= 1:
        run(0, count)
        return
    edges = [count * i // threads for i in range(threads + 1)]
    list(kernel_threads(threads).map(run, edges[:-1], edges[1:]))


def pointer_to(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """Return a pointer to the values of ``tensor``, which must outlive it; a null pointer for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


# the threads are not in a forked child
os.register_at_fork(after_in_child=kernel_threads.cache_clear)
