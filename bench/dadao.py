"""Islands without rounds (DADAO) beside islands that sum their gradients in every step, at equally many gradients.

    python bench/dadao.py [--steps 400] [--seeds 1] [--quick] [--json bench/results/dadao.json]

Four islands train a small transformer, each side at several settings; the best of each side counts. The loss at the end
is on what is held out, of the first island; ``MiB`` is what a rank says it has sent to others (synchronous ones do not
say it: 0). Synchronous islands compute what one device would. An island without rounds divides by the size of its own
gradients (AdamW), and its steps add up to less, so that its rates are larger. The momentum of DADAO does not go with a
late gradient at a large ``sync.condition``. Rows of settings that the file already has are kept, so that an interrupted
bench goes on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from step import machine

from weft.layout.mesh import Mesh
from weft.observe.run_metrics import read_metrics
from weft.prove.pool import ProcessPool
from weft.recipe import Recipe, build_recipe, load_recipe
from weft.train.setup import prepare
from weft.train.training import train_job

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "dadao.json"
ISLANDS = 4
#: Rates and further settings that each side is tried with.
GRID: dict[str, list[tuple[float, list[str]]]] = {
    "average": [(rate, []) for rate in (6e-3, 1.2e-2)],
    "dadao": [
        (1.2e-2, ["sync.condition=1.0", "sync.exchanges=6.0"]),
        (2e-2, ["sync.condition=0.25", "sync.exchanges=6.0"]),
        (1.2e-2, ["sync.condition=1.0", "sync.exchanges=6.0", "optimizer.betas=[0.7, 0.95]"]),
        (6e-3, ["sync.condition=8.0", "sync.exchanges=6.0", "optimizer.betas=[0.0, 0.95]"]),
    ],
}  # fmt: skip


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
    update: str, rate: float, more: list[str], steps: int, seed: int
) -> Recipe:
    """Return the recipe of a run of one side."""
    return load_recipe(ROOT / "recipes/islands.toml", [
        f"sync.update={update}", "sync.every=1", "sync.compress=none", f"train.steps={steps}", "train.batch=64",
        "optimizer.min_lr=0.0", f"optimizer.lr={rate}", "model.embed=32", "model.heads=2", "data.seq_len=64",
        "checkpoint.every=0", f"validation.every={steps}", "train.threads=1", f"train.seed={seed}", *more,
    ], f"island={ISLANDS}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
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
        "machine": machine(), "steps": steps, "runs": before.get("runs", [])
    }  # fmt: skip
    runs = results["runs"]
    pool = ProcessPool()
    try:
        for seed in given.seeds:
            for update, tried in GRID.items():
                for rate, more in tried[:1] if given.quick else tried:
                    asked = {"update": update, "rate": rate, "more": more, "seed": seed}
                    if any(asked.items() <= row.items() for row in runs):
                        continue
                    recipe = island_recipe(update, rate, more, steps, seed)
                    with tempfile.TemporaryDirectory() as out:
                        each = pool.run(
                            ISLANDS, final_loss, recipe.model_dump(mode="json"), f"{out}/run", timeout=1800
                        )  # fmt: skip
                    loss, sent = each[0]
                    runs.append(asked | {"loss": loss, "MiB": sent})
                    print(runs[-1], flush=True)
                    results |= compared(runs)
                    given.json.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        pool.close()
    print(f"without rounds {results['loss over synchronous']} of synchronous loss")


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best run of each side by seed, and the ratios of their losses."""
    best: dict[str, dict[str, Any]] = {}
    for row in runs:
        side = best.setdefault(str(row["seed"]), {})
        if row["loss"] < side.get(row["update"], {"loss": float("inf")})["loss"]:
            side[row["update"]] = row
    ratios = {
        seed: round(side["dadao"]["loss"] / side["average"]["loss"], 4)
        for seed, side in best.items()
        if len(side) == len(GRID)
    }
    return {"best": best, "loss over synchronous": ratios}


if __name__ == "__main__":
    main()
