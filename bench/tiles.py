"""Weights in tiles: memory, bytes and time of steps with one very wide feed-forward, by the number of tiles.

The weights of one block's feed-forward are most of the model, and everything rests in files. Every number of tiles
trains in a process of its own: its losses, the memory in use at the peak of its steps (heap and buffers) over that of a
model without such weights (a feed-forward of width 16), the bytes that it reads and writes, beside the formula, and the
seconds of a step. ``together`` counts the tiles (of weights, gradients and moments) that were in buffers at a time,
by every buffer taken and given back. The peak also has the activations of the wide layer (``activations``: six tensors
``[tokens, width]``) and a tile's gradient before it is in its buffer. Runs with ``memory.read_ahead = false`` are named
``N, one at a time``.

    python bench/tiles.py [--quick] [--folder .] [--json bench/results/tiles.json]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing as mp
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from weft.layout.mesh import Mesh
from weft.memory.tier_file import BufferPool
from weft.parallel.tiles import TiledWeight
from weft.recipe import build_recipe
from weft.train.build_step import build_step
from weft.train.setup import build_for_training, prepare
from weft.train.step import StepContext

STEPS = 4


#: Fields of ``mallinfo2``, in order.
NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")
NAMES += ("uordblks", "fordblks", "keepcost")


class HeapInfo(ctypes.Structure):
    """What glibc says of the heap (``mallinfo2``), in bytes."""

    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


LIBC = ctypes.CDLL(None)
LIBC.mallinfo2.restype = HeapInfo


def allocated() -> int:
    """Bytes that are allocated from the heap; what was freed and stays with the process does not count."""
    info = LIBC.mallinfo2()
    return int(info.uordblks + info.hblkhd)


class BufferCount:
    """Counts the buffers of ``size`` bytes of ``pool`` that are in use. ``most``: the most at a time."""

    def __init__(self, pool: BufferPool) -> None:
        self.size = self.most = self.now = 0
        self.take, self.give = pool.take, pool.give
        pool.take, pool.give = self._taken, self._given  # type: ignore[method-assign]

    def _taken(self, size: int) -> torch.Tensor:
        buffer = self.take(size)
        self.now += buffer.numel() == self.size
        self.most = max(self.most, self.now)
        return buffer

    def _given(self, buffer: torch.Tensor) -> None:
        self.now -= buffer.numel() == self.size
        self.give(buffer)


class Watch(threading.Thread):
    """Looks at the memory in use every millisecond: the heap, and the buffers of ``pool``. ``most``: the peak."""

    def __init__(self, pool: BufferPool) -> None:
        super().__init__(daemon=True)
        self.pool, self.most, self.ended = pool, 0, False

    def run(self) -> None:
        while not self.ended:
            self.most = max(self.most, allocated() + self.pool.bytes)
            time.sleep(0.001)


def trained(given: dict[str, Any], tiles: int, ahead: bool, results: Any) -> None:
    torch.set_num_threads(1)
    recipe = build_recipe({
        "model": {"layers": 1, "embed": given["embed"], "ffn": given["ffn"], "heads": 8, "vocab": 257, "tied": False},
        "data": {"sources": [{"kind": "stdlib"}], "tokenizer": "bytes", "seq_len": 16},
        "train": {"batch": 1, "micro_batch": 1, "threads": 1, "device": "cpu", "dtype": "float32"},
        "optimizer": {"warmup": 0},
        "memory": {"weights": "file", "folder": given["folder"], "tiles": tiles, "read_ahead": ahead},
    })  # fmt: skip
    job, mesh = prepare(recipe), Mesh.single()
    model, state = build_for_training(job.shape, mesh, recipe)
    stepper = build_step(StepContext(model, state, mesh), recipe)
    loader, watch = job.loader(job.corpus.train, mesh), Watch(state.tiers.pool)
    losses, seconds, before = list[float](), list[float](), dict[str, int]()
    count = BufferCount(state.tiers.pool)
    tiled = [u for u in state.units if isinstance(u, TiledWeight)]
    groups = state.tiers.groups
    sizes = [groups[t]["weights"].region.size for u in tiled for t in u.tiles]
    count.size = max(sizes, default=0)
    for step in range(STEPS):
        batches = loader.step(step) or []
        if step == 1:  # the first has made the buffers' and kernels' memory
            watch.start()
        before, begun = state.tiers.bytes, time.perf_counter()
        losses += [result.loss for result in stepper.take(batches, 1e-4)]
        seconds.append(time.perf_counter() - begun)
    watch.ended = True
    whole = [u for u in state.units if not isinstance(u, TiledWeight)]
    each = [{kind: g.region.size for kind, g in groups[u].items()} for u in whole]
    formula = {
        "read": 5 * sum(sizes) + sum(sum(e.values()) + (i < len(each) - 2) * e["weights"] for i, e in enumerate(each)),
        "written": 4 * sum(sizes) + sum(sum(e.values()) for e in each),
    }  # fmt: skip
    results.put({
        "losses": losses, "peak": watch.most, "buffers": state.tiers.pool.most,
        "tile": count.size, "together": count.most, "weights": max((u.held[0].local.nbytes for u in tiled), default=0),
        "bytes": {way: n - before[way] for way, n in state.tiers.bytes.items()}, "formula": formula,
        "seconds": statistics.median(seconds[1:]),
    })  # fmt: skip


def apart(given: dict[str, Any], tiles: int, ahead: bool = True) -> dict[str, Any]:
    context = mp.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=trained, args=(given, tiles, ahead, results))
    process.start()
    result: dict[str, Any] = results.get(timeout=600)
    process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        embed, ffn = (256, 8192) if asked.quick else (512, 16384)
        given = {"embed": embed, "ffn": ffn, "folder": folder}
        without = apart(given | {"ffn": 16}, 1)
        counts = (1, 4) if asked.quick else (1, 4, 16)
        rows = {f"{n}": apart(given, n) for n in counts}
        rows |= {f"{n}, one at a time": apart(given, n, False) for n in counts}
    base = rows["1"]["losses"]
    weight = 4 * embed * ffn
    for name, row in rows.items():
        tiles = int(name.partition(",")[0])
        row["over without"] = row["peak"] - without["peak"]
        row["over without in weights"] = round(row["over without"] / weight, 2)
        row["over without in tiles"] = round(row["over without"] * tiles / weight, 1)
        row["loss apart"] = max(
            abs(a - b) for a, b in zip(base, row["losses"], strict=True)
        )
        row["time"] = round(row["seconds"] / rows["1"]["seconds"], 2)
        row["activations"] = 6 * 16 * 4 * ffn
        print(
            f"{name} tiles: {row['together']} together, "
            f"peak over a model without such weights {row['over without'] / 2**20:7.0f} MiB = "
            f"{row['over without in weights']:.2f} weights = {row['over without in tiles']:.1f} tiles, buffers "
            f"{row['buffers'] / 2**20:.0f} MiB, {row['time']:.2f} of the time, bytes {row['bytes']} of "
            f"{row['formula']}, losses apart by {row['loss apart']:.1e}"
        )
    result = {
        "embed": embed,
        "ffn": ffn,
        "weight MiB": weight >> 20,
        "without": without,
        "tiles": rows,
    }
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
