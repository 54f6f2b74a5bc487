"""What rewards teach: ``recipes/rl-sums.toml`` over several seeds, beside the same run with rewards that mean nothing.

The control writes answers to the same kind of questions, and rewards three of ten answers by the hash of their text.
Both are asked the same held-out questions, greedily, after the supervised start and at the end: what the control gains
is not due to rewards.

    python bench/rl_sums.py [--seeds 3] [--first 0] [--threads 1] [--json bench/results/rl_sums.json]

Runs of other seeds that the file already has are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from step import machine, write

from weft.api import start
from weft.observe.run_metrics import read_metrics
from weft.recipe import Recipe, Task, build_recipe
from weft.recipe.host_section import section_of
from weft.recipe.shipped import find_recipe
from weft.recipe.toml import read_toml
from weft.rl.build_task import reward_task

COIN = '''
from hashlib import blake2b


def coin(answer, question):
    """Rewards three of ten answers, whatever they say."""
    text = f"{question.prompt}{answer}".encode()
    return float(blake2b(text, digest_size=2).digest()[0] < 77)
'''
#: Questions that both are asked, and those that the control trains on.
ASKED, TRAINED = 400, 6000


def sums(table: dict[str, Any], count: int, held_out: bool) -> list[dict[str, str]]:
    """Return ``count`` questions of the task that ``table`` describes, with their answers."""
    task = reward_task(section_of(Task, {k: v for k, v in table.items()}))
    questions = [task.question(i, held_out) for i in range(count)]
    return [{"prompt": str(q.prompt), "answer": q.answer} for q in questions]


def lines(path: Path, records: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def recipe(folder: Path, seed: int, shuffled: bool, threads: int) -> Recipe:
    """Return the shipped recipe with another seed, asked the common questions, or that of the control."""
    file = find_recipe("rl-sums")
    assert file is not None
    tree: dict[str, Any] = read_toml(Path(file))
    (table,) = tree["tasks"]
    asked = lines(folder / "asked.jsonl", sums(table, ASKED, held_out=True))
    every = tree["rl"]["start"]["steps"]
    if shuffled:
        (folder / "coin.py").write_text(COIN)
        path = lines(folder / "sums.jsonl", sums(table, TRAINED, held_out=False))
        table = {
            "reward": f"{folder}/coin.py:coin", "path": path, "held_out": asked, "limit": 1,
        }  # fmt: skip
    else:
        table |= {"every": 0, "limit": 1}
    tree["tasks"] = [
        table | {"name": "rewarded"},
        {"path": asked, "name": "right", "every": every},
    ]
    tree["train"] |= {"seed": seed, "threads": threads}
    tree["name"] = "rl-sums"
    return build_recipe(tree)


def main() -> None:
    """Run all seeds with and without meaning, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.seeds)
    runs: dict[str, list[dict[str, Any]]] = {"rewards": [], "shuffled": []}
    if args.json and args.json.exists():
        known = json.loads(args.json.read_text())["runs"]
        runs = {n: [r for r in known[n] if r["seed"] not in seeds] for n in runs}
    for seed in seeds:
        for name in runs:
            with tempfile.TemporaryDirectory() as folder:
                given = recipe(Path(folder), seed, name == "shuffled", args.threads)
                run = start(given, Path(folder) / "run").run
                records = read_metrics(run)
            began = given.rl.start.steps if given.rl else 0
            right = {r["step"]: r["accuracy"] for r in records["task.right"]}
            last = max(right)
            rewards = [r["reward"] for r in records["rollout"]]
            tenth = len(rewards) // 10
            runs[name].append({
                "seed": seed, "start": right[began], "end": right[last], "gain": right[last] - right[began],
                "reward_first": statistics.mean(rewards[:tenth]), "reward_last": statistics.mean(rewards[-tenth:]),
            })  # fmt: skip
            print(name, runs[name][-1], flush=True)
    for each in runs.values():
        each.sort(key=lambda run: run["seed"])
    gains = {
        name: statistics.median(r["gain"] for r in each) for name, each in runs.items()
    }
    print(
        ", ".join(f"{name}: {gain:+.1%} in the median" for name, gain in gains.items())
    )
    if args.json:
        write(machine() | {"gains": gains, "runs": runs, "questions": ASKED}, args.json)


if __name__ == "__main__":
    main()
