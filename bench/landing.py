"""How long texts that an engine writes wait for a prompt that moves in: written at once, and written as it comes.

A prompt of 2,000 tokens, read by another engine in chunks of 512, comes layer by layer. What counts is the processor's
time of the receiving engine's own thread, in which it takes no step: its longest piece between two steps, and all
pieces together. What the thread that reads the connection does meanwhile is in neither. Models with random weights:
the tiny one of the emulated services, and one with as many bytes of keys and values as SmolLM2-135M.

    OMP_NUM_THREADS=1 python bench/landing.py [--turns 3] [--json bench/results/landing.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any, NamedTuple

import torch
from service_faults import SHAPE
from step import machine, write

from weft.generate.engine import Engine
from weft.generate.migration import Arrival, Departure, MoveFrame
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

TOKENS, CHUNK, WRITTEN = 2000, 512, 8
PROMPT = [7 * i % 97 for i in range(TOKENS)]
SHAPES = {
    "tiny": SHAPE,
    "keys of SmolLM2-135M": ModelShape(
        vocab=257, layers=30, embed=64, heads=9, kv_heads=3, head_dim=64, ffn=48, init_std=0.5
    ),
}  # fmt: skip


class Waits(NamedTuple):
    """Milliseconds of the engine's thread: the longest piece between two steps, and all pieces."""

    longest: float
    all: float


def received(frame: MoveFrame) -> MoveFrame:
    """A frame as it comes from the wire."""
    payload = memoryview(bytearray(b"".join(frame.payload)))
    return MoveFrame(json.loads(json.dumps(frame.head)), [payload])


def land(model: Transformer, beside: bool, expected: list[int]) -> Waits:
    """Move a prompt from one engine to another. ``beside``: written as it comes, outside the engine's thread;
    ``expected``: the text that the prompt gets.
    """
    source, target = (Engine(model, 8192, CHUNK) for _ in range(2))
    target.submit([1, 2], 2, GREEDY)
    target.run()
    (text,) = source.submit(PROMPT, WRITTEN, GREEDY)
    waiting, frames = list[Callable[[], None]](), list[MoveFrame]()
    departure = Departure(source, text)
    arrival = Arrival(target, None, waiting.append if beside else None)
    departure.stream(lambda frame: frames.append(received(frame)))
    pieces = list[float]()

    def timed(action: Callable[[], Any]) -> Any:
        begun = thread_time()
        result = action()
        pieces.append(1000 * (thread_time() - begun))
        return result

    while not text.written:
        source.step()
        while frames:
            arrival.keep(frames.pop(0))
            while waiting:
                timed(waiting.pop(0))
    last = received(departure.leave())
    arrival.unload()
    moved = timed(partial(arrival.take, last))
    target.run()
    assert moved is not None and moved.written == expected
    return Waits(max(pieces), sum(pieces))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": machine(), "tokens": TOKENS}
    for name, shape in SHAPES.items():
        model = parallelize(shape, Mesh.single(), Train(seed=2))[0]
        alone = Engine(model, budget=CHUNK)
        (text,) = alone.submit(PROMPT, WRITTEN, GREEDY)
        alone.run()
        rows: dict[str, Any] = {}
        for way, beside in (("at once", False), ("as it comes", True)):
            turns = [land(model, beside, text.written) for _ in range(given.turns)]
            longest, every = zip(*turns, strict=True)
            rows[way] = {
                "longest_ms": statistics.median(longest),
                "all_ms": statistics.median(every),
            }
        ratio = rows["at once"]["longest_ms"] / rows["as it comes"]["longest_ms"]
        result[name] = rows | {"at once / as it comes": ratio}
        print(json.dumps({name: result[name]}, indent=1), flush=True)
    if given.json:
        write(result, given.json)


if __name__ == "__main__":
    main()
