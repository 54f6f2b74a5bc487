"""Measures times of transfers between memory and a file, and between host and device, by their size.

Transfers are made as in a training step: direct I/O in two threads, page-aligned buffers, one transfer after the other.
"""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.memory.tier_file import PIECE, TierFile, Transfer, page_buffer
from weft.rehearse.curves import curve

Points = list[list[float]]

#: Bytes of one transfer.
SIZES = (1 << 20, 4 << 20, 16 << 20)
#: Turns, of which the quickest counts: others use the disk, too.
TURNS = 2


def disk_curves(
    folder: Path, room: int = 128 << 20, called: str = "memory.folder"
) -> dict[str, Any]:
    """Measure writing and reading with a file of ``room`` bytes in ``folder``, which is removed afterwards.

    Returns rows ``[bytes, seconds]`` of transfers under ``write`` and ``read``, and a ``note`` about the file.
    ``called``: the setting or option that names the folder, for error messages. Raises
    :class:`weft.memory.nameless_file.TierError` if no such file can be created.
    """
    file, buffers = (
        TierFile(folder, called=called),
        [page_buffer(SIZES[-1]).random_() for _ in range(2)],
    )
    region, curves = file.region(room), dict[str, Any]()
    # the first time a file system also marks what it has written
    _seconds(region.write, buffers, room, SIZES[-1])
    for name, move in (("write", region.write), ("read", region.read)):
        region.forget_sums()  # of other pieces than are read
        turns = [
            [_seconds(move, buffers, room, size) for size in SIZES]
            for _ in range(TURNS)
        ]
        curves[name] = [
            [float(size), min(seen)]
            for size, seen in zip(SIZES, zip(*turns, strict=True), strict=True)
        ]
    return curves | {"note": file.note}


def _seconds(
    move: Callable[[torch.Tensor, int], Transfer],
    buffers: list[torch.Tensor],
    room: int,
    size: int,
) -> float:
    """Return the seconds per transfer of ``size`` bytes, of ``room`` bytes in all; two transfers are under way at a
    time.
    """
    begun, flying = time.perf_counter(), deque[Transfer]()
    for i, start in enumerate(range(0, room, size)):
        if len(flying) == len(buffers):
            flying.popleft().wait()
        flying.append(move(buffers[i % len(buffers)][:size], start))
    for transfer in flying:
        transfer.wait()
    return (time.perf_counter() - begun) / -(-room // size)


def link_curves() -> dict[str, Points]:
    """Measure copies of pinned memory between host and GPU.

    Returns rows ``[bytes, seconds]`` under ``to_device`` and ``to_host``; empty without a GPU.
    """
    if not torch.cuda.is_available():
        return {}
    curves: dict[str, Points] = {}
    for size in SIZES:
        here, there = (
            page_buffer(size, pinned=True),
            torch.empty(size, dtype=torch.uint8, device="cuda"),
        )
        for name, into, of in (("to_device", there, here), ("to_host", here, there)):
            curves.setdefault(name, []).append(
                [float(size), min(_copy_seconds(into, of) for _ in range(1 + TURNS))]
            )
    return curves


def _copy_seconds(into: torch.Tensor, of: torch.Tensor, count: int = 20) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        into.copy_(of, non_blocking=True)
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count


def bytes_per_s(points: Points, size: int = PIECE) -> float:
    """Return the bytes per second of transfers of ``size`` bytes.

    ``points``: measured rows ``[bytes, seconds]``.
    """
    return size / curve(points, size)
