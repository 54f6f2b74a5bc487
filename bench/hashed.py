"""What it costs to send experts the means of tokens that are alike (LSH-MoE): rows sent, and the loss after training.

One process trains the same small model with each number of rotations, with and without the residual; its tokens are
those of one rank. Losses are means over the last 25 steps.

    python bench/hashed.py [--steps 300] [--json bench/results/hashed.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.experts import Mixture
from weft.parallel.experts.hashed import Hashed
from weft.recipe import load_recipe
from weft.train.rule_optimizer import learning_rate
from weft.train.setup import build_for_training, prepare
from weft.train.step import train_step

RECIPE = Path(__file__).parents[1] / "recipes" / "experts.toml"
SETTINGS = ["model.expert_ffn=64", "model.init_std=0.02", "model.balance_loss=0.01", "optimizer.warmup=20",
            "train.batch=8", "data.seq_len=128"]  # fmt: skip


def trained(steps: int, lsh: int, residual: bool) -> dict[str, Any]:
    """Loss and rows sent, of those that would be without means."""
    recipe, mesh = load_recipe(RECIPE, SETTINGS, ""), Mesh.single()
    job = prepare(recipe)
    model, state = build_for_training(job.shape, mesh, recipe)
    layout = Layout(ep=2, dp=2, lsh=lsh, lsh_residual=residual)
    sent = rows = 0

    def buckets(self: Hashed, x: Any, ids: Any) -> Any:
        nonlocal sent, rows
        found = split(self, x, ids)
        sent, rows = sent + len(found[1]), rows + ids.numel()
        return found

    split, losses, loader = Hashed._buckets, [], job.loader(job.corpus.train, mesh)
    for mixture in (
        module for module in model.modules() if lsh and isinstance(module, Mixture)
    ):
        ranks = mock.Mock(
            items=mixture.router.count,
            pieces=1,
            declared=lambda x: x,
            **{"mesh.layout": layout},
        )
        mixture.dispatcher = Hashed(ranks, mixture.dispatcher)
    with mock.patch.object(Hashed, "_buckets", buckets):
        for step in range(steps):
            rate = learning_rate(recipe.optimizer, step, steps)
            batches = loader.step(step * recipe.train.batch) or []
            losses.append(
                train_step(model, state, batches, mesh, lr=rate, clip=1.0).loss
            )
    last = losses[-25:]
    return {
        "lsh": lsh,
        "residual": residual,
        "loss": sum(last) / len(last),
        "rows": sent / rows if lsh else 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = []
    for lsh, residual in [
        (0, False),
        *((n, r) for n in (1, 2, 4) for r in (False, True)),
    ]:
        found.append(trained(given.steps, lsh, residual))
        over = found[-1]["loss"] / found[0]["loss"] - 1
        print(f"{found[-1]}  {over:+.1%}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
