"""Reinforcement learning beside TRL's GRPO: the same model, prompts, lengths and updates, in turns in one run.

Both sides write ``--answers`` answers of ``--tokens`` tokens in each step, in groups, compute a reward in Python, and
take one GRPO step with AdamW. TRL generates by transformers. A side is a process of its own; counted are the steps
after the first one, and the process's peak memory. Weights are random, so that answers almost never end early: then
both write equally many tokens. A third process measures the floor: how long the matrix products of a step take by
themselves on this machine, each by the fastest of the kernels at hand. On a CPU, Weft's updates take those of the
forward pass from the passes that wrote the answers, so that the floor of what it computes is lower.

    python bench/rl.py --model FOLDER --trl VENV/bin/python [--rounds 2] [--json bench/results/rl.json]
    python bench/rl.py --model FOLDER --trl python --device cuda --dtype bfloat16 --answers 64 --tokens 256

On a GPU both sides train in ``--dtype`` with parameters in float32. Memory is then what PyTorch's allocator held at
most.

``FOLDER``: a model as Hugging Face has it, of which shape and tokenizer are taken. ``--preamble 200`` puts so many
words before every question, which all answers to it share.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

#: Makes a function that multiplies rows with a weight.
Way = Callable[[Any], Callable[[Any], Any]]

REWARD = '''
def letters(answer, question):
    """Rewards letters: something that differs between answers."""
    return sum(c.isalpha() for c in answer) / max(1, len(answer))
'''
PROMPTS = [f"The {word} of the year was" for word in (
    "winter", "garden", "letter", "answer", "harbour", "student", "machine", "river", "teacher", "summer", "window",
    "journey", "picture", "village", "market", "castle",
)]  # fmt: skip


def prompts_after(preamble: int) -> list[str]:
    """Return the prompts, each after so many words."""
    return [" ".join(["word"] * preamble + [prompt]) for prompt in PROMPTS]


def random_model(source: Path, folder: Path) -> None:
    """Write a model of random weights with the shape and tokenizer of ``source``."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def weft_side(asked: dict[str, Any]) -> dict[str, Any]:
    """Train by ``weft train``, and return what it took."""
    from weft.api import start
    from weft.observe.run_metrics import read_metrics
    from weft.recipe import build_recipe

    folder = Path(asked["folder"])
    (folder / "reward.py").write_text(REWARD)
    prompts = prompts_after(asked["preamble"])
    lines = [json.dumps({"prompt": prompt, "answer": ""}) for prompt in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    recipe = build_recipe({
        "model": {"from": asked["model"]},
        "data": {"seq_len": 80 + asked["preamble"] + asked["tokens"]},
        "tasks": [{"reward": f"{folder}/reward.py:letters", "path": str(folder / "prompts.jsonl"), "name": "letters",
                   "limit": 1}],
        "rl": {"method": "grpo", "group": asked["group"], "tokens": asked["tokens"]},
        "train": {
            "steps": asked["steps"], "batch": asked["answers"], "threads": asked["threads"], "device": asked["device"],
            "dtype": asked["dtype"],
        },
        "optimizer": {"lr": 1e-6, "schedule": "constant", "warmup": 1},
        "validation": {"every": 0},
        "checkpoint": {"every": 0},
    })  # fmt: skip
    run = start(recipe, folder / "run").run
    phases = read_metrics(run)["rollout"]
    at = [record["time"] for record in read_metrics(run)["train"]]
    seconds = [b - a for a, b in itertools.pairwise(at)]
    lengths = statistics.mean(phase["length"] for phase in phases)
    return {"seconds": statistics.median(seconds), "length": lengths, "rollout_s": statistics.median(
        phase["rollout_s"] for phase in phases[1:]
    )}  # fmt: skip


def trl_side(asked: dict[str, Any]) -> dict[str, Any]:
    """Train by TRL's GRPOTrainer, and return what it took."""
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(asked["threads"])
    at, lengths = list[float](), list[float]()

    def letters(
        completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [
            sum(c.isalpha() for c in text) / max(1, len(text)) for text in completions
        ]

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            at.append(time.time())

    config = GRPOConfig(
        output_dir=asked["folder"], use_cpu=asked["device"] == "cpu", max_steps=asked["steps"], learning_rate=1e-6,
        per_device_train_batch_size=asked["answers"], num_generations=asked["group"],
        max_completion_length=asked["tokens"], report_to=[], save_strategy="no", logging_steps=1,
        bf16=asked["dtype"] == "bfloat16", gradient_checkpointing=False, lr_scheduler_type="constant",
        loss_type="grpo", disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_list(
        [{"prompt": prompt} for prompt in prompts_after(asked["preamble"])]
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = GRPOTrainer(
        asked["model"], reward_funcs=letters, args=config, train_dataset=data, processing_class=tokenizer,
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    seconds = [b - a for a, b in itertools.pairwise(at)]
    return {"seconds": statistics.median(seconds), "length": statistics.mean(lengths)}


def least(
    call: Callable[[], object], times: int, finish: Callable[[], None] = lambda: None
) -> float:
    """Seconds of the fastest of some calls, after one that prepares memory and kernels.

    ``finish``: waits for what a call has launched.
    """
    call()
    finish()
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        finish()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def product_seconds(out: int, inner: int, rows: int) -> dict[str, float]:
    """Seconds of the three products of a weight ``[out, inner]`` in a step, by name: the fastest way to compute each.

    ``rows``: tokens of the step.
    """
    import torch

    from weft.models.fused import times
    from weft.models.products import Packed

    weight, x, grad = (
        torch.randn(n, m) for n, m in ((out, inner), (rows, inner), (rows, out))
    )
    packed, turned = Packed(weight), Packed(weight.t())
    ways: dict[str, list[Callable[[], object]]] = {
        "forward": [lambda: x @ weight.t(), lambda: times(x, weight), lambda: packed(x)],
        "of_inputs": [lambda: grad @ weight, lambda: times(grad, weight.t()), lambda: turned(grad)],
        "of_weights": [lambda: grad.t() @ x, lambda: x.t() @ grad, lambda: times(grad.t(), x.t())],
    }  # fmt: skip
    return {name: min(least(call, 5) for call in calls) for name, calls in ways.items()}


def gpu_floor_side(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure the products of a step on a GPU, as :func:`floor_side` does; those of writing launched as a graph."""
    import torch
    import transformers

    kind = getattr(torch, asked["dtype"])
    draw = partial(torch.randn, device="cuda", dtype=kind)
    time_of = partial(least, times=5, finish=torch.cuda.synchronize)
    sizes = product_sizes(asked, transformers)
    seconds = dict.fromkeys(("forward", "of_inputs", "of_weights", "writing"), 0.0)
    flops = 0.0
    for count, out, inner, tokens in sizes:
        weight, x, grad = draw(out, inner), draw(tokens, inner), draw(tokens, out)
        flops += 3 * 2.0 * count * out * inner * tokens
        seconds["forward"] += count * time_of(lambda x=x, w=weight: x @ w.t())
        seconds["of_inputs"] += count * time_of(lambda g=grad, w=weight: g @ w)
        seconds["of_weights"] += count * time_of(lambda g=grad, x=x: g.t() @ x)
    with torch.inference_mode():
        each = [draw(out, inner) for n, out, inner, _ in sizes for _ in range(n)]
        rows = {inner: draw(asked["answers"], inner) for _, _, inner, _ in sizes}
        for weight in each[:1] + each[-1:]:
            rows[weight.shape[1]] @ weight.t()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in each:
                rows[weight.shape[1]] @ weight.t()
        seconds["writing"] = time_of(graph.replay) * asked["tokens"]
    learning = sum(seconds.values()) - seconds["writing"]
    return {
        "seconds": learning + seconds["writing"], "products": seconds, "learning_gflops": flops / learning / 1e9,
        "tokens": sizes[0][-1],
    }  # fmt: skip


def product_sizes(
    asked: dict[str, Any], transformers: Any
) -> list[tuple[int, int, int, int]]:
    """Return how many weights of which shape ``[out, inner]`` a step multiplies with how many tokens."""
    config = transformers.AutoConfig.from_pretrained(asked["model"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked["model"])
    embed, ffn, layers = (
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
    )
    width = embed // config.num_attention_heads
    heads = width * (config.num_attention_heads + 2 * config.num_key_value_heads)
    weights = [(heads, embed), (embed, embed), (2 * ffn, embed), (embed, ffn)]
    prompts = prompts_after(asked["preamble"])
    prompt = statistics.mean(len(tokenizer(text).input_ids) for text in prompts)
    written = asked["answers"] * asked["tokens"]
    # a prompt once for its group, but for its last token, and nothing follows the last token of an answer
    rows = round(asked["answers"] / asked["group"] * (prompt - 1)) + written
    sizes = [(layers, *size, rows) for size in weights]
    sizes.append((1, config.vocab_size, embed, written))
    return sizes


def token_seconds(
    way: Way, sizes: Sequence[tuple[int, int, int, int]], answers: int
) -> float:
    """Return the seconds of all products for one token of every answer.

    ``way``: makes the function that multiplies with a weight. ``sizes``: for each kind of weight how many there are,
    and two of their sizes. All weights together are larger than the caches.
    """
    import torch

    from weft.memory.heap import use_huge_pages

    weights = [(out, inner) for count, out, inner, _ in sizes for _ in range(count)]
    products = [(way(torch.randn(*size)), torch.randn(1, answers, size[1])) for size in weights]  # fmt: skip
    with torch.inference_mode():
        use_huge_pages()
        return least(lambda: [product(x) for product, x in products], 5)


def floor_side(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure how long the products of a step take: forward and backward over all tokens, and those of writing."""
    import torch
    import transformers

    from weft.memory.heap import keep_heap
    from weft.models.products import Packed
    from weft.models.row_layers import ROWS, RowOutput, rows_kernel

    torch.set_num_threads(asked["threads"])
    keep_heap()
    sizes = product_sizes(asked, transformers)
    seconds = dict.fromkeys(("forward", "of_inputs", "of_weights", "writing"), 0.0)
    flops = 0.0
    for count, out, inner, tokens in sizes:
        flops += 3 * 2.0 * count * out * inner * tokens
        for name, value in product_seconds(out, inner, tokens).items():
            seconds[name] += count * value
    ways: list[Way] = [Packed]
    if asked["answers"] <= ROWS[-1] and rows_kernel(64, 1, 16, ROWS[0]):
        ways.append(lambda weight: RowOutput(weight, 64, 1))
    steps = [token_seconds(way, sizes, asked["answers"]) for way in ways]
    seconds["writing"] = min(steps) * asked["tokens"]
    learning = sum(seconds.values()) - seconds["writing"]
    return {
        "seconds": learning + seconds["writing"], "products": seconds, "learning_gflops": flops / learning / 1e9,
        "tokens": sizes[0][-1],
    }  # fmt: skip


def side(name: str, python: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Run a side in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        given = json.dumps(asked | {"folder": folder})
        threads = {
            "OMP_NUM_THREADS": str(asked["threads"]),
            "TOKENIZERS_PARALLELISM": "false",
        }
        done = subprocess.run(
            [python, __file__, "--side", name, "--asked", given], env=os.environ | threads, stdout=subprocess.PIPE,
            text=True, check=True,
        )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run both sides in turns, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--trl", help="the Python of an environment with TRL")
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--preamble", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--asked", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        asked = json.loads(args.asked)
        floor_of = gpu_floor_side if asked["device"] == "cuda" else floor_side
        sides = {"weft": weft_side, "trl": trl_side, "floor": floor_of}
        result = sides[args.side](asked)
        own = resource.getrusage(resource.RUSAGE_SELF)
        gib = own.ru_maxrss / 2**20
        if asked["device"] == "cuda":
            import torch

            gib = torch.cuda.max_memory_reserved() / 2**30
        result |= {"gib": gib, "processor": own.ru_utime + own.ru_stime}
        print(json.dumps(result))
        return
    from step import machine, write

    with tempfile.TemporaryDirectory() as folder:
        random_model(args.model, Path(folder))
        names = (
            "answers",
            "group",
            "tokens",
            "steps",
            "threads",
            "preamble",
            "device",
            "dtype",
        )
        asked = {name: getattr(args, name) for name in names} | {"model": folder}
        runs: dict[str, list[dict[str, Any]]] = {"weft": [], "trl": []}
        for number in range(args.rounds):
            for name, python in (("weft", sys.executable), ("trl", args.trl)):
                runs[name].append(side(name, python, asked))
                print(number, name, runs[name][-1], flush=True)
        floor = side("floor", sys.executable, asked)
    figures: dict[str, Any] = {}
    for name, results in runs.items():
        seconds = statistics.median(r["seconds"] for r in results)
        figures[name] = {
            "answers_per_s": args.answers / seconds, "seconds": seconds, "gib": max(r["gib"] for r in results),
            "processor": statistics.median(r["processor"] for r in results),
            "length": statistics.mean(r["length"] for r in results), "over_floor": seconds / floor["seconds"],
        }  # fmt: skip
    ratio = figures["weft"]["answers_per_s"] / figures["trl"]["answers_per_s"]
    memory = figures["weft"]["gib"] / figures["trl"]["gib"]
    for name, each in figures.items():
        print(
            f"{name:5} {each['answers_per_s']:.3f} answers/s, {each['gib']:.2f} GiB, {each['length']:.1f} tokens, "
            f"{each['over_floor']:.2f} times the floor"
        )
    parts = ", ".join(
        f"{part} {value:.2f}" for part, value in floor["products"].items()
    )
    print(
        f"floor {floor['seconds']:.2f} s of products ({parts}), {floor['learning_gflops']:.0f} GFLOP/s in learning"
    )
    print(f"ratio {ratio:.2f} in answers/s, {memory:.2f} in memory")
    if args.json:
        settings = {name: getattr(args, name) for name in (*names, "rounds")}
        results = {
            "settings": settings,
            **figures,
            "floor": floor,
            "ratio": ratio,
            "memory": memory,
            "runs": runs,
        }
        write(machine() | results, args.json)


if __name__ == "__main__":
    main()
