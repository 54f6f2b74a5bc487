"""What runs of one's own have measured: a row each, and the model refitted to them within its bounds.

A row has the header of every measured file (``weft plan evaluate`` reads it too), so that a calibration is the same
fit as that to published runs, drawn towards the presets: few runs move little.
"""

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from weft.errors import WeftError
from weft.observe.metrics import read_metrics
from weft.planner.calibrate import Knob, constants, factors, fit, load, masks_of, predict
from weft.planner.engine import ENGINES, Engine, scaled
from weft.planner.rows import read_rows

#: The file of rows, beside the run folders.
FILE = "measured.csv"
COLUMNS = (
    "id", "source", "model", "arch", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "gated_mlp", "vocab",
    "tied_embeddings", "seq_len", "hardware", "n_gpus", "gpus_per_node", "tp", "pp", "vpp", "dp", "cp", "dp_sharding",
    "micro_batch", "global_batch", "recompute", "precision", "attention", "framework", "iter_time_s", "peak_mem",
    "peak_mem_unit", "status", "notes",
)  # fmt: skip
#: The first steps of a run are slower, and fewer than these say little.
WARM, LEAST = 3, 5
#: Rows that are looked at, the newest.
NEWEST = 200


def row_of(run: Path) -> dict[str, Any] | None:
    """What the run in this folder measured, by column; None if it was too short or had what the model does not know."""
    records = read_metrics(run)
    if not records.get("run"):
        return None
    about = records["run"][-1]
    since = [r for r in records.get("train", []) if r["step"] > about["step"]]
    steps = [r for r in since if r.get("step_s")][WARM:]
    recipe = about["recipe"]
    model, layout, train = recipe["model"], recipe["layout"], recipe["train"]
    if len(steps) < LEAST or model["mixer"] != "softmax" or layout["balance"] or layout["skip"]:
        return None
    count, _, device = about["device"].partition(" x ")
    sharding = "none"
    if layout["shard"] > 1:
        sharding = f"{'FSDP' if layout['zero'] == 3 else 'ZeRO-1'} shard={layout['shard']}"
    share = max(1, train["batch"] // (layout["dp"] * layout["shard"]))  # without micro_batch: all rows at once
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
        "notes": f"schedule={layout['schedule']} context={layout['context']} offload={train['offload']}",
    }  # fmt: skip


def append(run: Path) -> Path | None:
    """Add the row of this run to the file beside it; None where there is nothing to add."""
    row = row_of(run)
    if row is None:
        return None
    path = run.parent / FILE
    try:
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(row)
    except OSError:  # a run is not to fail for this
        return None
    return path


@dataclass(frozen=True)
class Own:
    """An engine whose constants were fitted, and to what; ``error``: of those times after the fit, percent."""

    engine: Engine
    told: str
    error: float


def own_runs(path: Path, device: str, bits: int, base: Engine = ENGINES["weft"]) -> Own | None:
    """``base`` refitted to the newest runs of Weft on ``device`` in the rows of ``path``; None without any."""
    if not path.is_file():
        return None
    rows, _ = read_rows(path)
    mine = [r for r in rows if r.family == "weft" and r.device == device and r.seconds][-NEWEST:]
    if not mine:
        return None
    knobs, theta = fit(mine)
    engine = _engine(base, knobs, theta, _like(device, bits, "weft", mine[-1].release))
    held = constants(mine).get("weft")
    engine = engine if held is None else replace(engine, constant=held)
    off = np.abs(predict(mine, knobs, theta) / np.array([r.seconds for r in mine], dtype=float) - 1)
    error = 100 * float(np.median(off))
    runs = f"{len(mine)} run{'s' * (len(mine) > 1)} of yours on {device}"
    return Own(engine, f"calibrated to {runs} ({path}): their times are met to {error:.0f} % (median)", error)


def calibrated(path: Path, device: str, bits: int, base: Engine) -> Own:
    """``base`` with a calibration: a file of rows, or of factors from ``weft plan calibrate``."""
    if path.suffix == ".csv":
        own = own_runs(path, device, bits, base)
        if own is None:
            raise WeftError(f"--calibration {path} has no run of Weft on {device}; leave it out")
        return own
    table = load(path)["all"]["factors"]
    knobs = [Knob(item["constant"], 0.0, item["for"]) for item in table]
    theta = np.log([float(item["factor"]) for item in table])
    family = next((name for name, engine in ENGINES.items() if engine is base), "")
    engine = _engine(base, knobs, theta, _like(device, bits, family))
    return Own(engine, f"calibrated with the factors of {path}", float("nan"))


def _like(device: str, bits: int, family: str, release: tuple[int, ...] = ()) -> Any:
    """As much of a row of a dense model as decides which factors are its own."""
    return SimpleNamespace(device=device, bits=bits, family=family, release=release, shape=SimpleNamespace(experts=0))


def _engine(base: Engine, knobs: Sequence[Knob], theta: Any, like: Any) -> Engine:
    found = factors(knobs, np.reshape(theta, (-1, len(knobs)))[0], masks_of(knobs, [like]))
    engine = scaled(base, found)
    return replace(engine, **{f.name: float(np.ravel(getattr(engine, f.name))[0]) for f in fields(engine)})
