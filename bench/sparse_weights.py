"""What zeros save: a token of one text with pruned weights beside dense bfloat16, and what pruning costs.

    OMP_NUM_THREADS=1 python bench/sparse_weights.py --model FOLDER [--quick] [--json bench/results/sparse_weights.json]

``memory``: bytes that one core reads in a second, the floor of what reads each weight once. ``products``: all matrices
that a token is multiplied with, output layer included, dense in bfloat16 (packed for oneDNN, as ``--weights bfloat16``
has them) and as bitmaps and values at several shares, in turn; processor seconds of one thread, the medians of all
rounds, the bytes, and both beside the floor. ``tokens``: the same forms of the whole model, engine and attention
included. ``perplexity``: the model as it is and with 50, 60 and 70 % of its weights pruned by magnitude and by Wanda,
on pages of this documentation that Wanda has not read.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step import machine, write

from weft.checkpoint.model import open_model, tokenizer_of
from weft.data.tokenizer import Tokenizer
from weft.generate.engine import Engine
from weft.generate.sampling import GREEDY
from weft.models.products import form_of, read_only
from weft.models.projections import Projections
from weft.models.pruning import prune_weights
from weft.models.sparse_weights import read_sparse_word
from weft.models.transformer import Transformer
from weft.registry import find

RESULTS = Path(__file__).parent / "results" / "sparse_weights.json"
DOCS = Path(__file__).parents[1] / "docs"
DENSE = "bfloat16"
SHARES = (0.5, 0.6, 0.7)
WORDS = [DENSE, *(f"sparse:{share}:bfloat16" for share in SHARES), "sparse:0.7"]


def opened(folder: str) -> Transformer:
    return open_model(folder, "cpu", print).model


def seconds(run: Callable[[], object]) -> float:
    begun = time.thread_time()
    run()
    return time.thread_time() - begun


def in_turn(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median processor seconds of each, all run once in each round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return {name: statistics.median(each) for name, each in times.items()}


def bandwidth(rounds: int) -> float:
    """Bytes that one core reads in a second from 400 MB, which no cache holds."""
    held = torch.ones(100_000_000)
    times = [seconds(held.sum) for _ in range(rounds)]
    return held.nbytes / min(times)


def matrices(model: Transformer) -> list[torch.Tensor]:
    """The weights that a token is multiplied with, joined as the engine joins them; the output layer is last."""
    joined = [
        torch.cat([getattr(module, name).detach() for name in names])
        for module in model.modules()
        if isinstance(module, Projections)
        for names in module.TOGETHER
    ]
    return [*joined, model.output.detach()]


def magnitude(weight: torch.Tensor, share: float) -> torch.Tensor:
    return weight * find("pruner", "magnitude").implementation().kept(
        weight, None, share
    )


def products(model: Transformer, rounds: int, read: float) -> dict[str, Any]:
    weights = matrices(model)
    runs: dict[str, Callable[[], object]] = {}
    sizes: dict[str, int] = {}
    for word in WORDS:
        sparse = read_sparse_word(word)
        kind = torch.float32 if sparse else torch.bfloat16
        share = sparse.share if sparse else 0.0
        of_output = word
        if sparse:  # which is not pruned
            of_output = "sparse:bfloat16" if sparse.narrow else "float"
        *inner, last = (weight.to(kind) for weight in weights)
        forms = [form_of(word, magnitude(weight, share)) for weight in inner]
        forms.append(form_of(of_output, last))
        rows = [torch.randn(1, w.shape[1], dtype=kind) for w in weights]

        def run(forms: list[Any] = forms, rows: list[torch.Tensor] = rows) -> None:
            for form, row in zip(forms, rows, strict=True):
                form(row)

        runs[word], sizes[word] = run, sum(form.nbytes for form in forms)
    with torch.inference_mode():
        times = in_turn(runs, rounds)
    return {
        word: {
            "ms": round(1e3 * times[word], 2),
            "bytes": sizes[word],
            "floor_ms": round(1e3 * sizes[word] / read, 2),
            "times_floor": round(times[word] * read / sizes[word], 2),
            "speedup": round(times[DENSE] / times[word], 2),
        }
        for word in WORDS
    }


def tokens(folder: str, count: int, rounds: int, ids: list[int]) -> dict[str, Any]:
    engines = {}
    for word in WORDS:
        model = opened(folder)
        read_only(model, word)
        engines[word] = Engine(model)

    def written(engine: Engine) -> list[int]:
        return [*engine.stream(engine.submit(ids, count, GREEDY)[0])]

    times = in_turn(
        {word: (lambda e=engine: written(e)) for word, engine in engines.items()},
        rounds,
    )
    return {
        word: {
            "ms_per_token": round(1e3 * times[word] / count, 2),
            "speedup": round(times[DENSE] / times[word], 2),
        }
        for word in WORDS
    }


def loss(model: Transformer, ids: list[int], window: int = 512) -> float:
    """Mean loss of the tokens of a text, in windows."""
    total, count = 0.0, 0
    for first in range(0, len(ids) - 1, window):
        piece = torch.tensor(ids[first : first + window + 1])
        size = len(piece) - 1
        ends = torch.tensor([0, size], dtype=torch.int32)
        with torch.inference_mode():
            logits = model(piece[None, :-1], torch.arange(size)[None], ends)[0]
        losses = torch.nn.functional.cross_entropy(logits, piece[1:], reduction="sum")
        total, count = total + float(losses), count + size
    return total / count


def perplexity(folder: str, tokenizer: Tokenizer, quick: bool) -> dict[str, Any]:
    def read(room: str, most: int) -> list[int]:
        text = "\n\n".join(p.read_text() for p in sorted((DOCS / room).glob("*.md")))
        return tokenizer.prompt_ids(text[: 8 * most])[:most]

    asked = read("explanations", 1_024 if quick else 6_144)
    calibration = read("how-to", 1_024 if quick else 8_192)
    rows: dict[str, Any] = {
        "tokens": len(asked), "calibration_tokens": len(calibration),
        "dense": round(math.exp(loss(opened(folder), asked)), 2),
    }  # fmt: skip
    for by in ("magnitude", "wanda"):
        pruner = find("pruner", by).implementation()
        rows[by] = {}
        for share in SHARES[-1:] if quick else SHARES:
            model = opened(folder)
            prune_weights(
                model, pruner, share, calibration if pruner.reads_texts else ()
            )
            rows[by][f"{share:.0%}"] = round(math.exp(loss(model, asked)), 2)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="/tmp/inside-smollm2")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="memory, tokens or perplexity")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": machine()}
    if given.json and given.json.exists():
        results = json.loads(given.json.read_text()) | results
    tokenizer = tokenizer_of(open_model(given.model, "cpu", print).files, given.model)
    rounds = 3 if given.quick else 15
    if given.only in ("", "memory"):
        read = bandwidth(rounds)
        results["memory_gb_per_s"] = round(read / 1e9, 1)
        with torch.inference_mode():
            results["products"] = products(opened(given.model), rounds, read)
    if given.only in ("", "tokens"):
        ids = tokenizer.prompt_ids("The sea")
        count = 8 if given.quick else 64
        results["tokens"] = tokens(given.model, count, 3 if given.quick else 7, ids)
    if given.only in ("", "perplexity"):
        results["perplexity"] = perplexity(given.model, tokenizer, given.quick)
    print(json.dumps(results, indent=2))
    if given.json:
        write(results, given.json)


if __name__ == "__main__":
    main()
