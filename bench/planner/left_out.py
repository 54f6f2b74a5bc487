"""How far a calibration carries to rows that it has not seen: whole sources, makers, sizes, devices and few runs.

    python bench/planner/left_out.py ROWS.csv [--sample N] [--out bench/results/planner.json]

Five ways to leave rows out, each by the mean absolute error of the step time in percent, as median and mean over
sources of five rows or more:

``sources``     fitted to all other sources
``strangers``   fitted to the sources of other people
``shapes``      fitted to the source's other shapes (layers, widths, lengths)
``beyond``      fitted to the source's smaller (larger) two thirds: by parameters, length, ranks or tokens of a rank
``devices``     fitted to the source's other devices, precisions and kinds of model
``three``       fitted to three rows of the source, six draws

``checks`` are eight rows of Dao 2023 (2307.08691, table 1: A100, FlashAttention 1 and 2), which nothing was fitted to.
``regret`` is the mean over jobs of how much slower the first choice is than the best layout measured; once more without
sources whose times are sums of pieces instead of steps that ran (``evaluate.composed``), and for jobs whose rows can
tell (``telling.py``), without and with rows that the source's own rows contradict. ``jobs`` lists the jobs that ran.
The profile is the median
ratio of predicted to measured time, by kind, with presets and with sources left out.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from ablate import seconds
from calibrate import group, held_out, knobs_of, masks_of, system
from correction import correct
from evaluate import composed, error, regrets
from numpy.typing import NDArray
from rows import parse, read_rows
from script import run
from telling import choice, jobs

from weft.planner.fit import KNOBS, Measurement, fit, predict

Array = NDArray[np.float64]
#: Sizes by whose smallest and largest third rows are left out.
SIZES: dict[str, Callable[[Measurement], float]] = {
    "parameters": lambda row: float(row.shape.parameters),
    "length": lambda row: float(row.plan.seq),
    "ranks": lambda row: float(row.plan.world),
    "tokens": lambda row: float(row.plan.micro_batch * row.plan.seq / row.plan.cp),
}
#: Draws of three rows.
DRAWS = 6
#: Dao 2023 (2307.08691), table 1: model flops per second of eight A100 in TFLOP/s, by (layers, width, heads, length),
#: under FlashAttention 1 and 2.
CHECKS = {
    (24, 2048, 16, 2048): (189, 196),
    (24, 2048, 16, 8192): (170, 220),
    (32, 2560, 20, 2048): (189, 205),
    (32, 2560, 20, 8192): (175, 225),
}


def check_rows() -> list[Measurement]:
    """Return the rows of :data:`CHECKS`; the batch is not stated, so 16,384 tokens a rank and eight microbatches."""
    rows = []
    for (layers, width, heads, length), speeds in CHECKS.items():
        for version, speed in zip((1, 2), speeds, strict=True):
            micro = 16384 // length
            cells = {
                "id": f"{layers}x{width} {length} flash {version}", "source": "Dao 2023", "source_ref": "2307.08691",
                "model": "GPT", "layers": f"{layers}", "hidden": f"{width}", "heads": f"{heads}", "vocab": "50257",
                "seq_len": f"{length}", "hardware": "A100-SXM-80GB", "gpu_mem_gb": "80", "n_gpus": "8", "tp": "1",
                "pp": "1", "dp": "8", "micro_batch": f"{micro}", "global_batch": f"{64 * micro}", "precision": "bf16",
                "recompute": "none", "framework": "Megatron-LM", "attention": f"flash-attention v{version}",
                "tflops_per_gpu": f"{speed}",
            }  # fmt: skip
            rows.append(parse(cells))
    return rows


def maker(name: str) -> str:
    """Return whose rows those of the source ``name`` are; Megatron-LM's papers are NVIDIA's."""
    first = name.split()[0]
    return "NVIDIA" if first in ("Megatron-LM", "Korthikanti") else first


def kind(row: Measurement) -> str:
    """Return the kind of a row: generation of its device, precision, class of program, experts, long sequences."""
    marks = [row.device.split("-")[0], f"{row.bits} bits", row.family]
    marks += ["experts"] * bool(row.shape.experts)
    marks += ["cut sequences"] * bool(row.plan.cp > 1)
    return ", ".join(marks)


def left_sources(
    by_source: dict[str, list[Measurement]], names: Sequence[str], sample: int, whose: Callable[[str], str]
) -> dict[str, Array]:  # fmt: skip
    """Predict each source by constants fitted to those for which ``whose`` says something else."""
    chosen = [
        row
        for rows in by_source.values()
        for row in rows[:: max(1, -(-len(rows) // sample))]
    ]
    owner = np.array([whose(row.source) for row in chosen])
    count = {name: sum(row.source == name for row in chosen) for name in by_source}
    even = np.array([min(1.0, 12 / count[row.source]) for row in chosen])
    keys = list(dict.fromkeys(whose(name) for name in names))
    theta = fit(chosen, np.array([even * (owner != key) for key in keys]), KNOBS)
    return {
        name: predict(by_source[name], theta[keys.index(whose(name))], KNOBS)
        for name in names
    }


def folds(rows: Sequence[Measurement]) -> dict[str, list[NDArray[np.bool_]]]:
    """Return the sets of rows that are left out within one source, by way."""
    ways: dict[str, list[NDArray[np.bool_]]] = {
        "beyond": [],
        "devices": [],
        "three": [],
    }
    for size in SIZES.values():
        values = np.array([size(row) for row in rows])
        steps = np.unique(values)
        part = len(steps) // 3
        for held in (steps[:part], steps[len(steps) - part :]):
            out = np.isin(values, held)
            if 0 < out.sum() <= len(rows) - 2:
                ways["beyond"].append(out)
    groups = [group(row) for row in rows]
    if len(set(groups)) > 1:
        ways["devices"] = [
            np.array([other == name for other in groups]) for name in set(groups)
        ]
    draw = np.random.default_rng(0)
    for _ in range(DRAWS):
        out = np.ones(len(rows), dtype=bool)
        out[draw.choice(len(rows), 3, replace=False)] = False
        ways["three"].append(out)
    return ways


def within(rows: Sequence[Measurement]) -> dict[str, float]:
    """Return the error of rows left out of their source's own calibration, by way."""
    ways = folds(rows)
    everything = [(way, out) for way, outs in ways.items() for out in outs]
    knobs = knobs_of(rows)
    masks = masks_of(knobs, rows)
    weights = np.array([(~out).astype(float) for _, out in everything])
    errors: dict[str, list[float]] = {}
    for (way, out), theta in zip(
        everything, fit(rows, weights, knobs, masks), strict=True
    ):
        whole = predict(rows, theta, knobs, masks)
        seen = [row for row, left in zip(rows, out, strict=True) if not left]
        rest = [row for row, left in zip(rows, out, strict=True) if left]
        factor = correct(seen, whole[~out]).factor(rest)
        off = np.abs(whole[out] * factor / seconds(rest) - 1)
        errors.setdefault(way, []).extend(100 * off)
    return {way: float(np.mean(values)) for way, values in errors.items()}


def telling(
    by_source: dict[str, list[Measurement]], ways: dict[str, dict[str, Array]]
) -> tuple[dict[str, float], list[dict[str, object]]]:
    """Return the regret of jobs whose rows can tell, by way, and every job whose steps ran."""
    regret: dict[str, list[float]] = {}
    table: list[dict[str, object]] = []
    for name, rows in by_source.items():
        for job in jobs(rows):
            picked = {way: choice(rows, job, times[name]) for way, times in ways.items() if name in times}  # fmt: skip
            if not (job.ran and picked):
                continue
            for way, each in picked.items():
                if job.tells:
                    regret.setdefault(f"{way}, rows that can tell", []).append(
                        each.regret
                    )
                    regret.setdefault(f"{way}, and odd rows", []).append(each.among_all)
            first = rows[next(iter(job.layouts.values()))[0]]
            table.append({
                "source": name[:60], "layers": first.shape.layers, "width": first.shape.embed,
                "ranks": first.plan.world, "batch": first.plan.batch, "layouts": len(job.layouts),
                "odd": [rows[i].id for plan in job.odd for i in job.layouts[plan]],
                "gap": round(100 * job.gap, 1), "noise": round(100 * job.noise, 1), "tells": job.tells,
                "regret": {way: round(each.regret, 1) for way, each in picked.items()},
                "with odd rows": {way: round(each.among_all, 1) for way, each in picked.items()},
            })  # fmt: skip
    return {way: statistics.fmean(each) for way, each in regret.items()}, table


def middle(values: dict[str, float]) -> dict[str, float]:
    numbers = list(values.values())
    return {"median": round(statistics.median(numbers), 2), "mean": round(statistics.fmean(numbers), 2)}  # fmt: skip


def profile(
    rows: Sequence[Measurement], ways: dict[str, Array]
) -> dict[str, dict[str, float]]:
    """Return rows and median ratio of predicted to measured time, by kind and way."""
    kinds = np.array([kind(row) for row in rows])
    measured = seconds(list(rows))
    found = {}
    for name in sorted(set(kinds)):
        at = kinds == name
        ratios = {
            way: round(float(np.median((times / measured)[at])), 3)
            for way, times in ways.items()
        }
        found[name] = {"rows": int(at.sum())} | ratios
    return found


def measure(path: Path, sample: int) -> dict[str, object]:
    """Return all errors, by way and by source, as plain data."""
    by_source: dict[str, list[Measurement]] = {}
    systems: dict[str, list[Measurement]] = {}
    for row in read_rows(path)[0]:
        if row.seconds:
            by_source.setdefault(row.source, []).append(row)
            systems.setdefault(system(row), []).append(row)
    names = [name for name, rows in by_source.items() if len(rows) >= 5]
    presets = {name: predict(by_source[name], np.zeros(len(KNOBS))) for name in names}
    ways = {
        "presets": presets,
        "sources": left_sources(by_source, names, sample, str),
        "strangers": left_sources(by_source, names, sample, maker),
    }
    by_way = {
        way: {name: error(times[name], seconds(by_source[name])) for name in names}
        for way, times in ways.items()
    }
    for name, rows in systems.items():
        if len(rows) < 5:
            continue
        part = rows[:: max(1, -(-len(rows) // (2 * sample)))]
        for way, wrong in within(part).items():
            by_way.setdefault(way, {})[name] = wrong
        out = held_out(part)
        if not np.isnan(out).any():
            by_way.setdefault("shapes", {})[name] = error(out, seconds(part))
    rows = [row for name in names for row in by_source[name]]
    joined = {way: np.concatenate([times[name] for name in names]) for way, times in ways.items()}  # fmt: skip
    choices = {
        way: [first for name in names for first, _ in regrets(by_source[name], times[name])]
        for way, times in ways.items()
    }  # fmt: skip
    ran = [name for name in names if not composed(by_source[name])]
    choices |= {
        f"{way}, steps that ran": [
            first for name in ran for first, _ in regrets(by_source[name], times[name])
        ]
        for way, times in ways.items()
    }
    told, table = telling({name: by_source[name] for name in names}, ways)
    checks = check_rows()
    ratio = predict(checks, np.zeros(len(KNOBS))) / seconds(checks)
    return {
        "command": "python bench/planner/left_out.py measured.csv",
        "rows": len(rows),
        "errors": {way: middle(values) for way, values in by_way.items()},
        "regret": {way: round(statistics.fmean(each), 2) for way, each in choices.items()}
        | {way: round(mean, 2) for way, mean in told.items()},
        "jobs": table,
        "checks": {row.id: round(float(r), 3) for row, r in zip(checks, ratio, strict=True)},
        "sources": {
            way: {name[:60]: round(wrong, 1) for name, wrong in values.items()}
            for way, values in by_way.items()
        },
        "profile": profile(rows, {way: joined[way] for way in ("presets", "sources")}),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Errors on rows that a calibration has not seen."
    )
    parser.add_argument("rows", type=Path, metavar="ROWS.csv")
    parser.add_argument(
        "--sample", type=int, default=40, help="rows of a source in a fit, at most"
    )
    parser.add_argument("--out", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    found = measure(options.rows, options.sample)
    for part in ("errors", "regret", "checks", "profile"):
        print(part)
        for name, value in found[part].items():  # type: ignore[attr-defined]
            print(f"  {name:60} {value}")
    print("jobs")
    for job in found["jobs"]:  # type: ignore[attr-defined]
        print(f"  {job}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
