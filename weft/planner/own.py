"""Measurements of your own runs: a row each, and the constants refitted to them within bounds.

A row has the header of every measured file (``bench/planner/evaluate.py`` reads it too), and the fit is the one that is
made to published runs, drawn towards the presets: few runs move little.
"""

import csv
import json
import re
import statistics
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import UsageError, WeftError
from weft.model_shape import Shape
from weft.observe.metrics import read_metrics
from weft.planner.cost import AWAY, CONTEXT, RECOMPUTE, SCHEDULES, Plan
from weft.planner.engine import ENGINES, EngineConstants, scaled
from weft.planner.fit import KNOBS, Measurement, constants, fit, predict
from weft.planner.machine import find_device, machine_of
from weft.recipe import PLACES

#: The file of rows, beside the run folders.
FILE = "measured.csv"
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
    memory = recipe["memory"] | {"moments": recipe["memory"]["moments"] or recipe["memory"]["weights"]}
    partly = model.get("adapter") or train.get("freeze") or recipe["optimizer"].get("estimate") == "zeroth-order"
    partly = partly or model.get("experts") or model.get("kv_rank")  # no columns for what they are
    if len(steps) < LEAST or model["mixer"] != "softmax" or layout["balance"] or layout["skip"] or partly:
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
        "notes": " ".join([f"schedule={layout['schedule']} context={layout['context']}",
                           *(f"{kind}={memory[kind]}" for kind in AWAY)]),
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
            writer = csv.DictWriter(file, list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)
    except OSError:  # a run is not to fail for this
        return None
    return path


def read_own(path: Path) -> list[Measurement]:
    """What runs have appended to ``path``, oldest first; lines that are cut short or not theirs are left out."""
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            with suppress(KeyError, ValueError, TypeError, UsageError):
                found.append(_row(cells))
    return found


def _row(cells: dict[str, str]) -> Measurement:
    """One line as :func:`row_of` wrote it."""
    if cells["framework"] != "weft":
        raise ValueError("a row of another program")
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied_embeddings", "seq_len", "n_gpus", "tp",
             "gpus_per_node", "pp", "vpp", "dp", "cp", "micro_batch", "global_batch", "iter_time_s",
             "peak_mem")  # fmt: skip
    n = {name: float(cells[name]) for name in names}
    notes = dict(re.findall(r"(\w+)=([\w-]+)", cells["notes"]))
    if notes.get("offload", "none") != "none":
        raise ValueError("a row of before [memory]")
    sharding = cells["dp_sharding"]
    shard = float(sharding.partition("shard=")[2] or 1)
    plan = Plan(
        dp=n["dp"] / shard, shard=shard, zero=3 if "FSDP" in sharding else int(sharding != "none"), tp=n["tp"],
        cp=n["cp"], context=CONTEXT.index(notes["context"]) if notes["context"] in CONTEXT else 0, pp=n["pp"],
        virtual=n["vpp"], schedule=SCHEDULES.index(notes["schedule"]), micro_batch=n["micro_batch"],
        batch=n["global_batch"], seq=n["seq_len"], recompute=RECOMPUTE.index(cells["recompute"]),
        bits=16 if cells["precision"] == "bf16" else 32, 
        **{kind: PLACES.index(notes.get(kind, "device")) for kind in AWAY},
    )  # fmt: skip
    shape = Shape(n["layers"], n["hidden"], n["heads"], n["kv_heads"], n["hidden"] / n["heads"], n["ffn"], n["vocab"],
                  tied=n["tied_embeddings"])  # fmt: skip
    device = find_device(cells["hardware"])
    rack = n["gpus_per_node"] < device.domain and device.domain > 8
    machine = machine_of(device, int(plan.bits), domain=device.domain if rack else int(n["gpus_per_node"]))
    return Measurement(cells["id"], cells["source"], "weft", "weft", device.name, int(plan.bits), shape, machine, plan,
               ENGINES["weft"], n["iter_time_s"], n["peak_mem"])  # fmt: skip


def load(path: Path) -> dict[str, Any]:
    """A calibration that ``bench/planner/calibrate.py`` wrote, as plain data."""
    try:
        found = json.loads(path.read_text())
        if found["version"] != 2 or not isinstance(found["all"]["factors"], list):
            raise ValueError
        found["sources"], found["memory"]
        return found
    except OSError as error:
        raise WeftError(f"cannot read calibration {path}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UsageError(
            f"{path} is not a calibration; write one with python bench/planner/calibrate.py ROWS.csv --out FILE"
        ) from None


@dataclass(frozen=True)
class Own:
    """An engine whose constants were fitted, and to what (``message``).

    ``error``: of those times after the fit, median in percent.
    """

    engine: EngineConstants
    message: str
    error: float


def own_runs(path: Path, device: str, base: EngineConstants = ENGINES["weft"]) -> Own | None:
    """``base`` refitted to the newest runs of Weft on ``device`` in the rows of ``path``; None without any."""
    if not path.is_file():
        return None
    mine = [row for row in read_own(path) if row.device == device][-NEWEST:]
    if not mine:
        return None
    theta = fit(mine)
    engine = scaled(base, {knob.field: float(np.exp(x)) for knob, x in zip(KNOBS, theta, strict=True)})
    held = constants(mine).get("weft")
    engine = engine if held is None else replace(engine, constant=held)
    off = np.abs(predict(mine, theta) / np.array([r.seconds for r in mine], dtype=float) - 1)
    error = 100 * float(np.median(off))
    runs = f"{len(mine)} run{'s' * (len(mine) > 1)} of yours on {device}"
    return Own(engine, f"calibrated to {runs} ({path}): their times are met to {error:.0f} % (median)", error)


def calibrated(path: Path, device: str, base: EngineConstants) -> Own:
    """``base`` with a calibration: a file of rows, or of factors from ``bench/planner/calibrate.py``."""
    if path.suffix == ".csv":
        own = own_runs(path, device, base)
        if own is None:
            raise WeftError(f"--calibration {path} has no run of Weft on {device}; leave it out")
        return own
    factors = {item["constant"]: float(item["factor"]) for item in load(path)["all"]["factors"]}
    return Own(scaled(base, factors), f"calibrated with the factors of {path}", float("nan"))
