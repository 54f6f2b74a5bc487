"""What a run gets back of its speed when a rank at half speed is given fewer samples (resilience.actions = rebalance).

Four ranks, whose work is to sleep for every row, so that they do not share cores; one sleeps twice as long. Beside each
other: nobody slow, one slow and said, one slow and rebalanced. What is recovered is the share of the lost time that the
third run has back, after the new shares are in force.

With ``--stages`` the four ranks are the stages of a pipeline of 16 layers, and work is to sleep for every layer. The
slow stage gets fewer layers.

    python bench/rebalance.py [--stages] [--json bench/results/rebalance.json, stages.json]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from weft.observe.run_metrics import read_metrics
from weft.recipe import Recipe, build_recipe

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.resilience.survivors import ranks

RANKS, STEPS, ROW_S = 4, 45, 0.03


#: Layers of the pipeline, and how long each sleeps.
LAYERS, LAYER_S = 16, 0.02


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
        "train": {"steps": STEPS, "batch": 4 if stages else 32, "micro_batch": 1 if stages else 16},
        "validation": {"every": 0}, "observe": {"split_every": 0, "trackers": []},
        "resilience": {"actions": actions},
    })  # fmt: skip


def step_s(
    folder: Path, name: str, actions: str, slow: float, stages: bool
) -> tuple[float, list[str]]:
    """Seconds of a step in the last third of a run, and what it said of its ranks."""
    out = folder / name
    times = [slow if rank == 2 else 1.0 for rank in range(RANKS)]
    rows = [0.0 if stages else ROW_S * each for each in times]
    layers = [LAYER_S * each if stages else 0.0 for each in times]
    with ranks(recipe(folder, actions, stages), out, rows, layer_s=layers) as run:
        run.end()
    records = read_metrics(out)
    times = [record["step_s"] for record in records["train"] if "step_s" in record]
    return median(times[-STEPS // 3 :]), [
        record["message"] for record in records.get("event", [])
    ]


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
        found = {
            name: step_s(Path(folder), name.replace(" ", "-"), *how, options.stages)
            for name, how in runs.items()
        }
    seconds = {name: time for name, (time, _) in found.items()}
    recovered = (seconds["one slow"] - seconds["rebalanced"]) / (
        seconds["one slow"] - seconds["none slow"]
    )
    for name, (_, said) in found.items():
        print(name, *said, sep="\n  ")
    # Of a rank at half speed 1/8 of all speed is gone whatever one does.
    best = (seconds["one slow"] - seconds["none slow"] * 8 / 7) / (
        seconds["one slow"] - seconds["none slow"]
    )
    for name, value in seconds.items():
        print(f"{name:12} {value * 1e3:7.0f} ms a step")
    print(f"recovered {recovered:.0%} of the loss; {best:.0%} would be all that can be")
    if options.json:
        options.json.write_text(
            json.dumps(
                {"step_s": seconds, "recovered": recovered, "best": best}, indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
