"""Does the repetition-aware law, fitted to short runs on single pools, know which pools a longer run should read?

    nice -n 10 python bench/data_laws.py [--work FOLDER] [--quick] [--json bench/results/data_laws.json]

Two pools of characters: clean (files of the standard library) and noisy (other files of it, of which 30 % of the
characters have changed places). Small models are trained by Weft's API on 1 to 4 epochs of each pool alone, with two
sizes of the pools, and the law is fitted as ``weft data plan`` does. It then predicts for 2 and 16 times as many
samples as a pool has whether clean alone or clean and noisy together is better, and both are trained, with another
seed. So there are four held-back cells. All losses are on the same clean files that no run learns from. Runs that are
done are kept in ``--work``, so that the script goes on where it was ended.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from dataclasses import asdict
from pathlib import Path
from typing import Any

from step import machine, write

from weft.api import start
from weft.curation.data_plan import plan_data
from weft.curation.measured_runs import read_measured
from weft.curation.repetition_fit import FittedLaw, fit_repetition_law
from weft.observe.run_metrics import read_metrics
from weft.recipe import Recipe, build_recipe

RESULTS = Path(__file__).parent / "results" / "data_laws.json"
#: Share of the noisy pool's characters that change places.
NOISE = 0.3
SIZES, EPOCHS, TIMES = (48_000, 96_000), (1, 2, 3, 4), (2, 16)
SEQUENCE, BATCH = 128, 4
#: Weight decay, 30 times the usual one: with less, pools of this size are learned by heart, and losses rise again.
DECAY = 3.0
MODEL = {"layers": 2, "embed": 56, "heads": 4, "kv_heads": 4, "tied": True}


def shuffled(text: str, share: float, seed: int) -> str:
    """Return ``text`` with a share of its characters exchanged among their places."""
    chance, letters = random.Random(seed), list(text)
    places = chance.sample(range(len(letters)), int(share * len(letters)))
    moved = places.copy()
    chance.shuffle(moved)
    for place, source in zip(places, moved, strict=True):
        letters[place] = text[source]
    return "".join(letters)


def write_pools(folder: Path, sizes: tuple[int, ...]) -> None:
    """Write pools of all sizes and the held-out text. No file of the library is in two of them."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(files)
    parts: dict[str, str] = {"held-out": "", "clean": "", "noisy": ""}
    room = {"held-out": 40_000, "clean": max(sizes), "noisy": max(sizes)}
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore")
        if not text.isascii() or len(text) > 60_000:
            continue
        name = next((n for n in parts if len(parts[n]) < room[n]), None)
        if name is None:
            break
        parts[name] += text
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "held-out.txt").write_text(parts["held-out"][: room["held-out"]])
    for size in sizes:
        (folder / f"clean-{size}.txt").write_text(parts["clean"][:size])
        (folder / f"noisy-{size}.txt").write_text(
            shuffled(parts["noisy"][:size], NOISE, seed=1)
        )


def recipe_of(
    pools: Path, names: list[str], size: int, epochs: int, seed: int
) -> Recipe:
    sources = [
        {"kind": "text", "path": str(pools / f"{name}-{size}.txt")} for name in names
    ]
    return build_recipe({
        "model": MODEL,
        "data": {
            "sources": sources, "tokenizer": "bytes", "seq_len": SEQUENCE, "epochs": epochs, "seed": seed,
            "validation": str(pools / "held-out.txt"),
        },
        "layout": {},
        "train": {"batch": BATCH, "steps": 0, "seed": seed, "threads": 1},
        "optimizer": {"lr": 3e-3, "warmup": 0.1, "weight_decay": DECAY},
        "validation": {"every": 10**6},
        "checkpoint": {"every": 0},
    })  # fmt: skip


def run(folder: Path, recipe: Recipe) -> Path:
    """Train, unless the run was finished earlier."""
    done = folder / "report.html"
    if not done.exists():
        start(recipe, folder, resume="auto" if folder.exists() else None)
    return folder


def final_loss(folder: Path) -> float:
    return float(read_metrics(folder)["validation"][-1]["loss"])


def cell(
    fitted: FittedLaw, work: Path, size: int, times: int, runs: Any
) -> dict[str, Any]:
    """Predict and measure one held-back cell: ``times`` as many samples as a pool has."""
    own = fitted.with_sizes({"clean": size, "noisy": size})
    plan = plan_data(own, size * times, runs)
    measured = {}
    for names in (("clean",), ("clean", "noisy")):
        epochs = times // len(names)
        recipe = recipe_of(work / "pools", list(names), size, epochs, seed=7)
        folder = run(work / f"held-{size}-{times}-{'+'.join(names)}", recipe)
        measured["+".join(names)] = final_loss(folder)
    winner = min(measured, key=measured.__getitem__)
    expected = {"+".join(c.pools): c.loss.value for c in plan.choices}
    chosen = "+".join(plan.choices[0].pools)
    return {
        "size": size, "times": times, "predicted": expected, "measured": measured, "chosen": chosen, "best": winner,
        "right": chosen == winner, "chance": plan.choices[0].chance, "reason": plan.reason,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/data_laws"))
    parser.add_argument("--quick", action="store_true", help="tiny: whether it runs")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    sizes = (2_000, 3_000) if given.quick else SIZES
    before = machine()
    write_pools(given.work / "pools", sizes)
    places = []
    for size in sizes:
        for name in ("clean", "noisy"):
            for epochs in EPOCHS:
                recipe = recipe_of(given.work / "pools", [name], size, epochs, seed=0)
                folder = run(given.work / f"{name}-{size}-{epochs}", recipe)
                places.append(f"{name}={folder}")
                print(f"{name} {size} x {epochs}: {final_loss(folder):.4f}", flush=True)
    measured = read_measured(places)
    fitted = fit_repetition_law(measured.runs)
    cells = [
        cell(fitted, given.work, size, times, measured.runs)
        for size in sizes
        for times in TIMES
    ]
    right = sum(row["right"] for row in cells)
    for row in cells:
        print(json.dumps(row), flush=True)
    print(f"right in {right} of {len(cells)} held-back cells; noise {fitted.noise:.2%}")
    if not given.quick:
        law = asdict(fitted.law)
        runs = [asdict(each) for each in measured.runs]
        write(
            {"machine": before, "noise": NOISE, "runs": runs, "law": law, "error": fitted.noise, "cells": cells,
             "right": right},
            given.json,
        )  # fmt: skip


if __name__ == "__main__":
    main()
