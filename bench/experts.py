"""One training step of a mixture of experts: Weft beside ``transformers``, and ways to spread its experts over ranks.

In one process the peer is ``transformers``' Qwen3-MoE in the same hand-written loop as in ``bench/step.py``. On four
ranks all sides are Weft's: experts only cut in their state (``shard=4``) beside ``ep=4`` with each way to move tokens.
All sides start from the same weights, see the same rows and must report the same losses. They take turns.

``placed`` trains a model and counts what its tokens choose on text that it has not learned from. From a half of that
follows which rank has which experts; on the other half it is counted how often a token's next expert is on another
rank than its last, and how unequal the ranks' loads are, beside experts dealt out at random.

    python bench/experts.py [--rounds 8] [--only single|ranks|placed] [--json bench/results/experts.json]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step import (
    Job,
    Step,
    machine,
    measure,
    on_ranks,
    plain_step,
    show,
    single,
    weft_alone,
    weft_step,
    write,
)
from torch import nn

from weft.checkpoint.convert.routing import chosen_experts
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.hugging_face import export
from weft.observe.flops import measured_flops
from weft.parallel.experts import affinity
from weft.recipe import ModelShape, load_recipe
from weft.registry import names
from weft.shapes.parameters import parameters
from weft.techniques.dispatch.timed.trials import LEFT_OUT
from weft.train.rule_optimizer import learning_rate
from weft.train.setup import build_for_training, prepare
from weft.train.step import train_step

RECIPE = Path(__file__).parents[1] / "recipes" / "experts.toml"
RESULTS = Path(__file__).parent / "results" / "experts.json"
QWEN: dict[str, Any] = {"qk_norm": True, "router": "pre-softmax", "router_norm": True}
#: 16 experts of which each token goes through 4: the products of one of them have few rows, as in large models.
TINY = ModelShape(
    vocab=2048,
    layers=4,
    embed=256,
    heads=8,
    kv_heads=2,
    experts=16,
    experts_per_token=4,
    expert_ffn=128,
    **QWEN,
)
JOBS = {
    "tiny": Job(TINY, 8, 256),
    # Qwen3-30B-A3B has 74 words for each of its 2,048 channels.
    "tiny, 16k words": Job(TINY.model_copy(update={"vocab": 16_384}), 8, 256),
    "smoke": Job(
        ModelShape(
            vocab=64, layers=1, embed=32, heads=2, kv_heads=2, experts=4, experts_per_token=2, expert_ffn=16, **QWEN
        ), 4, 16,
    ),
}  # fmt: skip
#: The options of ``timed`` on four ranks: three ways for blocks of one or two ranks, and one where all are a block.
OPTIONS = 7
DISPATCH = names("dispatch")


def transformers_model(job: Job, weights: dict[str, torch.Tensor]) -> nn.Module:
    """``transformers``' model of the same family, from an export of these ``weights``."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        export(weights, job.shape, Path(folder) / "model")
        model = AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model", dtype=torch.float32
        )
    model.config.use_cache = False
    return model.train()


def transformers_alone(job: Job) -> Step:
    theirs = transformers_model(job, weft_step(job, Mesh.single())[1])
    return plain_step(job, theirs, lambda tokens: theirs(tokens).logits)


def on_rank(rank: int, job: Job, rounds: int, peak: float) -> dict[str, Any]:
    """One of four ranks. ``weft``, to which all are compared, is that whose experts stay where their tokens are."""
    layouts = {"weft": Layout(shard=4)} | {
        way: Layout(shard=4, ep=4, dispatch=way, node=2) for way in DISPATCH
    }
    sides: dict[str, Step] = {
        name: weft_step(job, Mesh.create(one, "cpu"))[0]
        for name, one in layouts.items()
    }
    trials = {"timed": len(LEFT_OUT) * OPTIONS}
    return measure(job, sides, rounds, 1, min(4, os.cpu_count() or 1) * peak, trials)


def routing(steps: int) -> tuple[list[np.ndarray], list[np.ndarray], list[int], float]:
    """What tokens of two halves of unseen text choose in the recipe's model, trained so long; experts; the last loss.

    With more layers and experts than the recipe has, so that there is something to place.
    """
    changes = ["model.layers=4", "model.experts=16", "model.init_std=0.02", "model.balance_loss=0.01", "layout.shard=1",
               f"train.steps={steps}"]  # fmt: skip
    settings = load_recipe(RECIPE, changes)
    job, mesh = prepare(settings), Mesh.single()
    model, state = build_for_training(job.shape, mesh, settings)
    loader, batch = job.loader(job.corpus.train, mesh), settings.train.batch
    loss = 0.0
    for step in range(steps):
        lr = learning_rate(settings.optimizer, step, steps)
        loss = train_step(
            model, state, loader.step(step * batch) or [], mesh, lr=lr, clip=1.0
        ).loss
    unseen = job.loader(job.corpus.validation, mesh)
    rows = [
        one.tokens.flatten() for n in range(16) for one in unseen.step(n * batch) or []
    ]
    halves = (
        chosen_experts(model, torch.cat(one).tolist())
        for one in (rows[::2], rows[1::2])
    )
    return *halves, list(job.shape.mixtures.values()), loss


def placed(steps: int) -> dict[str, Any]:
    """Steps from layer to layer that change the rank, and the largest load over the mean, of each way to place."""
    torch.set_num_threads(1)  # so small a model is no faster with more
    before, after, experts, loss = routing(steps)
    counted = [affinity.loads_of(half, experts) for half in (before, after)]
    known, unseen = (affinity.steps_between(half, experts) for half in (before, after))
    found: dict[str, Any] = {"steps": steps, "loss": loss, "tokens": len(after[0])}
    for ranks in (2, 4, 8):
        drawn = [affinity.random_owners(experts, ranks, seed) for seed in range(100)]
        ways = {"random": drawn, "in order": [[np.sort(one) for one in drawn[0]]]}
        ways |= {name: [affinity.place_experts(known, counted[0], ranks, level)]
                 for name, level in {"affinity": 0.0, "both": 3.0, "load": 1000.0}.items()}  # fmt: skip
        found[str(ranks)] = {
            name: {
                "crossings": 1
                - statistics.mean(
                    affinity.share_that_stays(unseen, one) for one in owners
                ),
                "load": statistics.mean(
                    affinity.largest_load(counted[1], one) for one in owners
                ),
            }
            for name, owners in ways.items()
        }
        for row in found[str(ranks)].values():
            row["fewer"] = found[str(ranks)]["random"]["crossings"] / row["crossings"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns of every side")
    parser.add_argument("--only", choices=["single", "ranks", "placed"])
    parser.add_argument(
        "--steps", type=int, default=300, help="of training before experts are placed"
    )
    parser.add_argument("--job", choices=list(JOBS), help="default: all but smoke")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine(),
        "rounds": options.rounds,
        "jobs": {},
    }
    torch.set_num_threads(1)
    peak = measured_flops(torch.device("cpu"), torch.float32)  # of one core
    asked = [options.job] if options.job else [name for name in JOBS if name != "smoke"]
    for name in asked if options.only != "placed" else ():
        job = JOBS[name]
        found = results["jobs"][name] = {
            "shape": job.shape.model_dump(exclude_defaults=True), "rows": job.rows, "length": job.length,
        }  # fmt: skip
        size = sum(p.numel for p in parameters(job.shape, job.shape.vocab)) / 1e6
        title = f"{name}: {size:.1f}M parameters, {job.rows} x {job.length} tokens per step, float32"
        if options.only in (None, "single"):
            sides = {"weft": weft_alone, "transformers": transformers_alone}
            found["single"] = single(job, sides, options.rounds, 1, peak)
            show(f"{title}, one process", found["single"])
        if options.only in (None, "ranks"):
            found["ranks"] = on_ranks(4, on_rank, job, options.rounds, peak)
            show(
                f"{title}, 4 ranks; weft: shard=4, the others: shard=4,ep=4",
                found["ranks"],
            )
    if options.only in (None, "placed"):
        results["placed"] = placed(options.steps)
        for ranks, ways in results["placed"].items():
            for name, row in ways.items() if isinstance(ways, dict) else ():
                print(f"{ranks} ranks, {name:<8}  {row['crossings']:.1%} cross, {row['fewer']:.2f}x fewer than at "
                      f"random; largest load {row['load']:.2f} of the mean")  # fmt: skip
    write(results, options.json)


if __name__ == "__main__":
    main()
