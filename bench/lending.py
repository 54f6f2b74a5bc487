"""Blocks of a text at another engine: bytes against the formula, and the time of a token, lent and not.

Two processes with one thread each, and one connection over loopback: an engine that writes behind a long text, and one
that lends. Both have a Llama of eight layers with random weights, float32. The same text is continued with none, half
and nearly all of its blocks lent, in turns.

    OMP_NUM_THREADS=1 python bench/lending.py [--tokens 2000] [--json bench/results/lending.json]
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

import torch

from weft.generate.engine import Engine
from weft.generate.lending import Borrower, LoanOffice
from weft.generate.loan_channel import LOANS, RemoteLender, open_loans
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.models.products import read_only
from weft.net.endpoint import Endpoint
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

SHAPE = ModelShape(vocab=8192, layers=8, embed=512, heads=8, kv_heads=4, ffn=1536)
SECRET = "bench"
#: Tokens that are written in a turn, and turns.
NEW, TURNS = 12, 5


def engine_of(tokens: int) -> Engine:
    model = parallelize(SHAPE, Mesh.single(), Train())[0]
    read_only(model)
    return Engine(model, tokens=tokens)


def lend(tokens: int) -> None:
    """Be the lender, until the standard input ends."""
    end = Endpoint("127.0.0.1")
    open_loans(end, SECRET, LoanOffice(engine_of(tokens)))
    print(*end.address, flush=True)
    sys.stdin.read()


def read_prompt(engine: Engine, tokens: int) -> Generation:
    ids = [(7 * i) % SHAPE.vocab for i in range(tokens)]
    (generation,) = engine.submit(ids, TURNS * 3 * NEW + 9, GREEDY)
    while not generation.written:
        engine.step()
    return generation


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lender", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.lender:
        return lend(4 * given.tokens)
    child = subprocess.Popen(
        [sys.executable, __file__, "--lender", "--tokens", str(given.tokens)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert child.stdout is not None and child.stdin is not None
    host, port = child.stdout.readline().split()
    near = Endpoint("127.0.0.1")
    lender = RemoteLender(near.join(LOANS, SECRET), (host, int(port)), "lender")
    rows = measure(lender, given.tokens)
    longest = fit_more(lender, given.tokens)
    lender.close()
    child.stdin.close()
    child.wait(20)
    near.close()
    result = {"tokens": given.tokens, "rows": rows, **longest}
    print(json.dumps(result, indent=1))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(lender: RemoteLender, tokens: int) -> dict[str, dict[str, float]]:
    """Times of a token and bytes of it, by the share of the text that is lent; the shares in turns."""
    engine = engine_of(4 * tokens)
    borrower = Borrower(engine, lambda: [lender], 4 * tokens)
    generation = read_prompt(engine, tokens)
    blocks = len(borrower.own_blocks(generation))
    times: dict[str, list[float]] = {}
    moved: dict[str, int] = {}
    for _ in range(TURNS):
        for name, count in (
            ("none", 0),
            ("half", blocks // 2),
            ("all but one", blocks - 1),
        ):
            if count:
                assert borrower.lend(generation, count) == count
            engine.step()
            before, begun = lender.moved, perf_counter()
            for _ in range(NEW - 1):
                engine.step()
            times.setdefault(name, []).append((perf_counter() - begun) / (NEW - 1))
            moved[name] = (lender.moved - before) // (NEW - 1)
            borrower.bring_home(generation)
            borrower.settle()
    assert not generation.finished
    engine.cancel(generation)
    head_dim = SHAPE.head_dim or 0
    formula = SHAPE.layers * SHAPE.heads * (2 * head_dim + 1) * 4
    alone = statistics.median(times["none"])
    return {
        name: {
            "ms per token": 1000 * statistics.median(seconds),
            "times the time of none": statistics.median(seconds) / alone,
            "bytes per token": moved[name],
            "bytes / formula": moved[name] / formula,
        }
        for name, seconds in times.items()
    }


def fit_more(lender: RemoteLender, tokens: int) -> dict[str, object]:
    """A text of three times the engine's cache."""
    engine = engine_of(tokens // 2)
    Borrower(engine, lambda: [lender], 4 * tokens)
    ids = [(5 * i) % SHAPE.vocab for i in range(3 * (tokens // 2))]
    (generation,) = engine.submit(ids, 8, GREEDY)
    engine.run()
    alone = engine_of(4 * tokens)
    (expected,) = alone.submit(ids, 8, GREEDY)
    alone.run()
    return {
        "text / cache": 3.0,
        "equal tokens": generation.written == expected.written,
        "preemptions": engine.scheduler.preemptions,
    }


if __name__ == "__main__":
    main()
