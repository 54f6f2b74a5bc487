"""PPO by a critic that shares the policy's trunk, and by one with layers of its own: ``recipes/rl-sums.toml`` by both.

Both begin with the same supervised start and take the same updates. Reported are the rewards of the first and the last
phases, right answers to held-out questions, the critic's loss and seconds, and those of GRPO, which has no critic. The
critic with layers of its own is on the policy's rank, or in a process of its own, which computes the same bits; then
reported are also its bytes in a phase against the formula, and seconds for which the policy has waited for it.

    python bench/rl_critic.py [--seeds 3] [--steps 500] [--quick] [--json bench/results/rl_critic.json]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from step import machine, write

from weft.api import start
from weft.recipe import Recipe, build_recipe
from weft.recipe.shipped import find_recipe
from weft.recipe.toml import read_toml

#: What each way changes in the recipe.
WAYS: dict[str, dict[str, Any]] = {
    "no critic": {"rl": {"method": "grpo"}},
    "shared": {"rl": {"method": "ppo"}},
    "own": {"rl": {"method": "ppo"}, "roles": {"critic": {"trunk": "own"}}},
    "process": {
        "rl": {"method": "ppo"},
        "roles": {"critic": {"trunk": "own", "ranks": 1, "threads": 1}},
    },
}
#: Bytes of a token of a text that is sent to a critic in a process, and of a value and a return of a written token.
TEXT, NUMBER = 5, 8


def recipe(way: str, seed: int, steps: int, quick: bool) -> Recipe:
    file = find_recipe("rl-sums")
    assert file is not None
    tree: dict[str, Any] = read_toml(Path(file))
    for name, values in WAYS[way].items():
        tree[name] = tree.get(name, {}) | values
    tree["train"] |= {"steps": tree["rl"]["start"]["steps"] + steps, "seed": seed}
    tree["train"] |= {"threads": 1}
    if quick:
        tree["rl"]["start"]["steps"] = 20
        tree["train"] |= {"steps": 20 + steps, "batch": 32}
    tree["tasks"][0]["every"] = 0
    tree["checkpoint"] = {"every": 0}
    return build_recipe(tree)


def measure(way: str, seed: int, steps: int, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        outcome = start(recipe(way, seed, steps, quick), out=Path(folder) / "run")
        seconds = time.perf_counter() - begun
        rewards = [record["reward"] for record in outcome.metrics("rollout")]
        policy = outcome.metrics("policy")
        right = [record["accuracy"] for record in outcome.metrics("task.addition")]
        phases = outcome.metrics("rollout")
    tenth = max(1, len(rewards) // 10)
    return {
        "way": way,
        "seed": seed,
        "first": statistics.fmean(rewards[:tenth]),
        "last": statistics.fmean(rewards[-tenth:]),
        "value_loss": statistics.fmean(r["value_loss"] for r in policy[-tenth:]),
        "right": round(right[-1], 3),
        "seconds": round(seconds, 1),
        **roles_time(phases[1:]),
    }


def roles_time(phases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean seconds of phases and of the critic in them, and with a process of its own its bytes."""

    def mean(name: str) -> float:
        return round(statistics.fmean(phase.get(name, 0.0) for phase in phases), 4)

    names = ("train_s", "prepare_s", "rollout_s", "critic_s", "critic_wait_s")
    times = {name: mean(name) for name in names}
    if "critic_sent_bytes" not in phases[0]:
        return times
    marked = sum(phase["critic_received_bytes"] for phase in phases) // NUMBER
    texts = sum(phase["critic_sent_bytes"] for phase in phases) - NUMBER * marked
    assert texts % TEXT == 0, "a token of a text has another number of bytes"
    written = sum(phase["length"] * sum(phase["lags"].values()) for phase in phases)
    assert abs(marked - written) < 1e-6 * written, "other tokens have values"
    return times | {"tokens": texts // TEXT, "values": marked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    given = parser.parse_args()
    steps = 4 if given.quick else given.steps
    rows = [
        measure(way, seed, steps, given.quick)
        for seed in range(1 if given.quick else given.seeds)
        for way in WAYS
    ]
    for row in rows:
        print(
            "{way:10} seed {seed}: reward {first:.3f} -> {last:.3f}, right {right}, value loss {value_loss:.4f}, "
            "{seconds} s, of a phase {critic_s} s of the critic and {critic_wait_s} s of waiting for it".format(
                **row
            )
        )
    if given.json:
        results = {"machine": machine(), "steps": steps, "rows": rows}
        write(results, Path(given.json))


if __name__ == "__main__":
    main()
