"""Control: environments that PPO solves, simple rewards at large minibatches (CaRL), and workers that do not wait.

    python bench/control.py [--parts solved carl workers ranks] [--seeds 3] [--json bench/results/control.json]

``solved``: CartPole-v1 and LunarLander-v3 by PPO, mean return over 100 episodes of the best actions. ``carl``: CartPole
with progress multiplied by soft penalties, and with the same penalties subtracted, at minibatches of 64 and 4,096 and
equal transitions; the learning rate grows with the root of the minibatch. ``workers``: soft actor-critic in Pendulum
whose steps sleep (log-normal, sigma 1), by 4 workers at their own pace and by 4 that step together: the rate of
transitions where nobody waits, and the return after equal transitions with an update for each. ``ranks``: one rank and
two with the same environments, in float64.

Figures of other parts that the file already has are kept. Needs ``pip install 'weft[control]'``. Times are of a machine
that others may use, so processor seconds are given too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

#: Seconds that a step of a sleeping environment takes on average.
SLEEP_S = 0.25

PENALTIES = [
    {"index": 0, "free": 0.5, "limit": 2.4},
    {"index": 1, "free": 0.5, "limit": 2.0},
    {"index": 2, "free": 0.03, "limit": 0.2},
    {"index": 3, "free": 0.5, "limit": 2.0},
]

CARTPOLE: dict[str, Any] = {
    "environment": "CartPole-v1", "transitions": 100_000, "horizon": 32, "epochs": 20, "minibatch": 256, "lr": 1e-3,
    "decay": True, "gamma": 0.98, "trace": 0.8, "processes": 1,
}  # fmt: skip
LUNAR: dict[str, Any] = {
    "environment": "LunarLander-v3", "transitions": 800_000, "environments": 16, "processes": 1, "horizon": 256,
    "epochs": 4, "minibatch": 256, "lr": 1e-3, "decay": True, "gamma": 0.995, "trace": 0.98, "entropy": 0.01,
}  # fmt: skip
PENDULUM: dict[str, Any] = {
    "environment": "control:sleepy_pendulum", "method": "sac", "environments": 4, "transitions": 6000,
    "minibatch": 128, "warmup": 500, "every": 500, "lr": 3e-3, "gamma": 0.97, "episodes": 1,
}  # fmt: skip


def sleepy_pendulum(mean_s: float) -> Any:
    """Pendulum-v1 whose steps sleep for log-normal times of this mean (sigma 1)."""
    import gymnasium

    class Sleepy(gymnasium.Wrapper):  # type: ignore[misc,type-arg]
        draw = np.random.default_rng(os.getpid())

        def step(self, action: Any) -> Any:
            time.sleep(self.draw.lognormal(np.log(mean_s) - 0.5, 1.0))
            return self.env.step(action)

    return Sleepy(gymnasium.make("Pendulum-v1"))


def processor_s() -> float:
    """Processor seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]  # fmt: skip
    return sum(each.ru_utime + each.ru_stime for each in used)


def run(control: dict[str, Any], seed: int, **train: Any) -> dict[str, Any]:
    """Run a recipe in a process of its own; its figures."""
    train = {"seed": seed, "threads": 1, "device": "cpu"} | train
    words = json.dumps({"control": control, "train": train})
    path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    own = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, __file__, "--run", words]
    done = subprocess.run(command, capture_output=True, text=True, env=own)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run_here(tree: dict[str, Any]) -> dict[str, Any]:
    """Run a recipe in this process; its figures."""
    from weft.api import start
    from weft.checkpoint.store import open_checkpoint
    from weft.recipe.read import build_recipe

    recipe, begun, spent = build_recipe(tree), time.perf_counter(), processor_s()
    with tempfile.TemporaryDirectory() as folder:
        outcome = start(recipe, Path(folder) / "run")
        rows = outcome.metrics()
        (evaluation,) = outcome.metrics("evaluation")
        late = [r for r in rows if r["step"] > 1]
        spent_in_steps = sum(r["step_s"] for r in late)
        figures = {
            "return": evaluation["return"], "own": evaluation["own"], "episodes": evaluation["episodes"],
            "transitions": rows[-1]["transitions"], "updates": rows[-1]["updates"],
            "ratio": rows[-1]["updates"] / rows[-1]["transitions"],
            "transitions_per_s": sum(r["transitions_per_s"] * r["step_s"] for r in late) / spent_in_steps,
            "seconds": time.perf_counter() - begun, "processor_s": processor_s() - spent,
        }  # fmt: skip
        if recipe.control is not None and recipe.control.method == "sac":
            checkpoint = open_checkpoint(outcome.checkpoint)
            figures["return"] = pendulum_return(checkpoint, recipe.control.hidden)
    return figures


def pendulum_return(checkpoint: Any, hidden: Any) -> float:
    """Mean return of 100 episodes of Pendulum that do not sleep."""
    import gymnasium
    import torch

    from weft.layout.dims import whole_box
    from weft.layout.parts import Part
    from weft.rl.control.acting_policy import best_actions, split_weights
    from weft.rl.control.environment_kinds import action_form

    world = gymnasium.make("Pendulum-v1")
    form, flat = action_form(world), []
    for number in range(len(hidden) + 1):
        for kind in ("weight", "bias"):
            tensor = checkpoint.tensors[name := f"model.actor.{2 * number}.{kind}"]
            values = torch.empty(tensor.shape)
            checkpoint.load({name: Part(values, whole_box(tensor.shape), tensor)})
            flat.append(values.flatten())
    layers = split_weights(torch.cat(flat).numpy(), (form.observed, *hidden, 2))
    returns = []
    for episode in range(100):
        seen, total, ended = world.reset(seed=1000 + episode)[0], 0.0, False
        while not ended:
            action = best_actions(form, layers, seen[None])[0]
            seen, reward, terminated, truncated, _ = world.step(action.astype(np.float32))  # fmt: skip
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    return mean(returns)


def solved(seeds: int) -> dict[str, Any]:
    """Both environments, with several seeds."""
    table = {}
    for name, control in (("CartPole-v1", CARTPOLE), ("LunarLander-v3", LUNAR)):
        rows = [run(control, seed) for seed in range(seeds)]
        table[name] = {"runs": rows, "median_return": median(r["return"] for r in rows)}
        print(name, [round(r["return"], 1) for r in rows], flush=True)
    return table


def carl(seeds: int) -> dict[str, Any]:
    """Product and sum of the same penalties, at both minibatches; all runs at once."""
    from concurrent.futures import ThreadPoolExecutor

    kinds = {
        f"{reward} {size}": {
            "environment": "CartPole-v1", "transitions": 16 * 8192, "environments": 16, "horizon": 512, "epochs": 8,
            "processes": 1, "minibatch": size, "lr": 3e-4 * (size / 64) ** 0.5, "reward": reward, "terms": PENALTIES,
        }
        for reward in ("product", "sum")
        for size in (64, 4096)
    }  # fmt: skip
    table: dict[str, Any] = {}
    with ThreadPoolExecutor(len(kinds) * seeds) as pool:
        runs = {k: [pool.submit(run, kinds[k], seed) for seed in range(seeds)] for k in kinds}  # fmt: skip
        for kind, started in runs.items():
            rows = [each.result() for each in started]
            table[kind] = {"lr": kinds[kind]["lr"], "runs": rows}
            table[kind] |= {key: mean(r[key] for r in rows) for key in ("return", "own")}  # fmt: skip
            print(kind, [round(r["return"], 1) for r in rows], flush=True)
    for reward in ("product", "sum"):
        kept = table[f"{reward} 4096"]["return"] / table[f"{reward} 64"]["return"]
        table[f"{reward} kept"] = kept
    return table


def workers(seeds: int) -> dict[str, Any]:
    """Rates of transitions with slow steps, nobody waiting, and returns at equal transitions and updates.

    All runs of a kind are at once, as they mostly sleep.
    """
    from concurrent.futures import ThreadPoolExecutor

    slow = {
        **PENDULUM,
        "settings": {"mean_s": SLEEP_S},
        "transitions": 800,
        "every": 100,
        "warmup": 200,
    }
    equal = {**PENDULUM, "settings": {"mean_s": 0.002}}
    kinds = {
        "slow, own pace": {**slow},
        "slow, together": {**slow, "lockstep": True},
        "equal, own pace": {**equal, "ratio": 1.0},
        "equal, together": {**equal, "lockstep": True},
    }
    table: dict[str, Any] = {}
    with ThreadPoolExecutor(2 * seeds) as pool:
        for pair in (list(kinds)[:2], list(kinds)[2:]):
            runs = {
                k: [pool.submit(run, kinds[k], seed) for seed in range(seeds)]
                for k in pair
            }
            for kind, started in runs.items():
                rows = [each.result() for each in started]
                table[kind] = {"runs": rows} | {
                    key: mean(r[key] for r in rows)
                    for key in ("return", "transitions_per_s", "ratio")
                }
                print(
                    kind,
                    table[kind]["transitions_per_s"],
                    [round(r["return"], 1) for r in rows],
                    flush=True,
                )
    own, together = table["slow, own pace"], table["slow, together"]
    table["faster"] = own["transitions_per_s"] / together["transitions_per_s"]
    own, together = (
        table["equal, own pace"]["return"],
        table["equal, together"]["return"],
    )
    table["return_difference"] = abs(own - together) / abs(together)
    return table


def ranks(seeds: int) -> dict[str, Any]:
    """The largest difference of a parameter between one rank and two, after 20 steps of the run."""
    import torch

    from weft.api import start
    from weft.checkpoint.store import open_checkpoint
    from weft.layout.dims import whole_box
    from weft.layout.parts import Part
    from weft.recipe.read import build_recipe

    control = {
        "environment": "CartPole-v1",
        "environments": 8,
        "horizon": 32,
        "minibatch": 64,
        "transitions": 20 * 256,
    }
    values = []
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, 2):
            train = {"dtype": "float64", "threads": 1, "device": "cpu"}
            recipe = build_recipe(
                {"control": control, "train": train, "layout": {"dp": count}}
            )
            checkpoint = open_checkpoint(
                start(recipe, Path(folder) / str(count)).checkpoint
            )
            names = sorted(n for n in checkpoint.tensors if n.startswith("model."))
            parts = {
                n: Part(
                    torch.empty(t.shape, dtype=torch.float64), whole_box(t.shape), t
                )
                for n in names
                for t in [checkpoint.tensors[n]]
            }
            checkpoint.load(parts)
            values.append(torch.cat([parts[n].values.flatten() for n in names]))
    return {"steps": 20, "difference": float((values[0] - values[1]).abs().max())}


def main() -> None:
    parts = {"solved": solved, "carl": carl, "workers": workers, "ranks": ranks}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        print(json.dumps(run_here(json.loads(asked.run))))
        return
    for part in asked.parts:
        figures = parts[part](asked.seeds)
        print(json.dumps({part: figures}, indent=1))
        if asked.json:
            known = json.loads(asked.json.read_text()) if asked.json.exists() else {}
            asked.json.write_text(json.dumps(known | {part: figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
