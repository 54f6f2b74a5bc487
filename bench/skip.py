"""SkipPipe (Blagoev et al. 2025, 2502.19913): what leaving out a quarter of the stages gains, and what it costs.

First the simulated iteration between two sites against our fastest full pipeline in the same memory, then the
validation loss of the whole model, trained with and without skipping (``recipes/skippipe.toml``) on the same tokens.

    python bench/skip.py [--quick] [--lr 2e-3 4e-3] [--runs FOLDER] [--json bench/results/skip.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime
from itertools import product
from math import ceil, floor
from pathlib import Path
from typing import Any

import torch
from picture import FONT, INK, LINE, PAGE, SOFT, photograph, text

from weft.errors import WeftError
from weft.observe.run_metrics import read_metrics
from weft.recipe import load_recipe
from weft.schedule.actions import Table, Value
from weft.schedule.build import build, builders
from weft.schedule.build.greedy import list_schedule
from weft.schedule.draw import ticks
from weft.schedule.kinds import kind_of
from weft.schedule.simulate import Costs, Simulation, simulate
from weft.schedule.skip import plan_paths, stage_lengths
from weft.schedule.stages import assign_stages, make_table, routes
from weft.shapes.shape import shape_of

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/skippipe.toml"
RESULTS = Path(__file__).parent / "results/skip.json"
PICTURE = ROOT / "docs/measured/skippipe.png"
RATIO = 0.25  # of the stages
GOALS = {"speedup": 1.3, "gap": 0.05}

# --- simulated: 8B parameters on 8 ranks of 40 TFLOP/s, four at each of two sites (tests/schedule/test_skip.py) ---

RANKS = 8
FORWARD = 2 * 1e9 * 4096 / 40e12  # s: 1B parameters, a microbatch of 4096 tokens
ACTIVATIONS = 8 * 4096 * 4096 * 2  # bit: bf16, width 4096
# the rank of each stage
STRAIGHT, FOLDED = [*range(RANKS)], [*range(RANKS), *reversed(range(RANKS))]


def two_sites(lengths: Sequence[float], gigabits: float) -> Costs:
    """25 Gbit/s inside a site, ``gigabits`` and 20 ms between them; a link carries one tensor at a time.

    ``lengths``: of the stages, in eighths of the model. Memory is in those units too.
    """
    took = {"F": FORWARD, "I": FORWARD, "W": FORWARD, "B": 2 * FORWARD}

    def move(value: Value, source: int, target: int) -> float:
        near = source // 4 == target // 4
        return (
            ACTIVATIONS / 25e9 + 1e-4 if near else ACTIVATIONS / (gigabits * 1e9) + 0.02
        )

    def size(value: Value) -> float:
        return lengths[value.stage] * (value.name in ("saved", "tape"))

    return Costs(lambda a: took[a.kind] * lengths[a.stage], move, size, exclusive=True)


def full_tables(
    microbatches: int, gigabits: float, limit: float, split: bool
) -> Iterator[tuple[str, Table]]:
    """Every way we have to run all stages: the named schedules, and the list scheduler on two placements.

    Not the ones that hold parameters twice.
    """
    for name, builder in builders().items():
        if (
            builder.splits <= split
            and not builder.twice
            and not name.startswith(("zb-1p", "zb-2p"))
        ):
            yield name, build(name, RANKS, microbatches)
    for name, ranks in (("list", STRAIGHT), ("list, folded", FOLDED)):
        stages = len(ranks)
        costs = two_sites([RANKS / stages] * stages, gigabits)
        holders, paths = [[r] for r in ranks], [range(stages)] * microbatches
        yield (
            name,
            list_schedule(
                "full", holders, paths, costs, ranks=RANKS, limit=limit, split=split
            ),
        )


def full_runs(
    microbatches: int, gigabits: float, limit: float, split: bool
) -> list[tuple[float, str, bool]]:
    """Of the full pipelines that stay in the memory: seconds per iteration, name, and whether a rank has one stage."""
    found = []
    for name, table in full_tables(microbatches, gigabits, limit, split):
        ran = simulate(
            table, two_sites([RANKS / table.stages] * table.stages, gigabits)
        )
        if max(ran.peaks) <= limit + 1e-6:
            found.append((ran.makespan, name, table.stages == RANKS))
    return sorted(found)


def partial(
    lengths: Sequence[float],
    microbatches: int,
    gigabits: float,
    limit: float,
    split: bool,
) -> Simulation:
    """The partial pipeline of stages with these lengths."""
    costs, holders = two_sites(lengths, gigabits), [[r] for r in STRAIGHT]
    paths = plan_paths(holders, microbatches, RATIO, costs, split=split)
    table = list_schedule(
        "skip", holders, paths, costs, ranks=RANKS, limit=limit, split=split
    )
    return simulate(table, costs)


def cell(at: tuple[bool, float, int, float]) -> dict[str, Any]:
    """One row: the fastest full pipeline of any kind and with one stage per rank, and the partial one."""
    split, limit, microbatches, gigabits = at
    case = (microbatches, gigabits, limit, split)
    full = full_runs(*case)
    same = next(run for run in full if run[2])
    ran, equal = (
        partial(stage_lengths(RANKS, RATIO), *case),
        partial([1.0] * RANKS, *case),
    )
    return {
        "split_backward": split, "memory": limit, "microbatches": microbatches, "gigabits_between_sites": gigabits,
        "full_s": round(full[0][0], 3), "full_schedule": full[0][1], "skip_s": round(ran.makespan, 3),
        "skip_peak": round(max(ran.peaks), 2), "ratio": round(full[0][0] / ran.makespan, 3),
        "ratio_one_stage_per_rank": round(same[0] / ran.makespan, 3),
        "ratio_equal_stages": round(full[0][0] / equal.makespan, 3),
    }  # fmt: skip


def simulated(grid: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """A row per split, memory, number of microbatches and bandwidth between the sites."""
    ends, middle = stage_lengths(RANKS, RATIO)[:2]
    print(
        f"{RANKS} ranks at two sites, {RATIO:.0%} of the stages skipped. Stage lengths: ends {ends:.3f}, middle "
        f"{middle:.3f} of an even share,\nso that a microbatch leaves out {RATIO * middle:.1%} of the layers. 'same': "
        f"against full pipelines with one stage per rank;\n'equal': with stages of equal length, {RATIO:.0%} of the "
        f"layers left out\n  {'backward':9}{'memory':>7}{'M':>4}{'Gbit/s':>8}{'full s':>9}{'skip s':>8}{'ratio':>7}"
        f"{'same':>7}{'equal':>7}   full"
    )
    rows = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for row in pool.map(cell, product(*grid)):
            rows.append(row)
            print(
                f"  {'I and W' if row['split_backward'] else 'whole':9}{row['memory']:7}{row['microbatches']:4}"
                f"{row['gigabits_between_sites']:8}{row['full_s']:9.2f}{row['skip_s']:8.2f}{row['ratio']:6.2f}x"
                f"{row['ratio_one_stage_per_rank']:6.2f}x{row['ratio_equal_stages']:6.2f}x   {row['full_schedule']}",
                flush=True,
            )
    return rows


# --- trained ---

# what two runs of one recipe share
TELLING = ("model", "data", "layout", "optimizer", "train", "validation")


def train(run: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The losses of ``weft train`` on the recipe; a run that is in the folder, with these settings, is not repeated."""
    wanted = [f"{key}={value}" for key, value in settings.items()]
    recipe = load_recipe(RECIPE, wanted)
    try:
        found = read_metrics(run)
        ran = found["run"][-1]["recipe"]
        ran["model"]["vocab"] = recipe.model.vocab  # filled in by the tokenizer
        parts = [getattr(recipe, name) for name in TELLING]
        same = all(
            type(part).model_validate(ran[name]) == part
            for name, part in zip(TELLING, parts, strict=True)
        )
        done = found["validation"][-1]["step"] == recipe.train.steps
    except (WeftError, KeyError):
        same = done = False
    if not (same and done):
        command = [
            sys.executable,
            "-m",
            "weft",
            "train",
            str(RECIPE),
            "--out",
            str(run),
        ]
        for item in wanted:
            command += ["--set", item]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        found = read_metrics(run)
    tokens = {0: 0} | {r["step"]: r["tokens"] for r in found["train"]}
    return {
        "validation": [
            (tokens[r["step"]], round(r["loss"], 4)) for r in found["validation"]
        ],
        "training": [(r["tokens"], r["loss"]) for r in found["train"]],
    }


def trained(
    folder: Path, rates: Sequence[float], more: dict[str, Any]
) -> dict[str, Any]:
    """Full and partial at each learning rate, with the gap between their validation losses at equal tokens."""
    runs: dict[str, Any] = {}
    for lr in rates:
        pair: dict[str, Any] = {}
        for side, skip in (("full", 0.0), ("skip", RATIO)):
            start = time.perf_counter()
            pair[side] = train(
                folder / f"{side}-{lr:g}",
                {"layout.skip": skip, "optimizer.lr": lr} | more,
            )
            pair[side]["seconds"] = round(time.perf_counter() - start)
        both = zip(pair["full"]["validation"], pair["skip"]["validation"], strict=True)
        if any(a[0] != b[0] for a, b in both):
            raise SystemExit(f"lr {lr:g}: the two sides have not seen the same tokens")
        runs[f"{lr:g}"] = pair
        full, skip = last(pair, "full"), last(pair, "skip")
        first, count = (
            pair["full"]["validation"][0][1],
            pair["full"]["validation"][-1][0],
        )
        print(
            f"  lr {lr:<7g} {count:,} tokens: full {first:.3f} -> {full:.3f}, {RATIO:.0%} skipped {skip:.3f}, "
            f"gap {skip / full - 1:+.1%}   ({pair['full']['seconds']} s, {pair['skip']['seconds']} s)",
            flush=True,
        )
    return runs


def last(pair: dict[str, Any], side: str) -> float:
    return pair[side]["validation"][-1][1]


def about(more: dict[str, Any]) -> dict[str, Any]:
    """What the runs are, and what share of the layers is really left out."""
    recipe = load_recipe(RECIPE, [f"{key}={value}" for key, value in more.items()])
    shape = recipe.model.model_copy(
        update={"vocab": int(recipe.data.tokenizer.partition(":")[2])}
    )
    layout, length = recipe.layout, recipe.data.seq_len
    table = make_table(layout, 2 * layout.pp, shape, length)
    stages = assign_stages(shape, layout, table, length)
    paths = routes(shape, layout, recipe.rows_per_pass(layout)[1], length)
    mean = sum(map(len, paths)) / len(paths)
    _, layer, head = shape_of(shape).forward_flops(length)
    return {
        "layers_per_stage": [len(s.layers) for s in stages],
        "layers_skipped": round(1 - mean / shape.layers, 4),
        "compute_skipped": round(
            (shape.layers - mean) * layer / (shape.layers * layer + head), 4
        ),
        "model": shape.model_dump(exclude_defaults=True),
        "seq_len": length,
        "train": recipe.train.model_dump(exclude_defaults=True),
        "optimizer": recipe.optimizer.model_dump(exclude_defaults=True),
    }


# --- drawn ---

SIDES = {
    "full": (kind_of("F").colour, "full pipeline"),
    "skip": (kind_of("W").colour, "a quarter of the stages skipped"),
}


def smooth(
    points: Sequence[tuple[int, float]], window: int = 10
) -> list[tuple[int, float]]:
    """Means of the last ``window`` losses."""
    values = [y for _, y in points]
    return [
        (x, sum(part) / len(part))
        for i, (x, _) in enumerate(points)
        if (part := values[max(0, i + 1 - window) : i + 1])
    ]


def drawn(pair: dict[str, Any], title: str, note: str) -> str:
    """The picture: losses over tokens, and under them the gap between the validation losses in percent."""
    width, height, left, right, top, middle, below, bottom = (
        1200,
        820,
        92,
        1010,
        138,
        530,
        590,
        750,
    )
    end = pair["full"]["validation"][-1][0]
    curves = {
        side: (smooth(pair[side]["training"]), pair[side]["validation"])
        for side in SIDES
    }
    losses = [y for pieces in curves.values() for curve in pieces for _, y in curve]
    low, high = floor(2 * min(losses)) / 2, ceil(2 * max(losses)) / 2
    both = zip(pair["full"]["validation"], pair["skip"]["validation"], strict=True)
    gaps = [(a[0], 100 * (b[1] / a[1] - 1)) for a, b in both]
    limit = 100 * GOALS["gap"]
    least, most = (
        floor(min(-1.0, *(g for _, g in gaps)) - 1),
        ceil(max(limit, *(g for _, g in gaps)) + 1),
    )

    def x(tokens: float) -> float:
        return left + (right - left) * tokens / end

    def y(loss: float) -> float:
        return middle - (middle - top) * (loss - low) / (high - low)

    def z(gap: float) -> float:
        return bottom - (bottom - below) * (gap - least) / (most - least)

    def line(points: Sequence[tuple[float, float]], style: str) -> str:
        return f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}" fill="none" {style}/>'

    soft = f'fill="{SOFT}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="{FONT}">'
        f'<rect width="{width}" height="{height}" fill="{PAGE}"/>',
        text(28, 50, title, 28, f'font-weight="700" fill="{INK}"'),
        text(28, 80, note, 17, soft),
        text(
            28, top - 18, "Loss, nats per token", 15, f'font-weight="600" fill="{INK}"'
        ),
        text(
            28,
            below - 16,
            "Gap of the validation losses, %",
            15,
            f'font-weight="600" fill="{INK}"',
        ),
    ]
    for i in range(int(2 * (high - low)) + 1):
        at = low + i / 2
        out.append(f'<path d="M{left} {y(at):.1f}H{right}" stroke="{LINE}"/>')
        out.append(
            text(left - 10, y(at) + 5, f"{at:g}", 14, f'text-anchor="end" {soft}')
        )
    stride = next(n for n in (1, 2, 5, 10, 20, 50, 100) if (most - least) / n <= 8)
    for gap in range(-(-least // stride) * stride, most + 1, stride):
        out.append(
            f'<path d="M{left} {z(gap):.1f}H{right}" stroke="{LINE if gap else SOFT}"/>'
        )
        out.append(
            text(
                left - 10,
                z(gap) + 5,
                f"{gap:+d}" if gap else "0",
                14,
                f'text-anchor="end" {soft}',
            )
        )
    for at in ticks(end):
        out.append(
            text(
                x(at),
                bottom + 26,
                f"{at / 1e3:,.0f}k" if at else "0",
                14,
                f'text-anchor="middle" {soft}',
            )
        )
    out.append(
        text(
            (left + right) / 2,
            bottom + 50,
            "tokens",
            14,
            f'text-anchor="middle" {soft}',
        )
    )
    for side, (training, validation) in curves.items():
        out.append(
            line(
                [(x(a), y(b)) for a, b in training],
                f'stroke="{SIDES[side][0]}" stroke-width="1.6" opacity=".45"',
            )
        )
        points = [(x(a), y(b)) for a, b in validation]
        out.append(line(points, f'stroke="{SIDES[side][0]}" stroke-width="3"'))
        out += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4.5" fill="{SIDES[side][0]}"/>'
            for a, b in points
        ]
    for i, (side, (colour, name)) in enumerate(SIDES.items()):
        row = top + 26 + 28 * i
        out.append(f'<path d="M660 {row - 5}h34" stroke="{colour}" stroke-width="3"/>')
        out.append(
            text(
                704,
                row,
                f"{name}: {last(pair, side):.3f} (lr {pair[side]['lr']:g})",
                16,
                f'font-weight="600" fill="{INK}"',
            )
        )
    out.append(
        text(
            660, top + 26 + 56, "dots: validation, always of the whole model", 14, soft
        )
    )
    out.append(
        text(
            660,
            top + 26 + 78,
            "faint: training, mean of 10 steps, of what each side ran",
            14,
            soft,
        )
    )
    goal = kind_of("B").colour
    out.append(
        f'<path d="M{left} {z(limit):.1f}H{right}" stroke="{goal}" stroke-width="2" stroke-dasharray="7 5"/>'
    )
    out.append(
        text(
            right + 10, z(limit) + 5, f"goal: within {limit:g} %", 14, f'fill="{goal}"'
        )
    )
    points = [(x(a), z(b)) for a, b in gaps]
    out.append(line(points, f'stroke="{INK}" stroke-width="2.4"'))
    out += [
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{INK}"/>' for a, b in points
    ]
    out.append(
        text(
            right + 10,
            points[-1][1] + 5,
            f"{gaps[-1][1]:+.1f} %",
            16,
            f'font-weight="700" fill="{INK}"',
        )
    )
    return "\n".join([*out, "</svg>"])


# --- running ---

#: Backward whole or as I and W, microbatches' worth of memory, microbatches, Gbit/s between the sites.
GRID: Sequence[Sequence[Any]] = ((False, True), (8, 16), (16, 32), (0.5, 1.0, 2.5))
QUICK_GRID: Sequence[Sequence[Any]] = ((False, True), (16,), (16,), (1.0,))
QUICK = {
    "train.steps": 12,
    "optimizer.warmup": 2,
    "optimizer.decay": 4,
    "validation.every": 6,
    "validation.batches": 2,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few cells and steps, to see that everything runs",
    )
    parser.add_argument("--only", choices=["simulated", "trained"])
    parser.add_argument(
        "--lr",
        type=float,
        nargs="+",
        help="learning rates to try on both sides; default: the recipe's",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        help="folder for the runs; those finished in it are not repeated",
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    more = QUICK if options.quick else {}
    load = round(os.getloadavg()[0], 1)
    results: dict[str, Any] = {
        "machine": {"date": f"{datetime.now():%Y-%m-%d %H:%M}", "torch": torch.__version__, "cores": os.cpu_count(),
                    "cpu": platform.processor() or platform.machine(), "load_before": load},
        "goals": GOALS,
    }  # fmt: skip
    if options.only != "trained":
        rows = simulated(QUICK_GRID if options.quick else GRID)
        ratios = [row["ratio"] for row in rows]
        held = sum(ratio >= GOALS["speedup"] for ratio in ratios)
        same = sum(row["ratio_one_stage_per_rank"] >= GOALS["speedup"] for row in rows)
        print(
            f"  {min(ratios):.2f}x to {max(ratios):.2f}x; {held} of {len(rows)} reach {GOALS['speedup']}x, "
            f"{same} against one stage per rank\n"
        )
        lengths = [round(x, 4) for x in stage_lengths(RANKS, RATIO)]
        share = round(RATIO * stage_lengths(RANKS, RATIO)[1], 4)
        results["simulated"] = {
            "skip": RATIO,
            "stage_lengths": lengths,
            "layers_skipped": share,
            "rows": rows,
        }
    if options.only != "simulated":
        facts, usual = about(more), load_recipe(RECIPE).optimizer.lr
        print(
            f"{RECIPE.name}: layers per stage {facts['layers_per_stage']}, a microbatch leaves out "
            f"{facts['layers_skipped']:.0%} of the layers, {facts['compute_skipped']:.0%} of the modelled work"
        )
        with tempfile.TemporaryDirectory() as scratch:
            runs = trained(options.runs or Path(scratch), options.lr or [usual], more)
        best = {
            side: min((last(pair, side), float(lr)) for lr, pair in runs.items())
            for side in SIDES
        }
        gap = best["skip"][0] / best["full"][0] - 1
        print(
            f"  best of each side: full {best['full'][0]:.3f}, skip {best['skip'][0]:.3f}, gap {gap:+.1%}"
        )
        results["trained"] = facts | {
            "best": {side: {"loss": loss, "lr": lr} for side, (loss, lr) in best.items()},
            "gap": round(gap, 4),
            "runs": {lr: {side: {"validation": pair[side]["validation"]} for side in SIDES}
                     | {"gap": round(last(pair, "skip") / last(pair, "full") - 1, 4)} for lr, pair in runs.items()},
        }  # fmt: skip
        shown = {
            side: runs[f"{lr:g}"][side] | {"lr": lr} for side, (_, lr) in best.items()
        }
        tried = (
            f" · each side at its best learning rate of {', '.join(runs)}"
            if len(runs) > 1
            else ""
        )
        share = f"{facts['layers_skipped']:.0%}"
        note = f"{facts['model']['layers']} layers on pp=4, {share} of them left out by each microbatch{tried}"
        if not options.quick:
            picture = drawn(shown, "SkipPipe: validation loss at equal tokens", note)
            photograph(picture, options.picture, options.chromium, "1200,820")
    if options.quick and options.json == RESULTS:
        return
    if options.only and options.json.exists():  # the other half stays as it was
        results = json.loads(options.json.read_text()) | results
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
