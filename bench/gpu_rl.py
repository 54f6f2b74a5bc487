"""Reinforcement learning on a GPU: whether every role computes there, and what it computes against the CPU.

A small policy takes a few steps in each case, on the CPU and on the GPU, from the same weights, questions and random
numbers. ``same`` is the share of answers that both have written token by token (float32: rounding seldom decides;
float64: never);
``mismatch`` is the mean difference between the sampler's log-probabilities and the trainer's, on the GPU; ``loss`` is
the difference of the first update's loss. Roles in processes of their own share the one GPU. A case that fails is
named, and the next goes on.

    python bench/gpu_rl.py [--device cuda] [--only NAME ...] [--json bench/results/gpu_rl.json]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from step import machine, write

from weft.api import start
from weft.observe.run_metrics import read_metrics
from weft.recipe import build_recipe

REWARD = '''
def ascii_share(answer, question):
    """Rewards small bytes: something that differs between answers."""
    return sum(c.isascii() for c in answer) / 12
'''
PLACE = {"ranks": 1, "device": "cuda:0"}
OWN = {"trunk": "own"}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "prompts apart": {"rl": {"share_prompts": False}},
    "kl": {"rl": {"loss": {"kl": "k3", "kl_weight": 0.1}}},
    "ppo": {"rl": {"method": "ppo"}},
    "own critic": {"rl": {"method": "ppo"}, "roles": {"critic": OWN}},
    "adapter": {"adapter": {"rank": 4}},
    "two epochs": {"rl": {"epochs": 2, "batch": 8}},
    "float64": {"train": {"dtype": "float64"}},
    "bfloat16": {"train": {"dtype": "bfloat16"}},
    "narrow weights": {"roles": {"rollout": {"weights": "bfloat16"}}},
    "writer": {"roles": {"rollout": PLACE}},
    "stale writer": {"rl": {"staleness": 1}, "roles": {"rollout": PLACE}},
    "delta writer": {"roles": {"rollout": PLACE | {"delta": True}}},
    "reference process": {
        "rl": {"loss": {"kl": "k3", "kl_weight": 0.1}},
        "roles": {"reference": PLACE},
    },
    "critic process": {"rl": {"method": "ppo"}, "roles": {"critic": OWN | PLACE}},
}
TREE: dict[str, Any] = {
    "model": {"layers": 2, "embed": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "tied": True, "init_std": 0.2},
    "data": {"seq_len": 48},
    "rl": {"method": "grpo", "group": 4, "tokens": 12},
    "train": {"steps": 3, "batch": 32, "threads": 1, "timeout": 60},
    "optimizer": {"lr": 1e-3, "warmup": 1, "schedule": "constant"},
    "validation": {"every": 0},
    "checkpoint": {"every": 0},
}  # fmt: skip


def placed(values: dict[str, Any], device: str) -> dict[str, Any]:
    """Return a case with its processes on ``device``."""
    there = "cuda:0" if device == "cuda" else device
    text = json.dumps(values).replace('"cuda:0"', json.dumps(there))
    return dict(json.loads(text))


def taken(case: dict[str, Any], device: str, folder: Path) -> dict[str, Any]:
    """Run a case on ``device``; return its answers and what the run says of its updates."""
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD)
    asked = [json.dumps({"prompt": f"say {i}: ", "answer": ""}) for i in range(16)]
    (folder / "prompts.jsonl").write_text("\n".join(asked) + "\n")
    task = {"reward": f"{folder}/reward.py:ascii_share", "path": str(folder / "prompts.jsonl"), "name": "ascii",
            "limit": 1, "every": 0}  # fmt: skip
    tree = json.loads(json.dumps(TREE)) | {"tasks": [task]}
    for name, values in placed(case, device).items():
        tree[name] = tree.get(name, {}) | values
    tree["train"]["device"] = device
    tree["rl"]["keep"] = 1 if tree["rl"].get("staleness") else 3
    begun = time.perf_counter()
    run = start(build_recipe(tree), folder / "run").run
    seconds = time.perf_counter() - begun
    metrics = read_metrics(run)
    answers = [
        json.loads(line)
        for path in sorted((run / "answers").iterdir())[:1]
        for line in path.read_text().splitlines()
    ]
    policy = metrics["policy"]
    return {
        "answers": [json.dumps(each["messages"] if "messages" in each else each.get("answer")) for each in answers],
        "loss": metrics["train"][0]["loss"], "mismatch": max(each["mismatch"] for each in policy), "seconds": seconds,
        "lags": [phase["lags"] for phase in metrics["rollout"]],
    }  # fmt: skip


def compared(name: str, device: str, folder: Path) -> dict[str, Any]:
    """Run a case on the CPU and on ``device``; return the differences."""
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet):
        cpu = taken(CASES[name], "cpu", folder / "cpu")
        gpu = taken(CASES[name], device, folder / "gpu")
    pairs = list(zip(cpu["answers"], gpu["answers"], strict=True))
    return {
        "case": name, "answers": len(pairs), "same": sum(a == b for a, b in pairs) / len(pairs),
        "loss": abs(cpu["loss"] - gpu["loss"]), "mismatch": gpu["mismatch"], "mismatch_cpu": cpu["mismatch"],
        "seconds": gpu["seconds"], "seconds_cpu": cpu["seconds"], "lags": gpu["lags"],
    }  # fmt: skip


def main() -> None:
    """Run all cases, print a line for each, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.only or CASES:
        try:
            with tempfile.TemporaryDirectory() as folder:
                row = compared(name, args.device, Path(folder))
            print(
                f"{name:<18} {row['same']:.2f} of {row['answers']} answers the same, loss {row['loss']:.1e}, "
                f"mismatch {row['mismatch']:.1e} (CPU {row['mismatch_cpu']:.1e}), {row['seconds']:.1f} s",
                flush=True,
            )
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            traceback.print_exc()
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            row = {"case": name, "error": f"{type(error).__name__} at {where}: {str(error)[:300]}"}  # fmt: skip
            print(f"{name:<18} FAILED {row['error']}", flush=True)
        rows.append(row)
        if args.json:
            write(machine() | {"device": args.device, "cases": rows}, args.json)


if __name__ == "__main__":
    main()
