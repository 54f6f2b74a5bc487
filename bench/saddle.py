"""MASHA beside naive compression and the whole extragradient method, over four real ranks.

    python bench/saddle.py [--quick] [--out bench/results/saddle.json]

Four ranks, processes of their own, look for the saddle point of a bilinear game with 2 x 20 values. Each method runs at
several step sizes. `distance` is that to the saddle point after all rounds, as a part of the first one; `MB` is what
each device has sent. A method that leaves all bounds has the distance null. `gan` trains the adversarial network of
`recipes/gan.toml`: `frechet` is the distance of generated images from digits, before training `first`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from step import machine

from weft.layout.mesh import Mesh
from weft.prove.pool import ProcessPool
from weft.recipe.read import build_recipe, load_recipe
from weft.saddle.saddle_run import open_saddle

RESULTS = Path(__file__).parent / "results" / "saddle.json"
#: Method, its compressor, and its step sizes.
SIDES = (
    ("extragradient", "none", (0.2,)),
    ("masha1", "randk:0.2", (0.04,)),
    ("masha2", "topk:0.2", (0.04,)),
    ("masha2", "int4", (0.2,)),
    ("naive", "randk:0.2", (0.4, 0.04, 0.004)),
    ("naive", "topk:0.2", (0.4, 0.04, 0.004)),
)


def searched(values: dict[str, Any], rounds: int) -> dict[str, Any]:
    """On every rank: look for the saddle point; return how near it came and what was sent."""
    recipe = build_recipe(values)
    method = open_saddle(recipe, Mesh.create(recipe.layout, torch.device("cpu")))
    for number in range(rounds):
        changes = method.take_round(number)
        if not all(bool(t.isfinite().all()) for t in changes.values()):
            break
    what = "distance" if recipe.saddle.problem == "bilinear" else "frechet"
    distance = method.problem.measures(method.values)[what]
    return {
        what: float(f"{distance:.3g}") if math.isfinite(distance) else None,
        "MB": round(method.traffic(number + 1)[0] / 1e6, 4),
        "rounds": number + 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    rounds = 20 if given.quick else 3_000
    results: dict[str, Any] = {"machine": machine(), "ranks": 4, "rounds": rounds, "sides": {}}  # fmt: skip
    pool = ProcessPool()
    try:
        for method, compress, rates in SIDES:
            side = results["sides"][f"{method} {compress}"] = {}
            for rate in rates:
                saddle = {"method": method, "compress": compress, "lr": rate}
                recipe = build_recipe({
                    "saddle": saddle, "layout": {"dp": 4}, "train": {"dtype": "float64"},
                })  # fmt: skip
                side[str(rate)] = pool.run(4, searched, recipe.model_dump(mode="json"), rounds)[0]  # fmt: skip
                print(method, compress, rate, side[str(rate)], flush=True)
        images = results["gan"] = {}
        for method, compress in (("extragradient", "none"), ("masha2", "topk:0.1"), ("naive", "topk:0.1")):  # fmt: skip
            recipe = load_recipe("recipes/gan.toml", [
                f"saddle.method={method}", f"saddle.compress={compress}", "layout.dp=4",
            ])  # fmt: skip
            few = 10 if given.quick else 1_500
            images[f"{method} {compress}"] = pool.run(4, searched, recipe.model_dump(mode="json"), few)[0]  # fmt: skip
            print("gan", method, compress, images[f"{method} {compress}"], flush=True)
        start = open_saddle(recipe, Mesh.single())
        first = start.problem.measures(start.values)["frechet"]
        images["first"] = float(f"{first:.3g}")
    finally:
        pool.close()
    given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
