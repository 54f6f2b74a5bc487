"""Every optimizer on one small model and the same tokens: final loss, bytes of state per parameter, time of an update.

    python bench/optimizers.py [--steps 300] [--quick] [--json bench/results/optimizers.json]

Each way is trained at the best of a few learning rates, as their sizes of a step differ. The peer of the small moments
and of GaLore is AdamW in full precision. Losses are means over all tokens of the held-out part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from step import machine

from weft.layout.mesh import Mesh
from weft.recipe import Optimizer, Recipe, load_recipe
from weft.train.rule_optimizer import learning_rate
from weft.train.setup import Job, build_for_training, prepare
from weft.train.step import (
    clear_gradients,
    clip_scale,
    evaluate,
    reduced_gradients,
    step_result,
    update,
)

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "optimizers.json"
RATES = (1e-3, 3e-3)
WAYS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw, bfloat16 moments": {"state": "bfloat16"},
    "adamw, 8 bits": {"state": "8bit"},
    "adamw, 4 bits": {"state": "4bit"},
    "lion": {"kind": "lion", "betas": (0.95, 0.98)},
    "adafactor": {"kind": "adafactor"},
    "muon": {"kind": "muon"},
    "galore, rank 16": {"kind": "galore", "rank": 16, "refresh": 50},
    "natural galore, rank 16": {"kind": "natural-galore", "rank": 16, "refresh": 50},
}
#: Of the peer's rate: Lion's steps are larger, and GaLore scales its own.
FACTORS = {
    "lion": 0.2,
    "adafactor": 10.0,
    "galore, rank 16": 5.0,
    "natural galore, rank 16": 0.2,
}


class Trained(NamedTuple):
    loss: float
    bytes_per_parameter: float
    update_ms: float


def trained(job: Job, optimizer: Optimizer, steps: int) -> Trained:
    """Train from the recipe's first values; the loss on what is held out."""
    recipe = job.recipe.model_copy(update={"optimizer": optimizer})
    mesh = Mesh.single()
    model, state = build_for_training(job.shape, mesh, recipe)
    loader, times = job.loader(job.corpus.train, mesh), []
    for step in range(steps):
        batches = loader.step(step * recipe.train.batch)
        assert batches is not None
        grads, sums = reduced_gradients(model, state, batches, mesh)
        scale = clip_scale(step_result(sums).grad_norm, optimizer.clip)
        begun = time.process_time()
        update(state, grads, learning_rate(optimizer, step, steps), scale)
        times.append(time.process_time() - begun)
        clear_gradients(model, state)
    assert job.corpus.validation is not None
    held_out = job.loader(job.corpus.validation, mesh)
    loss = evaluate(
        model,
        state,
        (b for i in range(8) if (b := held_out.step(i * recipe.train.batch))),
        mesh,
    )
    kept = sum(
        p.values.numel() * p.values.element_size()
        for h in state.held
        for p in h.slots.values()
    )
    return Trained(
        loss,
        kept / sum(h.local.numel() for h in state.held),
        1e3 * statistics.median(times),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--quick", action="store_true", help="a few steps at one rate: whether it runs"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    steps, rates = (4, RATES[:1]) if given.quick else (given.steps, RATES)
    torch.set_num_threads(1)
    recipe: Recipe = load_recipe(ROOT / "recipes" / "optimizers.toml")
    job, rows = prepare(recipe), {}
    plain = {"warmup": recipe.optimizer.warmup}
    for name, way in WAYS.items():
        factor = FACTORS.get(name, 1.0)
        runs = {
            rate * factor: trained(
                job, Optimizer(**plain, **way, lr=rate * factor), steps
            )
            for rate in rates
        }
        rate, best = min(runs.items(), key=lambda item: item[1].loss)
        rows[name] = best._asdict() | {
            "lr": rate,
            "losses": {f"{r:.0e}": run.loss for r, run in runs.items()},
        }
        ratio = best.loss / rows["adamw"]["loss"]
        print(
            f"{name:<26} loss {best.loss:.4f} ({ratio:.3f} of adamw)  {best.bytes_per_parameter:5.2f} bytes/parameter  "
            f"update {best.update_ms:6.1f} ms  lr {rate:.0e}", flush=True,
        )  # fmt: skip
    if not given.quick:
        given.json.write_text(
            json.dumps({"machine": machine(), "steps": steps, "rows": rows}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
