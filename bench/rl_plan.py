"""Seconds of a rollout phase as ``weft plan RUN --rl`` predicts them from another run, against measured ones.

The runs are those of ``rl_staleness.py``: real engines, ledger and weights, and sleeps in place of computing, so that
ranks do not share cores. From the recorded times of one run follow predictions for other numbers of engines and other
bounds, each of which is then run with the same sleeps for the same answers.

    OMP_NUM_THREADS=1 python bench/rl_plan.py [--json bench/results/rl_plan.json]
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from rl_staleness import TRAIN_S, run
from step import machine, write

from weft.planner.rl_roles import phase_times, role_plans

#: Numbers of engines, and bounds on staleness.
WAYS = ((2, 0), (2, 1), (4, 0), (4, 1), (8, 0), (8, 1))
#: Those whose times predict the others.
SOURCES = ((4, 0), (4, 1))


def predicted(
    phases: list[dict[str, Any]], source: tuple[int, int], way: tuple[int, int]
) -> float:
    """Return the predicted seconds of a phase with ``way``'s engines and bound, from the phases of ``source``."""
    times = phase_times(phases, source[0], 1, source[1])
    (plan,) = [
        plan
        for plan in role_plans(times, way[0] + 1)
        if (plan.writers, plan.staleness) == way
    ]
    return plan.seconds


def seconds_of(phases: list[dict[str, Any]]) -> float:
    """Return the mean seconds of a phase but for the first, in which nothing is written ahead."""
    parts = ("rollout_s", "train_s", "prepare_s", "weights_s")
    return statistics.fmean(sum(each[part] for part in parts) for each in phases[1:])


def main() -> None:
    """Run all ways, predict each from the sources, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for kind in ("uniform", "lognormal"):
        runs: dict[tuple[int, int], list[dict[str, Any]]] = {way: [] for way in WAYS}
        for turn in range(given.turns):
            for way in WAYS[:: 1 if turn % 2 == 0 else -1]:
                runs[way].append(run(way[1], kind, given.updates, given.batch, way[0]))
        measured = {
            way: statistics.median(seconds_of(each["phases"]) for each in of_way)
            for way, of_way in runs.items()
        }
        rows[kind] = []
        for source in SOURCES:
            for way in WAYS:
                seconds = statistics.median(
                    predicted(each["phases"], source, way) for each in runs[source]
                )
                rows[kind].append({
                    "from": source, "to": way, "predicted_s": round(seconds, 4), "measured_s": round(measured[way], 4),
                    "error": round(seconds / measured[way] - 1, 3),
                })  # fmt: skip
                print(kind, rows[kind][-1], flush=True)
    head = {
        "updates": given.updates, "groups_of_an_update": given.batch, "turns": given.turns, "train_s": TRAIN_S,
        "load": os.getloadavg()[0],
    }  # fmt: skip
    if given.json:
        write(machine() | head | rows, given.json)


if __name__ == "__main__":
    main()
