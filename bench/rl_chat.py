"""A chat model that is rewarded for right answers alone: ``recipes/rl-chat.toml`` (SmolLM2-135M-Instruct, LoRA).

Held-out questions are asked greedily before the first update and every 20 updates. ``--run FOLDER`` reads a run that
has ended instead of starting one.

    python bench/rl_chat.py [--run FOLDER] [--json bench/results/rl_chat.json]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from step import machine, write

from weft.api import start
from weft.observe.run_metrics import read_metrics
from weft.recipe import load_recipe
from weft.recipe.shipped import find_recipe


def figures(run: Path) -> dict[str, Any]:
    """Return what a run has recorded: right answers, rewards of its first and last ten phases, and its time."""
    metrics = read_metrics(run)
    asked, phases = metrics["task.sums"], metrics["rollout"]
    rewards = [phase["reward"] for phase in phases]
    return {
        "right": {str(each["step"]): each["accuracy"] for each in asked},
        "questions": asked[-1]["questions"],
        "reward of the first phase": rewards[0],
        "reward of the last ten phases": statistics.mean(rewards[-10:]),
        "updates": len(metrics["train"]),
        "minutes": (asked[-1]["time"] - asked[0]["time"]) / 60,
    }


def main() -> None:
    """Run the recipe or read a run, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    about = machine()
    with tempfile.TemporaryDirectory() as folder:
        if args.run is None:
            file = find_recipe("rl-chat")
            assert file is not None
            args.run = start(load_recipe(Path(file)), Path(folder, "run")).run
        results = figures(args.run)
    print(results)
    if args.json:
        write(about | results, args.json)


if __name__ == "__main__":
    main()
