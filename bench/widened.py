"""LoRA in bfloat16 beside float32 on a CPU without bfloat16: tokens per second, and the bytes of weights.

The model has the widths of Qwen2.5-1.5B and some of its 28 layers. Each type runs in a process of its own, which is
told to leave out what a CPU with AVX2 alone lacks; they take turns and count processor time, so that other programs on
the machine change little. ``products`` are those of one feed-forward, one by one, computed as PyTorch would and as
Weft does.

    OMP_NUM_THREADS=1 python bench/widened.py [--layers 2] [--rounds 3] [--json bench/results/widened.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step import Job, machine, tokens_of

from weft.data.batch import Batch
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.memory.heap import keep_heap
from weft.models.widened import multiplies_slowly, multiply
from weft.recipe import Adapter, ModelShape, Recipe, Train
from weft.run.rank_processes import init_ranks
from weft.train.setup import build_for_training
from weft.train.step import train_step

#: What a CPU with AVX2 and no more has.
MASKS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
WIDTHS = {
    "vocab": 151_936,
    "embed": 1536,
    "heads": 12,
    "kv_heads": 2,
    "ffn": 8960,
    "tied": True,
    "qkv_bias": True,
}
DTYPES = ("float32", "bfloat16")
RESULTS = Path(__file__).parent / "results" / "widened.json"


def seconds_of(call: Callable[[], Any]) -> float:
    """Processor seconds of all threads of this process."""
    begun = time.process_time()
    call()
    return time.process_time() - begun


def products(tokens: int) -> dict[str, float]:
    """Processor seconds of products with a feed-forward's weight, as PyTorch computes bfloat16 and as Weft does."""
    embed, ffn = WIDTHS["embed"], WIDTHS["ffn"]
    weight, x, g = (
        torch.randn(ffn, embed),
        torch.randn(tokens, embed),
        torch.randn(tokens, ffn),
    )
    w16, x16, g16 = weight.bfloat16(), x.bfloat16(), g.bfloat16()
    calls: dict[str, Callable[[], Any]] = {
        "forward float32": lambda: x @ weight.t(),
        "forward PyTorch": lambda: x16 @ w16.t(),
        "forward Weft": lambda: multiply(x16, w16.t()),
        "backward float32": lambda: g @ weight,
        "backward PyTorch": lambda: g16 @ w16,
        "backward Weft": lambda: multiply(g16, w16),
    }
    return {
        name: round(min(seconds_of(call) for _ in range(2)), 4)
        for name, call in calls.items()
    }


def child(dtype: str, layers: int, rows: int, length: int) -> None:
    """Takes a step for each line that comes in, and says what it took."""
    keep_heap()
    shape = ModelShape(**WIDTHS, layers=layers, adapter=Adapter(rank=16))
    recipe = Recipe(train=Train(dtype=dtype, batch=rows), adapter=Adapter(rank=16))
    init_ranks("cpu", 600)
    mesh = Mesh.create(Layout(), "cpu")
    model, state = build_for_training(shape, mesh, recipe)
    ids = tokens_of(Job(shape, rows, length))
    positions = torch.arange(length).repeat(rows, 1)
    cu_seqlens = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    batch = Batch(
        ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, cu_seqlens
    )
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    about = {"weights": frozen, "widened": multiplies_slowly(getattr(torch, dtype))}
    print(
        json.dumps(
            about | {"products": products(rows * length) if dtype == "bfloat16" else {}}
        ),
        flush=True,
    )
    for _ in sys.stdin:
        begun = time.process_time()
        loss = train_step(model, state, [batch], mesh, lr=1e-3, clip=1.0).loss
        print(
            json.dumps({"loss": loss, "seconds": time.process_time() - begun}),
            flush=True,
        )


class Side:
    """A process that trains in one type."""

    def __init__(self, dtype: str, *words: object) -> None:
        command = [sys.executable, __file__, "--child", dtype, *map(str, words)]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **MASKS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about = self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def step(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--child", choices=DTYPES, help=argparse.SUPPRESS)
    parser.add_argument("sizes", type=int, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, *options.sizes)
        return
    about = machine()
    sides = {
        dtype: Side(dtype, options.layers, options.rows, options.length)
        for dtype in DTYPES
    }
    taken: dict[str, list[dict[str, Any]]] = {dtype: [] for dtype in DTYPES}
    for _ in range(options.rounds + 1):
        for dtype, side in sides.items():
            taken[dtype].append(side.step())
    for side in sides.values():
        side.close()
    seconds = {
        dtype: statistics.median(step["seconds"] for step in steps[1:])
        for dtype, steps in taken.items()
    }
    tokens = options.rows * options.length
    results = {
        "machine": about | {"masks": MASKS},
        "model": WIDTHS
        | {"layers": options.layers, "adapter rank": 16, "tokens": tokens},
        "products": sides["bfloat16"].about["products"],
        "lora": {
            dtype: {
                "tokens per processor second": round(tokens / seconds[dtype], 1),
                "bytes of frozen weights": sides[dtype].about["weights"],
                "products in float32": sides[dtype].about["widened"]
                or dtype == "float32",
                "losses": [round(step["loss"], 4) for step in taken[dtype]],
            }
            for dtype in DTYPES
        },
        "bfloat16 over float32": round(seconds["float32"] / seconds["bfloat16"], 3),
    }
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
