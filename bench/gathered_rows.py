"""Scattered rows of a table in a file, by ``Rows`` and by indexing a mapped file: seconds, and bytes off the disk.

The mapped file begins cold in every turn: what the page cache has of it is dropped first, and the map is a new one.
``read`` is what the kernel counts as read for this process, read-ahead included. All sides must give the same rows.

    python bench/gathered_rows.py [--rounds 7] [--folder DIR] [--mib 512] [--json bench/results/gathered_rows.json]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step import machine

from examples.gnnpipe.rows import Rows
from weft.memory.tier_file import PAGE, TierFile

T = torch.Tensor

RESULTS = Path(__file__).parent / "results" / "gathered_rows.json"

#: Rows of one gather.
ASKED = 4096


def disk_bytes() -> int:
    """What the disk has read for this process so far."""
    return int(
        dict(
            line.split(": ") for line in Path("/proc/self/io").read_text().splitlines()
        )["read_bytes"]
    )


def patterns(rows: int) -> dict[str, T]:
    """Which rows are asked for: anywhere; as by words or well-known nodes, few of them often; within neighbourhoods."""
    rng = torch.Generator().manual_seed(0)
    anywhere = torch.randint(rows, (ASKED,), generator=rng)
    order = torch.randperm(rows, generator=rng)
    often = order[
        (rows ** torch.rand(ASKED, generator=rng, dtype=torch.float64))
        .long()
        .clamp(max=rows - 1)
    ]
    near = (
        torch.randint(rows, (ASKED // 64, 1), generator=rng)
        + torch.randint(512, (ASKED // 64, 64), generator=rng)
    ) % rows
    return {"anywhere": anywhere, "often": often, "near": near.flatten()}


def mapped(
    path: Path, shape: tuple[int, int], advice: int, by_rows: bool = False
) -> Callable[[T], T]:
    """Indexing a new map of the file; ``by_rows``: of the rows once each, in their order."""

    def gather(index: T) -> T:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            memory.madvise(advice)
            table = np.frombuffer(memory, np.float32).reshape(shape)
            if by_rows:
                numbers, places = np.unique(index.numpy(), return_inverse=True)
                return torch.from_numpy(table[numbers][places])
            return torch.from_numpy(table[index.numpy()])

    return gather


def torch_mapped(path: Path, shape: tuple[int, int]) -> Callable[[T], T]:
    return lambda index: torch.from_file(
        str(path), size=shape[0] * shape[1], dtype=torch.float32
    ).view(shape)[index]


def compared(folder: Path, width: int, mib: int, rounds: int) -> dict[str, Any]:
    shape = ((mib << 20) // width, width // 4)
    path = folder / "table"
    table = torch.from_numpy(np.memmap(path, np.float32, "w+", shape=shape))
    table.uniform_()
    rows = Rows(table, TierFile(folder))
    del table
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    sides: dict[str, Callable[[T], T]] = {
        "weft": rows.__getitem__,
        "np.memmap": mapped(path, shape, mmap.MADV_NORMAL),
        "np.memmap, unique and sorted": mapped(
            path, shape, mmap.MADV_NORMAL, by_rows=True
        ),
        "np.memmap, sorted, MADV_RANDOM": mapped(
            path, shape, mmap.MADV_RANDOM, by_rows=True
        ),
        "torch.from_file": torch_mapped(path, shape),
    }
    found: dict[str, Any] = {}
    for name, index in patterns(shape[0]).items():
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        read: dict[str, list[int]] = {side: [] for side in sides}
        before = dict(rows.bytes)
        for _ in range(rounds):
            wanted = None
            for side, gather in sides.items():
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                bytes_before, begun = disk_bytes(), time.perf_counter()
                got = gather(index)
                seconds[side].append(time.perf_counter() - begun)
                read[side].append(disk_bytes() - bytes_before)
                wanted = got if wanted is None else wanted
                assert torch.equal(got, wanted), side
        ours = {
            kind: (value - before.get(kind, 0)) // rounds
            for kind, value in rows.bytes.items()
        }
        found[name] = {
            "asked": ours["asked"],
            "touched": ours["touched"],
            "read_by_count": ours["read"],
            "sides": {},
        }
        for side in sides:
            ratios = [
                a / b for a, b in zip(seconds[side], seconds["weft"], strict=True)
            ]
            found[name]["sides"][side] = {
                "seconds": statistics.median(seconds[side]), "ratio": statistics.median(ratios),
                "quartiles": statistics.quantiles(ratios, n=4)[::2] if rounds > 1 else ratios * 2,
                "read": statistics.median(read[side]),
            }  # fmt: skip
    os.close(descriptor)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=512, help="size of each table")
    parser.add_argument(
        "--folder", type=Path, help="where the files are; a temporary folder by default"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": machine(), "mib": given.mib}
    for width in (512, 2 * PAGE):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            found[f"rows of {width} bytes"] = rows = compared(
                Path(folder), width, given.mib, given.rounds
            )
        for name, row in rows.items():
            print(f"{ASKED} rows of {width} bytes, {name}: {row['asked']:,} bytes asked for on pages of "
                  f"{row['touched']:,}, {row['read_by_count']:,} read")  # fmt: skip
            for side, figures in row["sides"].items():
                low, high = figures["quartiles"]
                print(f"  {side:32s}{figures['seconds']:8.3f} s {figures['ratio']:6.2f} of ours "
                      f"({low:.2f} to {high:.2f}) {figures['read']:>13,.0f} bytes off the disk")  # fmt: skip
    given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
