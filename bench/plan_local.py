"""Predicted beside measured on this machine: step time and memory of every kind of layout of the quickstart model.

    weft probe --out probe.toml
    python bench/plan_local.py --probe probe.toml [--rounds 2] [--only dp=2 ...] [--json bench/results/plan_local.json]

Layouts take turns over the rounds. A step counts as measured if other programs used less than a twelfth of the cores
while it ran (their share is read from /proc/stat); a run goes on until it has enough of those, or is given up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/quickstart.toml"
RESULTS = Path(__file__).parent / "results" / "plan_local.json"
LAYOUTS = [
    "dp=1", "dp=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2,zero=3", "tp=2", "cp=2", "cp=2,context=ulysses",
    "pp=2", "pp=2,schedule=zb-h1", "dp=4", "shard=4", "tp=4", "shard=2,tp=2", "dp=2,tp=2", "dp=2,shard=2", "pp=2,dp=2",
    "pp=2,tp=2", "cp=2,tp=2", "pp=4",
]  # fmt: skip
OTHERS = 1 / 12  # of the cores, while a step is measured
WARM, ENOUGH, LIMIT_S = 3, 12, 12.0


def busy_seconds() -> float:
    """Processor seconds of all programs since the machine started."""
    user, nice, system, _, _, irq, soft, steal = map(
        int, Path("/proc/stat").read_text().split()[1:9]
    )
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


# --- a rank of a measured run ---


def be_rank(layout: str, out: Path) -> None:
    """Steps as in the training loop until enough were undisturbed; rank 0 writes what all saw."""
    import torch
    import torch.distributed as dist

    from weft.layout.mesh import from_all
    from weft.observe.flops import peak_resident
    from weft.recipe import load_recipe
    from weft.rehearse.trial import steps as trained

    recipe = load_recipe(RECIPE, [], layout)
    cores, world = len(os.sched_getaffinity(0)), recipe.layout.world
    # Seconds, the share of the cores that others had, and processor seconds of a rank.
    steps: list[tuple[float, float, float]] = []
    begun = time.monotonic()
    before = time.perf_counter(), time.process_time(), busy_seconds()
    for _ in trained(recipe):
        after = time.perf_counter(), time.process_time(), busy_seconds()
        seconds = after[0] - before[0]
        mine = torch.tensor([after[1] - before[1], seconds])
        if world > 1:
            dist.all_reduce(mine)
        others = (after[2] - before[2] - float(mine[0])) / seconds / cores
        steps.append((float(mine[1]) / world, others, float(mine[0]) / world))
        good = sum(step[1] < OTHERS for step in steps[WARM:])
        stop = torch.tensor(float(good >= ENOUGH or time.monotonic() - begun > LIMIT_S))
        if world > 1:
            dist.broadcast(stop, 0)
        if stop:
            break
        before = time.perf_counter(), time.process_time(), busy_seconds()
    peaks = from_all(peak_resident())
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"steps": steps[WARM:], "memory": peaks}))


def measure(layout: str) -> dict[str, Any]:
    """Run ``layout`` once in processes of its own."""
    from weft.layout.layout import Layout
    from weft.run.launch import launch

    world = Layout.parse(layout).world
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found"
        command = [sys.executable, __file__, "--rank", layout, "--json", str(out)]
        code = (
            launch([], world, command)
            if world > 1
            else subprocess.run(command, timeout=240).returncode
        )
        if code or not out.exists():
            raise SystemExit(f"{layout}: a rank ended with code {code}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


# --- predictions ---


def predictions(probe: Path, layouts: list[str]) -> dict[str, dict[str, Any]]:
    from weft.recipe import load_recipe
    from weft.rehearse.clock import predict_step
    from weft.rehearse.curves import ProbedMachine
    from weft.rehearse.local_choice import rehearsals

    local = ProbedMachine.of(tomllib.loads(probe.read_text())["calibration"])
    found = {}
    for layout in layouts:
        recipe = load_recipe(RECIPE, [], layout)
        p = predict_step(local, rehearsals(recipe, local), recipe.layout)
        found[layout] = {
            "seconds": p.seconds,
            "memory": list(p.memory),
            "busy": list(p.busy),
            "parts": dict(p.parts),
        }
    return found


def show(rows: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'layout':24}{'measured ms':>12}{'predicted':>11}{'error':>8}{'steps':>7}"
          f"{'cpu ms':>9}{'predicted':>11}"
          f"{'MB measured':>13}{'predicted':>11}{'error':>8}")  # fmt: skip
    for layout, row in rows.items():
        print(f"{layout:24}{1e3 * row['measured_s']:12.1f}{1e3 * row['predicted_s']:11.1f}{row['error']:+8.1%}"
              f"{row['steps']:7}{1e3 * row['measured_cpu_s']:9.1f}{1e3 * row['predicted_cpu_s']:11.1f}"
              f"{row['measured_mb']:13.0f}{row['predicted_mb']:11.0f}"
              f"{row['memory_error']:+8.1%}")  # fmt: skip


def anchored(rows: dict[str, dict[str, Any]]) -> list[float]:
    """Errors of the others once the layouts predicted fastest of every number of ranks have run and moved the rest."""
    from weft.layout.layout import Layout

    worlds = {layout: Layout.parse(layout).world for layout in rows}
    ran = {
        w: min(
            (x for x in rows if worlds[x] == w), key=lambda x: rows[x]["predicted_s"]
        )
        for w in worlds.values()
    }
    ratio = {
        w: rows[layout]["measured_s"] / rows[layout]["predicted_s"]
        for w, layout in ran.items()
    }
    return [
        row["predicted_s"] * ratio[worlds[layout]] / row["measured_s"] - 1
        for layout, row in rows.items() if layout not in ran.values()
    ]  # fmt: skip


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How good the predictions are as a whole."""
    errors = sorted(abs(row["error"]) for row in rows.values())
    pick = min(rows, key=lambda layout: rows[layout]["predicted_s"])
    best = min(rows, key=lambda layout: rows[layout]["measured_s"])
    moved = sorted(map(abs, anchored(rows)))
    return {
        "layouts": len(rows),
        "others_after_trials": len(moved),
        "others_within_15_percent": sum(e <= 0.15 for e in moved),
        "others_median_error": statistics.median(moved) if moved else None,
        "within_15_percent": sum(e <= 0.15 for e in errors),
        "median_error": statistics.median(errors),
        "worst_error": errors[-1],
        "pick": pick,
        "fastest": best,
        "pick_over_fastest": rows[pick]["measured_s"] / rows[best]["measured_s"],
        "memory_worst": max((row["memory_error"] for row in rows.values()), key=abs),
        "memory_most_under": min(row["memory_error"] for row in rows.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "--probe", type=Path, default=Path("probe.toml"), help="a file from weft probe"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="some layouts")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument(
        "--again", action="store_true", help="predict anew, keep what was measured"
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        from weft.run.rank_processes import rank_process

        with rank_process("cpu", 600):
            be_rank(options.rank, options.json)
        return
    layouts = options.only or LAYOUTS
    kept = (
        json.loads(options.json.read_text())["layouts"]
        if options.json.exists() and options.again
        else {}
    )
    seen: dict[str, list[list[float]]] = {}
    memory: dict[str, list[float]] = {}
    load = os.getloadavg()[0]
    for _ in range(0 if options.again else options.rounds):
        for layout in layouts:
            found = measure(layout)
            seen.setdefault(layout, []).extend(found["steps"])
            memory.setdefault(layout, []).append(max(found["memory"]))
            quiet = [s for s, others, _ in found["steps"] if others < OTHERS]
            middle = 1e3 * statistics.median(quiet) if quiet else float("nan")
            print(
                f"{layout:24}{middle:9.1f} ms  {len(quiet)} of {len(found['steps'])} steps undisturbed",
                flush=True,
            )
    predicted = predictions(options.probe, layouts if not options.again else list(kept))
    rows: dict[str, dict[str, Any]] = {}
    for layout, p in predicted.items():
        if options.again:
            row = dict(kept[layout])
        else:
            quiet = [s for s, others, _ in seen[layout] if others < OTHERS]
            row = {
                "measured_s": statistics.median(
                    quiet or [s for s, _, _ in seen[layout]]
                ),
                "measured_cpu_s": statistics.median(c for _, _, c in seen[layout]),
                "steps": len(quiet),
                "quartiles_s": statistics.quantiles(quiet, n=4)[::2]
                if len(quiet) > 3
                else [],
                "measured_mb": statistics.median(memory[layout]) / 1e6,
            }
        row["predicted_s"], row["predicted_mb"] = p["seconds"], max(p["memory"]) / 1e6
        row["predicted_cpu_s"] = statistics.mean(p["busy"])
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
        row["memory_error"] = row["predicted_mb"] / row["measured_mb"] - 1
        rows[layout] = row | {"parts_s": p["parts"]}
    show(rows)
    verdict = summary(rows)
    print("\n" + "\n".join(f"{name:20} {value}" for name, value in verdict.items()))
    about = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"machine": about, "summary": verdict, "layouts": rows}, indent=2)
        + "\n"
    )
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
