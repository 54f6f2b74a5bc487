"""What the ladder of actions makes of a slow rank, a slow link and a slow cable (resilience.actions = ladder).

Four ranks train. In the first run one rank takes ten times as long for a row: it is to get fewer rows, and then to be
left out. In the others ``weft train`` runs on hosts of their own, network namespaces. In the second the cable between
two neighbours in the ring is slow (tbf): the ranks are to be numbered anew. In the third one rank's cable is slow for
all: it is to be left out. Losses are compared with those of one device.

    sudo python bench/action_ladder.py [--steps 60] [--json bench/results/action_ladder.json]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w
from campaign import start_on
from doctor import Trial, slow_network, tc
from hosts import hosts, unavailable
from step import machine, write

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.cases import write_corpus  # noqa: E402
from tests.resilience.survivors import losses, ranks  # noqa: E402
from weft.layout.layout import Layout  # noqa: E402
from weft.layout.mesh import Mesh  # noqa: E402
from weft.observe.run_metrics import read_metrics  # noqa: E402
from weft.recipe import Recipe, build_recipe  # noqa: E402
from weft.train.setup import prepare  # noqa: E402
from weft.train.training import train_job  # noqa: E402

WORLD, ROW_S = 4, 0.02
#: The slow link is between these, which are neighbours in the ring 0, 1, 2, 3; the slow cable is that of the first.
VICTIM, OTHER = 1, 2
#: Seconds after which a run counts as hung.
HUNG = 900


def tree(corpus: str, folder: Path, steps: int) -> dict[str, Any]:
    return {
        "model": {"vocab": 1024, "layers": 2, "embed": 64, "heads": 4, "ffn": 128},
        "data": {
            "sources": [{"kind": "jsonl", "path": corpus}],
            "seq_len": 32,
            "cache": str(folder / "cache"),
        },
        "train": {
            "steps": steps, "batch": 16, "micro_batch": 16, "dtype": "float64", "threads": 1, "timeout": 120,
        },
        "validation": {"every": 0},
        "observe": {"split_every": 0, "trackers": []},
        "resilience": {"actions": "ladder", "survive": True},
    }  # fmt: skip


def of_four(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"layout": Layout(dp=WORLD)})


def computer(recipe: Recipe, folder: Path, rate: int) -> Path:
    """A rank that computes ten times as long as the others."""
    out = folder / "computer"
    times = [ROW_S * (10 if rank == VICTIM else 1) for rank in range(WORLD)]
    with ranks(of_four(recipe), out, times) as run:
        run.end(lost=[VICTIM])
    return out


def network(fault: str, recipe: Recipe, folder: Path, rate: int) -> Path:
    """A slow ``link`` or a slow ``sender``, from the first step on."""
    out, file = folder / fault, folder / "recipe.toml"
    file.write_text(
        tomli_w.dumps(recipe.model_dump(mode="json", exclude_defaults=True))
    )
    words = [sys.executable, "-m", "weft", "train", str(file)]
    words += ["--layout", f"dp={WORLD}", "--out", str(out)]
    with hosts(WORLD, f"weft-ladder-{os.getpid()}") as made:
        trial = Trial(0, "", fault, VICTIM, OTHER, 0.0, rate)
        slowed = slow_network(trial, made)
        processes = start_on(made, words, WORLD, folder / f"{fault}.log")
        try:
            deadline = time.monotonic() + HUNG
            while any(process.poll() is None for process in processes):
                if time.monotonic() > deadline:
                    raise SystemExit((folder / f"{fault}.log").read_text()[-4000:])
                time.sleep(0.2)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    process.kill()
            for space, device in slowed:
                tc(space, "qdisc", "del", "dev", device, "root")
    return out


def judged(out: Path, alone: dict[int, float]) -> dict[str, Any]:
    """What a run has made of it."""
    records, here = read_metrics(out), losses(out)
    views, train = records["view"], records["train"]
    times = {record["step"]: record["step_s"] for record in train if "step_s" in record}
    last = views[-1]["step"]
    first = views[1]["step"] if len(views) > 1 else max(times)
    before = [time for step, time in times.items() if step <= first]
    after = [time for step, time in times.items() if step > last + 2]
    return {
        "views": [
            {"step": view["step"], "ranks": view["ranks"], "left": [gone["number"] for gone in view["lost"]]}
            for view in views
        ],
        "said": [record["message"] for record in records.get("event", [])],
        "step_s_before": round(median(before), 3),
        "step_s_after": round(median(after), 3) if after else None,
        "difference": max(abs(here[step] - alone[step]) for step in alone) / max(alone.values()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=int, default=20, help="Mbit/s of what is slow")
    parser.add_argument("--only", help="computer, link or sender")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    if why := unavailable():
        raise SystemExit(why)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = build_recipe(tree(write_corpus(folder), folder, given.steps))
        train_job(prepare(recipe), Mesh.single(), folder / "alone")
        alone = losses(folder / "alone")
        for fault in [given.only] if given.only else ["computer", "link", "sender"]:
            out = (
                computer(recipe, folder, given.rate)
                if fault == "computer"
                else network(fault, recipe, folder, given.rate)
            )
            results[fault] = judged(out, alone)
            print(fault, results[fault], sep="\n  ", flush=True)
    if given.json:
        write({"machine": machine(), "rate_mbit": given.rate, **results}, given.json)


if __name__ == "__main__":
    main()
