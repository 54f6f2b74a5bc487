"""The first token of a long prompt whose beginning is kept in files or host memory, beside one that is computed.

Each turn has new engines, as after a new start; files are read from the system's page cache, as a disk's speed is a
matter of the machine. Each kind is measured in turn. The token is the same, which is checked, and so is the number of
prompt tokens that were found. float32, one thread for products, two that read files.

    OMP_NUM_THREADS=1 python bench/kept_blocks.py --model FOLDER [--json bench/results/kept_blocks.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from weft.checkpoint.model import open_model
from weft.generate.block_contents import bytes_of
from weft.generate.block_files import BlockFiles
from weft.generate.block_source import BlockSource, HostBlocks
from weft.generate.engine import Engine
from weft.generate.outside_cache import OutsideCache
from weft.generate.sampling import GREEDY
from weft.models.products import read_only
from weft.models.transformer import Transformer


def first_token(
    model: Transformer, ids: list[int], source: BlockSource | None
) -> tuple[float, int, int]:
    """Seconds to the first token in a new engine, the token, and how many tokens of the prompt were found."""
    engine = Engine(model)
    engine.block_form()
    if source is not None:
        OutsideCache(engine, source, "bench", seconds=600)
    begun = time.perf_counter()
    (request,) = engine.submit(ids, 1, GREEDY)
    engine.run()
    seconds = time.perf_counter() - begun
    if source is not None:
        engine.close()
    return seconds, request.written[0], request.hits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, *_ = open_model(given.model, "cpu", print)
    read_only(model)
    ids = [(7 * i + i * i) % 40_000 for i in range(given.tokens)]
    engine = Engine(model)
    block, size = bytes_of(engine.block_form(), engine.reader.size), engine.reader.size
    memory = HostBlocks(1 << 40)
    with tempfile.TemporaryDirectory() as folder:

        def files() -> BlockFiles:
            return BlockFiles(Path(folder), "bench", 1 << 40, print)

        expected = first_token(model, ids, files())[1]
        # an engine's close empties its memory, so this one stays open
        kept = Engine(model)
        cache = OutsideCache(kept, memory, "bench")
        kept.submit(ids, 1, GREEDY)
        kept.run()
        cache.settle()
        times: dict[str, list[float]] = {"computed": [], "files": [], "memory": []}
        for _ in range(given.turns):
            for name in times:
                source = {"computed": None, "files": files(), "memory": None}[name]
                if name == "memory":
                    source = HostBlocks(1 << 40)
                    source._blocks.update(memory._blocks)
                seconds, token, hits = first_token(model, ids, source)
                assert token == expected
                assert hits == (
                    0 if name == "computed" else (given.tokens - 1) // size * size
                )
                times[name].append(seconds)
    row = {
        "tokens": given.tokens,
        "bytes": (given.tokens - 1) // size * block,
        "load": os.getloadavg()[0],
        **{f"{name}_s": statistics.median(each) for name, each in times.items()},
        "all_s": times,
    }
    print(json.dumps(row, indent=1))
    if given.json:
        given.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
