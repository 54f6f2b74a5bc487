"""How long the others stand still when replicas are lost, and which process groups they make anew.

A run of six replicas (``dp=6``) loses one after another at random instants until two are left; a run of three replicas
of two ranks (``dp=3,tp=2``) loses one replica. The stall goes from the kill to the end of the step that is computed
again, and is taken apart: until the loss is known, until the groups are left, to agree, to edit groups and model, to
fill the state from the copies in memory, and to compute. Losses are compared with those of one device.

    python bench/replica_loss.py [--losses 40] [--seed 0] [--json bench/results/replica_loss.json]

``--before`` puts the medians of another file beside those of this run: of commit dfb02823, which built all anew, when
this program ran there.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from step import machine, write

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.cases import write_corpus  # noqa: E402
from tests.resilience.survivors import Ranks, losses, ranks  # noqa: E402
from tests.resilience.trials import job, reference  # noqa: E402

PARTS = ("part_s", "agree_s", "rebuild_s", "recover_s")
REPLICAS, LEAST = 6, 2


def lose(run: Ranks, gone: list[int], draw: random.Random) -> dict[str, Any]:
    """Kill the ranks ``gone`` at a random instant; return what the next view and step say of it."""
    before = len(run.records("view"))
    time.sleep(draw.uniform(0.05, 0.4))
    hit = time.time()
    for number in (
        (signal.SIGSTOP, signal.SIGKILL) if len(gone) > 1 else (signal.SIGKILL,)
    ):
        for rank in gone:  # as one loss, however long this process waits for its core
            run.signal(rank, number)

    def after() -> list[Any]:
        views = run.records("view")[before:]
        return (
            [r for r in run.records() if r["time"] > views[-1]["time"]] if views else []
        )

    run.wait_for(lambda: bool(after()))
    view, step = run.records("view")[before:][-1], after()[0]
    parts = {name: round(view.get(name, 0.0), 3) for name in PARTS}
    known = view["time"] - sum(parts.values()) - hit
    return {
        "detect_s": round(max(0.0, known), 3),
        **parts,
        "recompute_s": round(step["time"] - view["time"], 3),
        "stall_s": round(step["time"] - hit, 3),
        "layout": view["layout"],
        "edited": view.get("edited", False),
        "groups_made": view.get("groups_made", []),
        "groups_kept": view.get("groups_kept", 0),
    }


def one_run(
    layout: str, corpus: str, folder: Path, draw: random.Random, most: int
) -> list[dict[str, Any]]:
    """Losses of one run. A replica of ``tp=2`` is two ranks."""
    recipe = job(corpus, layout, checkpoint__every=0, train__steps=400)
    alone = reference(corpus, folder, {"train__steps": 400})
    out = folder / f"run-{draw.random()}"
    size = recipe.layout.world // recipe.layout.dp
    left, rows = list(range(recipe.layout.dp)), []
    with ranks(recipe, out, (0.002,)) as run:
        run.step(2)
        for _ in range(min(most, recipe.layout.dp - LEAST)):
            replica = draw.choice(left)
            left.remove(replica)
            gone = [replica * size + i for i in range(size)]
            rows.append(lose(run, gone, draw))
            print(layout, gone, rows[-1], flush=True)
        here = losses(out)
    off = max(abs(here[step] - alone[step]) for step in here) / max(alone.values())
    return [row | {"difference": off} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--before", type=Path, help="results to compare with")
    options = parser.parse_args()
    draw, rows = random.Random(options.seed), list[dict[str, Any]]()
    about = machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder)
        while len(rows) < options.losses:
            layout = "dp=3,tp=2" if len(rows) % 10 == 8 else f"dp={REPLICAS}"
            most = options.losses - len(rows)
            rows += one_run(layout, corpus, folder, draw, most)
    names = ("detect_s", *PARTS, "recompute_s", "stall_s")
    stalls = [row["stall_s"] for row in rows]
    anew = [key for row in rows for key in row["groups_made"] if "mesh_dp" not in key]
    results = {
        "machine": about,
        "losses": len(rows),
        "edited": sum(row["edited"] for row in rows),
        "groups_without_a_lost_rank_made_anew": len(anew),
        "medians": {
            part: round(median(row[part] for row in rows), 3) for part in names
        },
        "stall_quartiles": [round(q, 3) for q in quantiles(stalls, n=4)],
        "difference": max(row["difference"] for row in rows),
        "rows": rows,
    }
    if options.before:
        before = json.loads(options.before.read_text())
        results["before"] = {key: before[key] for key in ("losses", "medians")}
    print({key: value for key, value in results.items() if key != "rows"})
    if options.json:
        write(results, options.json)


if __name__ == "__main__":
    main()
