"""Training on a stream of simulations: reservoir against first in first out, slow simulators, and a simulator killed.

The recipe is recipes/data/heat.toml with its real simulators, two processes that sweep the first temperature from cold
to hot. First, runs with each buffer take the same number of steps, that is of trained samples. `pace` then limits the
simulators to a third of the samples per second that the training took, and one of both is killed on the way.
Idle is the share of the time from the first draw to the end of the run that draws waited for samples.

    OMP_NUM_THREADS=1 nice python bench/streams.py [--json bench/results/streams.json]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from weft.api import start
from weft.observe.run_metrics import read_metrics
from weft.recipe import build_recipe
from weft.recipe.toml import read_toml

ROOT = Path(__file__).parents[1]
#: Time steps of a simulation, samples of a step, and steps of a run.
EACH, BATCH, STEPS = 25, 32, 240


def run(
    folder: Path,
    buffer: str,
    simulations: int,
    steps: int,
    pause: float = 0.0,
    kill: bool = False,
) -> dict[str, Any]:
    """Train once, and return what was measured."""
    tree = read_toml(ROOT / "recipes/data/heat.toml")
    command = f"python {ROOT}/examples/heat.py --parts 2 --simulations {simulations} --pause {pause}"
    stream = {
        "producers": [f"{command} --part {part}" for part in (0, 1)],
        "buffer": buffer,
    }
    stream["held_out"] = [f"python {ROOT}/examples/heat.py --simulations 40 --seed 1"]
    tree["stream"] |= stream
    tree["train"] = {"steps": steps, "batch": BATCH}
    tree["validation"]["every"] = max(1, steps)
    killing = threading.Thread(target=kill_first, args=(folder,), daemon=True)
    if kill:
        killing.start()
    begun = time.perf_counter()
    start(build_recipe(tree), folder)
    records = read_metrics(folder)
    draws = [each for each in records["stream"]]
    seconds = records["train"][-1]["time"] - draws[0]["time"]
    said = [each["message"] for each in records["event"]]
    return {
        "buffer": buffer,
        "validation": records["validation"][-1]["loss"],
        "steps": len(records["train"]),
        "trained": sum(each["samples"] for each in records["train"]),
        "came": draws[-1]["received"],
        "seconds": round(seconds, 2),
        "whole_s": round(time.perf_counter() - begun, 2),
        "fill_s": round(draws[0]["waited_s"], 3),
        "idle": round((draws[-1]["waited_s"] - draws[0]["waited_s"]) / seconds, 4),
        "drawn": records["repetitions"][-1]["samples"],
        "started_again": sum("it is started again" in line for line in said),
    }


def kill_first(folder: Path) -> None:
    """Kill the first simulator of this process once the training in ``folder`` has drawn for a while."""
    while True:
        time.sleep(0.1)
        try:
            drawn = len(read_metrics(folder).get("stream", []))
        except Exception:
            continue
        if drawn >= 30:
            break
    for child in psutil.Process(os.getpid()).children():
        words = child.cmdline()
        if "--part" in words and words[-1] == "0" and words[-2] == "--part":
            child.kill()
            return


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--json", type=Path)
    given = words.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, equal = Path(place), {}
        simulations = STEPS * BATCH // EACH
        for buffer in ("fifo", "firo", "reservoir"):
            equal[buffer] = run(folder / buffer, buffer, simulations, STEPS)
            print(json.dumps(equal[buffer]), flush=True)
        rate = equal["reservoir"]["trained"] / equal["reservoir"]["seconds"]
        pause = 2 / (rate / 3)  # two simulators
        slow = {
            buffer: run(
                folder / f"slow-{buffer}",
                buffer,
                80,
                10_000,
                pause,
                kill=buffer == "reservoir",
            )
            for buffer in ("fifo", "reservoir")
        }
        print(json.dumps(slow), flush=True)
    best = equal["reservoir"]["validation"]
    results = {
        "equal_samples": equal,
        "slow_simulators": slow | {"pause_s": pause, "samples_per_s_of_training": rate},
        "loss_of_fifo": best / equal["fifo"]["validation"],
        "loss_of_firo": best / equal["firo"]["validation"],
        "idle": slow["reservoir"]["idle"],
        "idle_of_fifo": slow["fifo"]["idle"],
    }
    print(json.dumps({k: v for k, v in results.items() if k[:4] in ("loss", "idle")}))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
