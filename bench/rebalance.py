"""What a run gets back of its speed when a rank at half speed is given fewer samples (resilience.actions = rebalance).

Four ranks, whose work is to sleep for every row, so that they do not share cores; one sleeps twice as long. Beside each
other: nobody slow, one slow and said, one slow and rebalanced. What is recovered is the share of the lost time that the
third run has back, after the new shares are in force.

With ``--stages`` the four ranks are the stages of a pipeline of 28 layers. Every layer takes a time in which it also
computes, so that other programs on the machine change little, as long as a layer computes for less than that. The slow
stage gets fewer layers, which are on their way while steps go on: the stall of the change is taken apart, and the bytes
that moved beside the steps stand beside those that moved in the stall.

    python bench/rebalance.py [--stages] [--json bench/results/rebalance.json]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from weft.observe.run_metrics import read_metrics
from weft.recipe import Recipe, build_recipe

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.resilience.survivors import ranks

RANKS, STEPS, ROW_S = 4, 45, 0.03


#: Layers of the pipeline, the microbatches of its steps, how long a layer takes, and the steps.
LAYERS, MICROBATCHES, LAYER_S, STAGE_STEPS = 28, 8, 0.02, 36
#: What a change of the view is made of, in its record.
PARTS = ("part_s", "agree_s", "rebuild_s", "recover_s", "bytes", "bytes_ahead")


def recipe(folder: Path, actions: str, stages: bool) -> Recipe:
    corpus = folder / "corpus.txt"
    corpus.write_text(
        "".join(path.read_text() for path in sorted(Path("docs").rglob("*.md"))[:4])
    )
    model = {"layers": 1, "embed": 16, "heads": 2, "ffn": 24}
    return build_recipe({
        # wide enough that the output layer is no work beside a layer
        "model": model | ({"layers": LAYERS, "embed": 64, "ffn": 192} if stages else {}),
        "data": {"sources": [{"kind": "text", "path": str(corpus)}], "seq_len": 32, "cache": str(folder / "cache")},
        "layout": {"pp" if stages else "dp": RANKS},
        "train": {
            "steps": STAGE_STEPS if stages else STEPS, "batch": MICROBATCHES if stages else 32,
            "micro_batch": 1 if stages else 16,
        },
        "validation": {"every": 0}, "observe": {"split_every": 0, "trackers": []},
        "resilience": {"actions": actions},
    })  # fmt: skip


class Measured(NamedTuple):
    """A run: seconds of a step in its last third, what it said of its ranks, and the record of its last view."""

    step_s: float
    said: list[str]
    view: dict[str, Any]


def measure(
    folder: Path, name: str, actions: str, slow: float, stages: bool
) -> Measured:
    """Run it, and return what was measured. Other programs make a step longer only: the quickest quarter counts."""
    out = folder / name
    times = [slow if rank == 2 else 1.0 for rank in range(RANKS)]
    rows = [0.0 if stages else ROW_S * each for each in times]
    layers = [LAYER_S * each if stages else 0.0 for each in times]
    with ranks(recipe(folder, actions, stages), out, rows, layer_s=layers) as run:
        run.end()
        view = run.records("view")[-1]
    records = read_metrics(out)
    seconds = [record["step_s"] for record in records["train"] if "step_s" in record]
    last = seconds[-len(seconds) // 3 :]
    said = [record["message"] for record in records.get("event", [])]
    return Measured(quantiles(last, n=4)[0] if stages else median(last), said, view)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--stages", action="store_true", help="a slow pipeline stage")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "none slow": ("say", 1.0),
            "one slow": ("say", 2.0),
            "rebalanced": ("rebalance", 2.0),
        }
        results = {
            name: measure(Path(folder), name.replace(" ", "-"), *how, options.stages)
            for name, how in runs.items()
        }
    seconds = {name: result.step_s for name, result in results.items()}
    recovered = (seconds["one slow"] - seconds["rebalanced"]) / (
        seconds["one slow"] - seconds["none slow"]
    )
    for name, result in results.items():
        print(name, *result.said, sep="\n  ")
    # Of a rank at half speed 1/8 of all speed is gone whatever one does; a pipeline also has to fill.
    best = (seconds["one slow"] - seconds["none slow"] * 8 / 7) / (
        seconds["one slow"] - seconds["none slow"]
    )
    for name, value in seconds.items():
        print(f"{name:12} {value * 1e3:7.0f} ms a step")
    print(f"recovered {recovered:.0%} of the loss")
    if not options.stages:
        print(f"{best:.0%} would be all that can be")
    change = {part: results["rebalanced"].view.get(part) for part in PARTS}
    print("the change to other shares:", change)
    if options.json:
        about: dict[str, Any] = {"step_s": seconds, "recovered": recovered}
        about |= {"change": change} if options.stages else {"best": best}
        # the results of stages stand beside those of replicas
        old = json.loads(options.json.read_text()) if options.json.exists() else {}
        others = {k: v for k, v in old.items() if (k == "stages") != options.stages}
        everything = others | ({"stages": about} if options.stages else about)
        options.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
