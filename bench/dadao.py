"""Islands without rounds (DADAO) beside islands that sum their gradients in every step, at equally many gradients.

    python bench/dadao.py [--steps 400] [--seeds 1] [--sides a2cid2 dadao] [--quick] [--json bench/results/dadao.json]

Four islands train a small transformer, each side at three settings; the best of each side counts. The loss at
the end is on what is held out, of the islands' mean; ``MiB`` is what a rank says it has sent to others (islands that
sum gradients do not say it: 0). Islands that sum gradients compute what one device would. The sides between them and
DADAO show what DADAO loses where: islands that average their parameters after every step have AdamW of a quarter of
the batch each, and nothing else; A2CiD2 exchanges in pairs as often as DADAO does, without its momentum. DADAO itself
runs at the paper's pace, at which a unit of its equation's time passes between two gradients, and at a larger one.
Rows of settings that the file already has are kept, so that an interrupted bench goes on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from step import machine

from weft.layout.mesh import Mesh
from weft.observe.run_metrics import read_metrics
from weft.prove.pool import ProcessPool
from weft.recipe import Recipe, build_recipe, load_recipe
from weft.techniques.sync.dadao.dynamics import Dynamics
from weft.train.setup import prepare
from weft.train.training import train_job

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "dadao.json"
ISLANDS = 4
#: AdamW's momentum.
BETA = 0.9
#: All links between four islands: averages over them after every step leave no distance between the islands.
ALL = "[" + ", ".join(f"[{i}, {j}]" for j in range(ISLANDS) for i in range(j)) + "]"
#: The same rates for each side; those of DADAO are larger, as its parameters move by less than its optimizer's steps.
RATES = (4e-3, 6e-3, 9e-3)
OFTEN = "sync.exchanges=6.0"
NEIGHBOURS = "sync.moments=neighbours"
#: DADAO as the paper has it: a gradient in each unit of time.
PAPER = "sync.pace=1.0"
#: Six units of its time between two gradients, and as many exchanges as its theory then requires.
SETTLED = ["sync.update=dadao", "sync.pace=6.0", NEIGHBOURS]
#: A shorter momentum of AdamW than the recipe's.
SHORT = "optimizer.betas=[0.8, 0.95]"
#: Settings of each side, and the rates and further settings that it is tried with. From one side to the next one thing
#: changes: optimizers see a quarter of the batch; islands exchange in pairs, at random times; second moments are of
#: gradients of neighbours; DADAO's own momentum.
SIDES: dict[str, tuple[list[str], list[tuple[float, list[str]]]]] = {
    "gradients summed": (["sync.update=average"], [(rate, []) for rate in RATES]),
    "gradients summed, short momentum": (
        ["sync.update=average", SHORT],
        [(rate, []) for rate in RATES],
    ),
    "parameters averaged": (
        ["sync.update=average", "sync.partner=graph", f"sync.graph={ALL}"],
        [(rate, []) for rate in RATES],
    ),
    "a2cid2": (["sync.update=a2cid2", OFTEN], [(rate, []) for rate in RATES]),
    "a2cid2, moments of neighbours": (
        ["sync.update=a2cid2", OFTEN, NEIGHBOURS],
        [(rate, []) for rate in RATES],
    ),
    "a2cid2, moments of neighbours, 16 exchanges": (
        ["sync.update=a2cid2", NEIGHBOURS, "sync.exchanges=16.0"],
        [(rate, []) for rate in RATES],
    ),
    "dadao": (
        ["sync.update=dadao", PAPER, OFTEN],
        [
            (1.2e-2, ["sync.condition=1.0"]),
            (2e-2, ["sync.condition=0.25"]),
            (6e-3, ["sync.condition=8.0", "optimizer.betas=[0.0, 0.95]"]),
        ],
    ),
    "dadao, moments of neighbours": (
        ["sync.update=dadao", PAPER, OFTEN, NEIGHBOURS],
        [
            (1.2e-2, ["sync.condition=1.0"]),
            (2e-2, ["sync.condition=0.25"]),
            (2e-2, ["sync.condition=0.25", "optimizer.betas=[0.95, 0.95]"]),
        ],
    ),
    "dadao, pace 6, moments of neighbours": (
        SETTLED,
        [
            (7.5e-3, ["sync.condition=0.12"]),
            (9e-3, ["sync.condition=0.12"]),
            (1.05e-2, ["sync.condition=0.12"]),
        ],
    ),
    "dadao, pace 6, moments of neighbours, short momentum": (
        [*SETTLED, SHORT],
        [
            (6e-3, ["sync.condition=0.2"]),
            (6e-3, ["sync.condition=0.12"]),
            (9e-3, ["sync.condition=0.12"]),
        ],
    ),
}
#: The side to which the others are compared.
FIRST = next(iter(SIDES))


def final_loss(values: dict[str, Any], out: str) -> tuple[float, float]:
    """On every rank: train; the validation loss of this rank's island at the end, and the MiB that the rank sent."""
    recipe = build_recipe(values)
    outcome = train_job(prepare(recipe), Mesh.create(recipe.layout, "cpu"), Path(out))
    return float(outcome.validations[-1]), sent_mib(outcome.run)


def sent_mib(run: Path) -> float:
    """Return the MiB that a rank says at the end of its run that it has sent to others; 0 if it says nothing."""
    said = [
        str(row.get("message", "")).partition("has sent ")[2]
        for row in read_metrics(run).get("event", [])
    ]
    return float(next((text.split()[0] for text in reversed(said) if text), 0.0))


def island_recipe(
    side: str, rate: float, more: list[str], steps: int, seed: int
) -> Recipe:
    """Return the recipe of a run of one side."""
    return load_recipe(ROOT / "recipes/islands.toml", [
        *SIDES[side][0], "sync.every=1", "sync.compress=none", f"train.steps={steps}", "train.batch=64",
        "optimizer.min_lr=0.0", f"optimizer.lr={rate}", "model.embed=32", "model.heads=2", "data.seq_len=64",
        "checkpoint.every=0", f"validation.every={steps}", "train.threads=1", f"train.seed={seed}", *more,
    ], f"island={ISLANDS}")  # fmt: skip


def borne_curvature(condition: float, beta: float, pace: float) -> float:
    """Return how much curvature DADAO bears after an optimizer with momentum ``beta`` before it diverges.

    It is the largest curvature, times the speed of the parameters under a constant gradient. Without DADAO it
    is ``2 (1 + beta) / (1 - beta)``.
    """
    links = [(i, j) for j in range(ISLANDS) for i in range(j)]
    dynamics = Dynamics(condition, 1.0, pace, links=links)
    flow = np.eye(7)
    flow[1:, 1:] = dynamics.flow(1.0).numpy()
    jump = np.eye(
        7
    )  # what a gradient does: columns are the momentum, then the rows of the state
    states = torch.eye(6, dtype=torch.float64)
    dynamics.learn(states, torch.zeros(6, dtype=torch.float64))
    jump[1:, 1:] = states.numpy()
    pushed = torch.zeros(6, 1, dtype=torch.float64)
    dynamics.learn(pushed, torch.ones(1, dtype=torch.float64))
    jump[1:, 0] = pushed[:, 0].numpy()

    def step(curvature: float) -> npt.NDArray[np.float64]:
        momentum = np.eye(7)
        momentum[0, 0], momentum[0, 1] = beta, (1 - beta) * curvature
        return flow @ jump @ momentum

    low, high = 0.0, 400.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        stable = np.abs(np.linalg.eigvals(step(middle))).max() < 1 + 1e-9
        low, high = (middle, high) if stable else (low, middle)
    state, places = np.zeros(7), []
    for _ in range(600):
        state[0] = 1.0
        state = flow @ jump @ state
        places.append(-state[1])
    return low * float(places[-1] - places[-101]) / 100


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=list(SIDES), help="by default all"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few steps at one rate: whether it runs"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    steps = 6 if given.quick else given.steps
    before = json.loads(given.json.read_text()) if given.json.exists() else {}
    if before.get("steps") != steps:
        before = {}
    results: dict[str, Any] = {
        "machine": machine(),
        "steps": steps,
        "runs": [row for row in before.get("runs", []) if row.get("side") in SIDES],
    }
    results["borne curvature"] = {
        "AdamW": 2 * (1 + BETA) / (1 - BETA),
        **{
            f"with DADAO at pace {pace}, by condition": {
                condition: round(borne_curvature(condition, BETA, pace), 2)
                for condition in (0.12, 0.25, 1.0, 8.0)
            }
            for pace in (1.0, 6.0)
        },
    }
    if longer := before.get("after 1200 steps"):  # copied here from dadao_long.json
        results["after 1200 steps"] = longer
    runs = results["runs"]
    pool = ProcessPool()
    try:
        for seed in given.seeds:
            for side in given.sides:
                tried = SIDES[side][1]
                for rate, more in tried[:1] if given.quick else tried:
                    asked = {"side": side, "rate": rate, "more": more, "seed": seed}
                    if any(asked.items() <= row.items() for row in runs):
                        continue
                    recipe = island_recipe(side, rate, more, steps, seed)
                    with tempfile.TemporaryDirectory() as out:
                        each = pool.run(
                            ISLANDS, final_loss, recipe.model_dump(mode="json"), f"{out}/run", timeout=7200
                        )  # fmt: skip
                    loss, sent = each[0]
                    runs.append(asked | {"loss": loss, "MiB": sent})
                    print(runs[-1], flush=True)
                    results |= compared(runs)
                    given.json.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        pool.close()
    print(f"of the loss of gradients summed: {results['loss over synchronous']}")


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best run of each side by seed, and its loss over that of islands that sum gradients."""
    best: dict[str, dict[str, Any]] = {}
    for row in runs:
        sides = best.setdefault(str(row["seed"]), {})
        if row["loss"] < sides.get(row["side"], {"loss": float("inf")})["loss"]:
            sides[row["side"]] = row
    ratios = {
        seed: {
            side: round(row["loss"] / sides[FIRST]["loss"], 4)
            for side, row in sides.items()
        }
        for seed, sides in best.items()
        if FIRST in sides
    }
    return {"best": best, "loss over synchronous": ratios}


if __name__ == "__main__":
    main()
