"""Measurements of a finished run, as a row of the file beside it, with which ``weft plan`` calibrates.

A row has the header of every measured file, so that ``bench/planner/evaluate.py`` reads it too.
"""

import csv
import statistics
from pathlib import Path
from typing import Any

from weft.observe.run_metrics import read_metrics

#: The file of rows, beside the run folders.
FILE = "measured.csv"
#: The first steps of a run are slower, and fewer than these say little.
WARM, LEAST = 3, 5


def row_of_run(run: Path) -> dict[str, Any] | None:
    """Return the measurements of a run as a row of the planner's file of measured runs, by column.

    ``run``: the run's folder. Returns None if the run is too short, or if the planner's cost model does not cover it.
    """
    records = read_metrics(run)
    if not records.get("run"):
        return None
    about = records["run"][-1]
    since = [r for r in records.get("train", []) if r["step"] > about["step"]]
    steps = [r for r in since if r.get("step_s")][WARM:]
    recipe = about["recipe"]
    if any(recipe.get(section) for section in ("control", "federated", "saddle")):
        return None
    model, layout, train = recipe["model"], recipe["layout"], recipe["train"]
    memory = recipe["memory"] | {
        "moments": recipe["memory"]["moments"] or recipe["memory"]["weights"]
    }
    partly = (
        model.get("adapter")
        or train.get("freeze")
        or recipe["optimizer"].get("estimate") == "zeroth-order"
    )
    # no columns for what they are
    partly = partly or model.get("experts") or model.get("kv_rank")
    if (
        len(steps) < LEAST
        or model["mixer"] != "softmax"
        or model.get("residual", "standard") != "standard"
        or layout["balance"]
        or layout["skip"]
        or partly
    ):
        return None
    count, _, device = about["device"].partition(" x ")
    sharding = "none"
    if layout["shard"] > 1:
        sharding = (
            f"{'FSDP' if layout['zero'] == 3 else 'ZeRO-1'} shard={layout['shard']}"
        )
    # without micro_batch: all rows at once
    share = max(1, train["batch"] // (layout["dp"] * layout["shard"]))
    seconds = statistics.median(r["step_s"] for r in steps)
    return {
        "id": f"{run.name} {about['started']}", "source": "runs of this machine", "model": recipe["name"],
        "arch": "dense", "params_b": about["parameters"] / 1e9, "layers": model["layers"], "hidden": model["embed"],
        "heads": model["heads"], "kv_heads": model["kv_heads"], "ffn": model["ffn"], "gated_mlp": 1,
        "vocab": model["vocab"], "tied_embeddings": int(model["tied"]), "seq_len": recipe["data"]["seq_len"],
        "hardware": device, "n_gpus": count, "gpus_per_node": about.get("per_node") or count, "tp": layout["tp"],
        "pp": layout["pp"], "vpp": layout["virtual"] or 1, "dp": layout["dp"] * layout["shard"], "cp": layout["cp"],
        "dp_sharding": sharding, "micro_batch": train["micro_batch"] or share,
        "global_batch": train["batch"],
        "recompute": train["recompute"], "precision": {"bfloat16": "bf16"}.get(train["dtype"], "fp32"),
        "attention": "flash", "framework": "weft", "iter_time_s": round(seconds, 6),
        "peak_mem": round(max(r["memory_gib"] for r in steps), 4), "peak_mem_unit": "GiB", "status": "ok",
        "notes": " ".join([f"schedule={layout['schedule']} context={layout['context']}",
                           *(f"{kind}={memory[kind]}" for kind in ("weights", "moments", "activations"))]),
    }  # fmt: skip


def append(run: Path) -> Path | None:
    """Add the run's row of measurements to the file of measured runs beside the run's folder.

    Returns the file, or None if the run gives no row (:func:`row_of_run`).
    """
    row = row_of_run(run)
    if row is None:
        return None
    path = run.parent / FILE
    try:
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)
    except OSError:  # a run is not to fail for this
        return None
    return path
