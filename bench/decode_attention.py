"""Decode attention by every backend of a machine, interleaved: gathered (on a copy), fixed, native, paged.

Each text writes one token behind a number of keys that lie in scattered cache blocks, with the heads of SmolLM2-135M (9
query heads, 3 key heads of 64 elements). The fixed maximum is 0. On a GPU also with the heads of Llama 3.2 1B in
bfloat16. Then the backend that chooses by measured times is asked what it takes for each shape.

    OMP_NUM_THREADS=1 python bench/decode_attention.py [--quick] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from weft.models.attention_backend import (
    BACKENDS,
    FIXED,
    GATHERED,
    AttentionBackend,
    BackendPiece,
    MeasuredPiece,
)
from weft.models.backend_choice import choose_backend
from weft.models.measured_attention import TimeTable, measured_backend
from weft.models.spans import Span

T = torch.Tensor

#: Tokens of a cache block.
SIZE = 16
#: Query heads, key heads, elements of a head, and type.
HEADS = {
    "SmolLM2-135M": (9, 3, 64, torch.float32),
    "Llama-3.2-1B": (32, 8, 64, torch.bfloat16),
}


def spans_of(texts: int, keys: int) -> tuple[list[Span], int]:
    """Texts whose blocks lie among each other, and the number of blocks."""
    blocks = -(-keys // SIZE)
    order = torch.randperm(texts * blocks, generator=torch.Generator().manual_seed(0))
    tables = order.view(texts, blocks).tolist()
    return [
        Span(i, i + 1, keys - 1, table) for i, table in enumerate(tables)
    ], texts * blocks


def measure(
    backends: list[AttentionBackend], heads: tuple[int, int, int, torch.dtype], texts: int, keys: int,
    device: torch.device, turns: int,
) -> dict[str, Any]:  # fmt: skip
    count, kv_heads, width, dtype = heads
    spans, blocks = spans_of(texts, keys)
    drawn = torch.Generator(device).manual_seed(1)
    store = torch.randn(
        2, blocks, SIZE, kv_heads, width, generator=drawn, device=device
    ).to(dtype)
    q = torch.randn(texts, count, width, generator=drawn, device=device).to(dtype)
    able = [each for each in backends if each.takes(q, store, width)]
    pieces = {each.name: each.group(spans, store, 0, q) for each in able}
    outs = {each.name: torch.empty_like(q) for each in able}
    times: dict[str, list[float]] = {each.name: [] for each in able}
    for turn in range(turns + 1):
        for each in able:
            seconds = timed(each, q, store, pieces[each.name], outs[each.name])
            if turn:
                times[each.name].append(seconds)
    expected = outs[GATHERED.name].double()
    line: dict[str, Any] = {"texts": texts, "keys": keys}
    for each in able:
        error = float((outs[each.name].double() - expected).norm() / expected.norm())
        assert error < (3e-2 if dtype == torch.bfloat16 else 1e-5), (each.name, error)
        line[each.name] = {"us": round(statistics.median(times[each.name]) * 1e6, 1)}
    for name, about in line.items():
        if isinstance(about, dict):
            about["over_gathered"] = round(line[GATHERED.name]["us"] / about["us"], 2)
            assert name in BACKENDS
    with tempfile.TemporaryDirectory() as folder:
        usual = choose_backend("", device)
        chooser = measured_backend(
            [*dict.fromkeys((usual, GATHERED, FIXED))],
            TimeTable.at(Path(folder), device),
        )
        (piece,) = chooser.group(spans, store, 0, q)
        assert isinstance(piece, MeasuredPiece)
        line["chosen"] = piece.backend.name
    return line


def timed(
    backend: AttentionBackend, q: T, store: T, pieces: list[BackendPiece] | Any, out: T
) -> float:
    """Seconds of a call, of several on a GPU."""
    calls = 20 if q.is_cuda else 1
    if q.is_cuda:
        torch.cuda.synchronize()
    begun = perf_counter()
    for _ in range(calls):
        for piece in pieces:
            backend.attend(q, store, piece, 0, out)
    if q.is_cuda:
        torch.cuda.synchronize()
    return (perf_counter() - begun) / calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.set_num_threads(1)
    backends = [
        GATHERED,
        FIXED,
        BACKENDS["native" if device.type == "cpu" else "paged"],
    ]
    shapes = [
        (texts, keys)
        for texts in (1, 4, 16, 64)
        for keys in (256, 1024, 4096, 8192)
        if texts * keys <= 2**17
    ]
    shapes = [(1, 256), (4, 1024)] if given.quick else shapes
    models: dict[str, Any] = {}
    for name, heads in HEADS.items():
        if heads[3] == torch.bfloat16 and device.type == "cpu":
            continue
        lines = models[name] = []
        for texts, keys in shapes:
            line = measure(
                backends, heads, texts, keys, device, 3 if given.quick else 15
            )
            lines.append(line)
            about = "  ".join(
                f"{key} {value['us']:9.1f} us ({value['over_gathered']:.2f}x)"
                for key, value in line.items()
                if isinstance(value, dict)
            )
            print(
                f"{name} {texts:3} texts {keys:6,} keys  {about}  measured: {line['chosen']}",
                flush=True,
            )
    if given.json:  # other devices' figures stay
        called = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        every = json.loads(given.json.read_text()) if given.json.is_file() else {}
        given.json.write_text(json.dumps(every | {called: models}, indent=1) + "\n")


if __name__ == "__main__":
    main()
