"""Refits the model, within its bounds, to the measured rows of the user's own runs (:mod:`weft.observe.measured`).

The fit is the same as for published runs, drawn towards the presets, so few runs change little.
"""

import csv
import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import UsageError, WeftError
from weft.planner.cost import AWAY, CONTEXT, RECOMPUTE, Plan, schedule_number
from weft.planner.engine_constants import ENGINES, EngineConstants, scaled
from weft.planner.fit import KNOBS, Measurement, constants, fit, predict
from weft.planner.machine import find_device, machine_of
from weft.recipe import PLACES
from weft.shapes.shape import shape_of_sizes

#: What plans and shapes call the columns that they take as they are.
PLAN = {"tp": "tp", "cp": "cp", "pp": "pp", "vpp": "virtual", "micro_batch": "micro_batch", "global_batch": "batch",
        "seq_len": "seq"}  # fmt: skip
SHAPE = {"layers": "layers", "hidden": "embed", "heads": "heads", "kv_heads": "kv_heads", "ffn": "ffn",
         "vocab": "vocab", "tied_embeddings": "tied"}  # fmt: skip
#: Rows that are looked at, the newest.
NEWEST = 200


def read_own(path: Path) -> list[Measurement]:
    """Read the measured runs that Weft has appended to the CSV file ``path``, oldest first.

    Truncated lines and lines of other training programs are left out.
    """
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            with suppress(KeyError, ValueError, TypeError, UsageError):
                rows.append(_row(cells))
    return rows


def _row(cells: dict[str, str]) -> Measurement:
    """Parse a line that :func:`weft.observe.measured.row_of_run` wrote."""
    if cells["framework"] != "weft":
        raise ValueError("a row of another program")
    notes = dict(re.findall(r"(\w+)=([\w-]+)", cells["notes"]))
    if notes.get("offload", "none") != "none":
        raise ValueError("a row of before [memory]")
    sharding = cells["dp_sharding"]
    shard = float(sharding.partition("shard=")[2] or 1)
    plan = Plan(
        **{field: float(cells[column]) for column, field in PLAN.items()},
        **{kind: PLACES.index(notes.get(kind, "device")) for kind in AWAY},
        dp=float(cells["dp"]) / shard, shard=shard, zero=3 if "FSDP" in sharding else int(sharding != "none"),
        context=CONTEXT.index(notes["context"]) if notes["context"] in CONTEXT else 0,
        schedule=schedule_number(notes["schedule"]), recompute=RECOMPUTE.index(cells["recompute"]),
        bits=16 if cells["precision"] == "bf16" else 32,
    )  # fmt: skip
    sizes = {field: float(cells[column]) for column, field in SHAPE.items()}
    shape = shape_of_sizes(**sizes, head_dim=sizes["embed"] / sizes["heads"])
    device, node = find_device(cells["hardware"]), int(cells["gpus_per_node"])
    rack = node < device.domain and device.domain > 8
    machine = machine_of(device, int(plan.bits), domain=device.domain if rack else node)
    return Measurement(cells["id"], cells["source"], "weft", "weft", device.name, int(plan.bits), shape, machine, plan,
               ENGINES["weft"], float(cells["iter_time_s"]), float(cells["peak_mem"]))  # fmt: skip


def load(path: Path) -> dict[str, Any]:
    """Load a calibration that ``bench/planner/calibrate.py`` wrote, as parsed JSON.

    Raises :class:`WeftError` if ``path`` cannot be read, and :class:`UsageError` if it is no calibration.
    """
    try:
        calibration = json.loads(path.read_text())
        if calibration["version"] != 2 or not isinstance(
            calibration["all"]["factors"], list
        ):
            raise ValueError
        calibration["sources"], calibration["memory"]
        return calibration
    except OSError as error:
        raise WeftError(f"cannot read calibration {path}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UsageError(
            f"{path} is not a calibration; write one with python bench/planner/calibrate.py ROWS.csv --out FILE"
        ) from None


@dataclass(frozen=True)
class Own:
    """Constants of a program that are fitted to the user's runs.

    ``engine``: the fitted constants. ``message``: text that tells the user to which runs they are fitted. ``error``:
    median error of the predicted step times after the fit, in percent; NaN if it is not known.
    """

    engine: EngineConstants
    message: str
    error: float


def own_runs(
    path: Path, device: str, base: EngineConstants = ENGINES["weft"]
) -> Own | None:
    """Fit the constants ``base`` to the newest measured runs of Weft on the device preset ``device``.

    ``path``: the CSV file of measured runs. Returns None if the file has no such run.
    """
    if not path.is_file():
        return None
    rows = [row for row in read_own(path) if row.device == device][-NEWEST:]
    if not rows:
        return None
    theta = fit(rows)
    engine = scaled(
        base,
        {knob.field: float(np.exp(x)) for knob, x in zip(KNOBS, theta, strict=True)},
    )
    held = constants(rows).get("weft")
    engine = engine if held is None else replace(engine, constant=held)
    off = np.abs(
        predict(rows, theta) / np.array([r.seconds for r in rows], dtype=float) - 1
    )
    error = 100 * float(np.median(off))
    runs = f"{len(rows)} run{'s' * (len(rows) > 1)} of yours on {device}"
    return Own(
        engine,
        f"calibrated to {runs} ({path}): their times are met to {error:.0f} % (median)",
        error,
    )


def calibrated(path: Path, device: str, base: EngineConstants) -> Own:
    """Return the constants ``base`` as adjusted by a calibration file, with a text about the fit and its error.

    ``path``: a CSV file of measured runs, of which those on ``device`` are used; or a file of factors on the constants,
    from ``bench/planner/calibrate.py``. Raises :class:`WeftError` if the file has no run on ``device``.
    """
    if path.suffix == ".csv":
        own = own_runs(path, device, base)
        if own is None:
            raise WeftError(
                f"--calibration {path} has no run of Weft on {device}; leave it out"
            )
        return own
    factors = {
        item["constant"]: float(item["factor"]) for item in load(path)["all"]["factors"]
    }
    return Own(
        scaled(base, factors), f"calibrated with the factors of {path}", float("nan")
    )
