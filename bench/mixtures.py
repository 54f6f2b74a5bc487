"""Temperature, constant and with a cool-down, on code and on prose of which there is 50 times less.

As many cool-downs as constant temperatures are trained, for equally many steps, on each size of the prose, with a small
model of characters. The best of each kind is chosen by its last loss on a part of the unseen prose, and judged on
another part of it and on unseen code. Runs that are done stay in ``--work``, so that the script goes on where it was
ended. With ``--read`` nothing is trained, and ``missing`` in the results names the settings that are not done yet.
About 45 seconds for each run on one core.

    nice -n 5 python bench/mixtures.py [--steps N] [--sizes 4000 8000 20000] [--seeds N] [--work FOLDER] [--quick]
        [--read] [--json bench/results/mixtures.json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
from pathlib import Path
from statistics import mean
from typing import Any

from weft.api import start
from weft.observe.run_metrics import read_metrics
from weft.recipe import build_recipe
from weft.train.ensemble_members import open_members

RESULT = Path(__file__).with_name("results") / "mixtures.json"
#: Characters of prose that are trained on; of code there are fifty times as many.
SIZES = (4_000, 8_000, 20_000)
#: Constant temperatures, and the first and last temperatures of cool-downs: equally many, from hot to cool.
STATIC = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
COOLED = ((2.0, 1.0), (3.0, 1.0), (3.0, 1.5), (5.0, 1.0), (5.0, 2.0), (10.0, 3.0))
#: Sequences of a step, and tokens of a sequence.
BATCH, LENGTH = 8, 128


def settings() -> dict[str, dict[str, float]]:
    """Return the settings of each run by the name of the run."""
    static = {f"T={t:g}": {"mix_temperature": t} for t in STATIC}
    cooled = {
        f"{hot:g} to {cool:g}": {"mix_temperature": hot, "mix_final_temperature": cool}
        for hot, cool in COOLED
    }
    return static | cooled


def package_text(*names: str) -> str:
    """Return the source text of packages of the standard library, file after file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for name in names for file in sorted((root / name).rglob("*.py"))]
    return "".join(file.read_text(errors="replace") for file in files)


def write_documents(path: Path, text: str) -> str:
    """Write ``text`` as documents of 1,000 characters, and return the file's path."""
    pieces = [text[i : i + 1000] for i in range(0, len(text), 1000)]
    path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return str(path)


def write_texts(folder: Path, size: int) -> dict[str, str]:
    """Write what is trained on, chosen by, and judged on; return the paths. ``size``: characters of prose."""
    folder.mkdir(parents=True, exist_ok=True)
    code = package_text("asyncio", "multiprocessing", "unittest", "concurrent")
    prose = package_text("pydoc_data")
    texts = {
        "large": code[: 50 * size],
        "small": prose[:size],
        "chosen": prose[50_000:70_000],
        "judged": prose[70_000:110_000],
        "judged_code": package_text("urllib")[:40_000],
    }
    return {
        name: write_documents(folder / f"{name}.jsonl", text)
        for name, text in texts.items()
    }


def measure(
    folder: Path, size: int, mix: dict[str, Any], steps: int, seed: int
) -> dict[str, Any]:
    """Train with a mixture, unless that is done, and return the losses on unseen texts."""
    done = folder / "measured.json"
    if done.exists():
        return dict(json.loads(done.read_text()))
    paths = write_texts(folder / "texts", size)
    recipe = build_recipe({
        "model": {"layers": 2, "embed": 64, "heads": 4, "ffn": 192, "tied": True},
        "data": {
            "sources": [
                {"kind": "jsonl", "path": paths[name], "name": name}
                for name in ("large", "small")
            ],
            "mix": "temperature", "seq_len": LENGTH, "validation": paths["chosen"], "seed": seed,
            "cache": str(folder / "cache"), **mix,
        },
        "layout": {},
        "train": {"steps": steps, "batch": BATCH, "device": "cpu", "threads": 1, "seed": seed},
        "optimizer": {"lr": 4e-3, "warmup": 50},
        "validation": {"every": max(1, steps // 12), "batches": 0},
        "checkpoint": {"every": 300},
        "observe": {"split_every": 0, "trackers": []},
    })  # fmt: skip
    begun = (folder / "run").exists()
    start(recipe, folder / "run", resume="auto" if begun else None)
    curve = [(r["step"], r["loss"]) for r in read_metrics(folder / "run")["validation"]]
    if curve[-1][0] < steps:
        raise SystemExit("a run was stopped; it is not counted")
    lowest = min(curve, key=lambda point: point[1])
    trained = open_members([folder / "run"], "cpu", print)
    row = {
        "chosen_by": curve[-1][1], "lowest": lowest[1], "lowest_at": lowest[0],
        "judged": trained.held_out_loss(paths["judged"]).joint,
        "judged_code": trained.held_out_loss(paths["judged_code"]).joint,
    }  # fmt: skip
    done.write_text(json.dumps(row))
    shutil.rmtree(folder / "run")
    shutil.rmtree(folder / "cache", ignore_errors=True)
    return row


def compared(rows: dict[str, list[dict[str, Any]]], steps: int) -> dict[str, Any]:
    """Compare the best cool-down with the best constant temperature, by the means over their seeds.

    ``rows``: the runs of each setting, a run for each seed; those without a run are left out.
    """
    done = {name: kept for name, kept in rows.items() if kept}
    means = {
        name: {
            key: mean(row[key] for row in kept)
            for key in ("chosen_by", "lowest", "judged", "judged_code")
        }
        for name, kept in done.items()
    }
    best = {
        kind: min(
            (name for name in means if name.startswith("T=") == (kind == "static")),
            key=lambda name: means[name]["chosen_by"],
        )
        for kind in ("static", "cooled")
    }
    static, cooled = means[best["static"]], means[best["cooled"]]
    hot = done["T=5"][0]
    return {
        "missing": [name for name in rows if name not in done],
        "means": means, "best": best,
        "cool_down_over_best_static": cooled["chosen_by"] / static["chosen_by"],
        "judged_cool_down_over_best_static": cooled["judged"] / static["judged"],
        "code_cool_down_over_best_static": cooled["judged_code"] / static["judged_code"],
        "hot_is_lowest_before_its_end": hot["lowest_at"] < steps,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--sizes", type=int, nargs="+", default=[*SIZES])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("/tmp/mixtures"))
    parser.add_argument("--quick", action="store_true", help="tiny: whether it runs")
    parser.add_argument("--read", action="store_true", help="train nothing")
    parser.add_argument("--json", type=Path, default=RESULT)
    asked = parser.parse_args()
    sizes, seeds, steps = asked.sizes, asked.seeds, asked.steps
    if asked.quick:
        sizes, seeds, steps = [2_000], 1, 4
    runs: dict[int, dict[str, list[Any]]] = {
        size: {name: [] for name in settings()} for size in sizes
    }
    for seed in range(seeds):
        for size in sizes:
            for name, mix in settings().items():
                folder = asked.work / f"{size}-{steps}-{seed}-{name.replace(' ', '-')}"
                if asked.read and not (folder / "measured.json").exists():
                    continue
                runs[size][name].append(measure(folder, size, mix, steps, seed))
                print(seed, size, name, runs[size][name][-1], flush=True)
    done = {size: {"runs": rows} | compared(rows, steps) for size, rows in runs.items()}
    if not asked.quick:
        written = {"steps": steps, "batch": BATCH, "sizes": done}
        asked.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
