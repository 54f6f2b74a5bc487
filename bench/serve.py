"""Many requests at once against transformers' continuous batching and its padded batch; one process, in turn.

A Llama of SmolLM2-135M's shape with random weights, float32, greedy: all three have to write the same tokens, and the
same number for each request. Prompts have unequal lengths, so that the padded batch computes padding.

    OMP_NUM_THREADS=1 python bench/serve.py [--requests 8] [--tokens 32] [--json bench/results/serve.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from weft.generate.engine import Engine
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.models.hf import export
from weft.parallel.build import parallelize, resident_state
from weft.recipe import ModelShape, Train

SHAPE = ModelShape(vocab=49152, layers=30, embed=576, heads=9, kv_heads=3, ffn=1536, tied=True)

#: Tokens of a step, and of the cache, for both engines.
BUDGET, CACHE = 512, 64 * 256


def ways(prompts: list[list[int]], tokens: int) -> dict[str, Callable[[], list[list[int]]]]:
    """By name, what writes so many tokens after each of the prompts."""
    model = parallelize(SHAPE, Mesh.single(), Train())[0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model"
        export({p.name: p.local for p in resident_state(model, model.mesh).held}, model.shape, out)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="sdpa").eval()
    how = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    longest = max(map(len, prompts))

    def ours() -> list[list[int]]:
        engine = Engine(model, tokens=CACHE, budget=BUDGET)
        found = [engine.submit(prompt, tokens, GREEDY)[0] for prompt in prompts]
        engine.run()
        return [one.written for one in found]

    def continuous() -> list[list[int]]:
        room = ContinuousBatchingConfig(num_blocks=CACHE // 256, max_batch_tokens=BUDGET)
        found = theirs.generate_batch(inputs=prompts, generation_config=how, continuous_batching_config=room)
        return [one.generated_tokens for one in found.values()]

    def padded() -> list[list[int]]:
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        return theirs.generate(ids, attention_mask=mask, generation_config=how)[:, longest:].tolist()

    return {"weft": ours, "continuous batching": continuous, "padded batch": padded}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    prompts = [[(7 * i + 31 * r) % 40_000 for i in range(40 + 15 * r)] for r in range(given.requests)]
    writers = ways(prompts, given.tokens)
    times: dict[str, list[float]] = {name: [] for name in writers}
    for turn in range(given.turns + 1):
        texts = {}
        for name, write in writers.items():
            begun = time.perf_counter()
            texts[name] = write()
            if turn:  # the first one warms up
                times[name].append(time.perf_counter() - begun)
        assert all(text == texts["weft"] for text in texts.values()), "they do not write the same"
    rates = {name: given.requests * given.tokens / statistics.median(took) for name, took in times.items()}
    ratios = {f"weft / {name}": rates["weft"] / rate for name, rate in rates.items() if name != "weft"}
    found = {"requests": given.requests, "tokens": given.tokens, "tokens/s": rates, "ratios": ratios}
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
