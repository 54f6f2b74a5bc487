"""Old keys in files beside resident keys: seconds per token, memory of all processes, and bytes against the formula.

SmolLM2-135M (or, where it is not in /tmp/inside-smollm2, random weights of its shape) in float32 reads a text and
writes behind it, in turns: with all keys in its cache; with old keys in a file through the page cache; with half of the
file's extents past it; and with all past it (direct I/O). The shortest text is read in all ways; longer ones are read
with all keys in the cache, whose blocks the other processes then get, since a text is read in minutes, and written
behind in milliseconds. Every process has one thread. The memory that counts is each
process's own (anonymous); pages of files, which the system takes back when it needs them, do not.

    python bench/keys_at_rest.py [--quick] [--folder /tmp] [--json bench/results/keys_at_rest.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch

from weft.checkpoint.model import open_model
from weft.generate.engine import Engine
from weft.generate.keys_at_rest import KeysAtRest, RestingKeys, rest_keys
from weft.generate.request import Generation, Request
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.models.products import read_only
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

MODEL = Path("/tmp/inside-smollm2")
#: Its shape, and a small one that is quick.
SHAPE = ModelShape(vocab=49152, layers=30, embed=576, heads=9, kv_heads=3, ffn=1536)
QUICK = ModelShape(
    vocab=512, layers=4, embed=192, heads=6, kv_heads=2, head_dim=64, ffn=256
)
#: Tokens that are written in a turn, and turns.
NEW, TURNS = 8, 5
#: Modes and their share of extents that are read through the page cache; None: no files.
MODES = {"resident": None, "page cache": 1.0, "half direct": 0.5, "direct": 0.0}


def model_of(quick: bool) -> tuple[Transformer, str]:
    if not quick and MODEL.is_dir():
        model, _, _ = open_model(str(MODEL), "cpu", lambda line: None)
        name = "SmolLM2-135M"
    else:
        model = parallelize(QUICK if quick else SHAPE, Mesh.single(), Train())[0]
        name = "random weights"
    read_only(model)
    return model, name


def memory_of(pid: int) -> int:
    """Anonymous bytes of a process."""
    about = psutil.Process(pid).memory_info()
    return about.rss - about.shared


class Writer:
    """An engine that reads texts and writes behind them."""

    def __init__(self, mode: str, folder: Path, longest: int, quick: bool) -> None:
        model, self.name = model_of(quick)
        share, self.rest = MODES[mode], None
        self.engine = Engine(model, None if share is not None else longest + 600)
        if share is not None:
            self.rest = self._resting(share, folder, longest + 2 * TURNS * NEW + 8)
        self.text: Generation | None = None

    def _resting(self, share: float, folder: Path, longest: int) -> KeysAtRest:
        block = sum(part.nbytes(16) for part in self.engine.block_form())
        size = longest / 16 * block / 1e9
        words = RestingKeys(
            (folder,), cached=share * size + 0.01 * (share == 1.0) + 1e-6
        )
        return rest_keys(self.engine, words, 1, longest, print)

    def read(self, tokens: int, blocks: Path | None) -> dict[str, Any]:
        """Begin a text of ``tokens`` tokens. ``blocks``: file of its blocks, which the resident mode writes, and others
        fill their files from; None: all tokens are computed.
        """
        if self.text is not None:
            self.engine.cancel(self.text)
            self.engine.settle()  # its keys leave the files, which have room for one text
        vocab = self.engine.model.shape.vocab
        ids = [(7919 * i + i * i) % (vocab - 64) + 32 for i in range(tokens)]
        begun = perf_counter()
        (self.text,) = self.engine.submit(ids, TURNS * NEW + 8, GREEDY)
        if blocks and self.rest:
            self._fill(self.text, torch.from_numpy(np.load(blocks, mmap_mode="c")))
        while len(self.text.written) < 4:
            self.engine.step()
        if blocks and not self.rest:
            size = self.engine.scheduler.pool.size
            table = self.text.table[: (tokens - 1) // size]
            np.save(blocks, self.engine.reader.read_blocks(table, size).numpy())
        stores = [pages.store for pages in self.engine.reader.pages]
        used = len(self.engine.scheduler.pool.owners) * sum(
            s[:, 0].nbytes for s in stores if s is not None
        )
        owners = (
            [memory_of(owner.pid or 0) for owner in self.rest.owners]
            if self.rest
            else []
        )
        return {
            "read_s": perf_counter() - begun,
            "cache_used": used,
            "engine_own": memory_of(os.getpid()),
            "owners_own": owners,
        }

    def _fill(self, text: Generation, rows: torch.Tensor) -> None:
        """Give a text its blocks, ``[blocks, bytes]``, a run of the file at a time, as if it had computed them."""
        assert self.rest is not None
        scheduler, reader = self.engine.scheduler, self.engine.reader
        pool, place = scheduler.pool, Request([], 0)
        scheduler.remove(text)
        scheduler.arriving.append(place)
        for some in rows.split(self.rest.layout.blocks):
            if text.runs:
                table = [pool.take() for _ in some]
                reader.write_blocks(table, pool.size, some)
                text.table += table
                text.computed += len(some) * pool.size
            else:
                assert scheduler.expect(place, len(some))
                reader.write_blocks(place.table, pool.size, some)
                text.computed = len(some) * pool.size
                assert scheduler.adopt(place, text)
            scheduler._remember(text)
            self.rest.settle()

    def write(self) -> dict[str, Any]:
        assert self.text is not None
        before, counts = len(self.text.written), self._counts()
        begun = perf_counter()
        while len(self.text.written) < before + NEW:
            self.engine.step()
        seconds = perf_counter() - begun
        after = self._counts()
        return {
            "token_s": seconds / NEW,
            "written": self.text.written,
            "read_bytes": after.get("read", 0) - counts.get("read", 0),
            "calls": after.get("calls", 0) - counts.get("calls", 0),
            "cached_bytes": after.get("cached", 0) - counts.get("cached", 0),
        }

    def _counts(self) -> dict[str, int]:
        return self.rest.owners[0].counts() if self.rest else {}

    def formula(self) -> dict[str, int]:
        """Bytes of keys in files that a token must read by the formula, which are those of whole runs."""
        assert self.text is not None
        if self.rest is None:
            return {}
        layout = self.rest.layout
        away = sum(block < 0 for block in self.text.table)
        return {"bytes": away * layout.block_bytes, "tokens": away * layout.size}


def work(mode: str, folder: Path, longest: int, quick: bool) -> None:
    torch.set_num_threads(1)
    writer = Writer(mode, folder, longest, quick)
    print(json.dumps({"name": writer.name}), flush=True)
    for line in sys.stdin:
        word, *given = line.split()
        file = Path(given[1]) if len(given) > 1 else None
        answer = writer.read(int(given[0]), file) if word == "read" else writer.write()
        print(json.dumps(answer | {"formula": writer.formula()}), flush=True)
    writer.engine.close()


class Worker:
    """A process with a :class:`Writer`."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, __file__, "--worker", *words]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.name = self._answer()["name"]

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    tokens = 2200 if given.quick else given.tokens
    if given.worker:
        return work(given.worker, given.folder, tokens, given.quick)
    lengths = [tokens // 8, tokens // 2, tokens]
    options = [
        "--folder",
        str(given.folder),
        "--tokens",
        str(tokens),
        *["--quick"] * given.quick,
    ]
    workers = {mode: Worker(mode, *options) for mode in MODES}
    result: dict[str, Any] = {"model": workers["resident"].name, "lengths": []}
    blocks = given.folder / f"weft-blocks-{os.getpid()}.npy"
    for length in lengths:
        words = f"read {length}" + f" {blocks}" * (length > lengths[0])
        rows = {mode: worker.ask(words) for mode, worker in workers.items()}
        blocks.unlink(missing_ok=True)
        turns: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
        for _ in range(TURNS):
            for mode, worker in workers.items():
                turns[mode].append(worker.ask("write"))
        texts = {tuple(turns[mode][-1]["written"]) for mode in MODES}
        assert len(texts) == 1, "all modes must write the same tokens"
        line: dict[str, Any] = {"tokens": length}
        for mode, row in rows.items():
            seconds = statistics.median(turn["token_s"] for turn in turns[mode])
            formula = turns[mode][-1]["formula"].get("bytes", 0)
            last = turns[mode][-1]
            own = row["engine_own"] + sum(row["owners_own"])
            line[mode] = {
                "ms_per_token": round(seconds * 1e3, 2),
                "cache_mb": round(row["cache_used"] / 1e6, 2),
                "own_mb": round(own / 1e6, 1),
                "read_s": round(row["read_s"], 2),
                "file_mb_per_token": round(
                    (last["read_bytes"] + last["cached_bytes"]) / NEW / 1e6, 2
                ),
                "formula_mb_per_token": round(formula / 1e6, 2),
                "direct_reads_per_token": last["calls"] // NEW,
            }
        base = line["resident"]["ms_per_token"]
        for mode in MODES:
            line[mode]["speed"] = round(base / line[mode]["ms_per_token"], 3)
        result["lengths"].append(line)
        print(f"{length:,} tokens, {result['model']}", flush=True)
        for mode in MODES:
            about = line[mode]
            print(
                f"  {mode:12} {about['ms_per_token']:8.1f} ms/token  {about['speed']:.2f}x  "
                f"cache {about['cache_mb']:7.1f} MB  own memory {about['own_mb']:7.0f} MB  "
                f"files {about['file_mb_per_token']:6.1f} MB/token "
                f"(formula {about['formula_mb_per_token']:.1f}, {about['direct_reads_per_token']} direct reads)",
                flush=True,
            )
        if given.json:
            given.json.write_text(json.dumps(result, indent=1) + "\n")
    for worker in workers.values():
        worker.close()


if __name__ == "__main__":
    main()
