"""Temperature, static and with a cool-down, on code and on prose of which there is 50 times less.

Four runs of a small character model at equal steps for each size of the prose; the validation loss is that of unseen
prose. Writes ``bench/results/mixtures.json``. About three minutes for each size on one core.

    python bench/mixtures.py [--steps N] [--sizes 4000 8000 20000]
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from weft.layout.mesh import Mesh
from weft.recipe import build_recipe
from weft.train.setup import prepare
from weft.train.training import train_job

RESULT = Path(__file__).with_name("results") / "mixtures.json"
#: Characters of prose that are trained on; of code there are fifty times as many.
SIZES = (4_000, 8_000, 20_000)
#: The settings of each run.
RUNS: dict[str, dict[str, Any]] = {
    "T=1": {"mix_temperature": 1.0},
    "T=2": {"mix_temperature": 2.0},
    "T=5": {"mix_temperature": 5.0},
    "cool-down 5 to 1": {"mix_temperature": 5.0, "mix_final_temperature": 1.0},
}


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


def measure(folder: Path, size: int, mix: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train with a mixture, and return the validation losses on unseen prose with their steps.

    ``size``: characters of prose to train on.
    """
    code = package_text("asyncio", "multiprocessing", "unittest", "concurrent")
    prose = package_text("pydoc_data")
    paths = {
        "large": write_documents(folder / "large.jsonl", code[: 50 * size]),
        "small": write_documents(folder / "small.jsonl", prose[:size]),
        "unseen": write_documents(folder / "unseen.jsonl", prose[50_000:80_000]),
    }
    recipe = build_recipe({
        "model": {"layers": 2, "embed": 64, "heads": 4, "ffn": 192, "tied": True},
        "data": {
            "sources": [
                {"kind": "jsonl", "path": paths[name], "name": name}
                for name in ("large", "small")
            ],
            "mix": "temperature", "seq_len": 128, "validation": paths["unseen"],
            "cache": str(folder / "cache"), **mix,
        },
        "train": {"steps": steps, "batch": 8, "device": "cpu", "threads": 1},
        "optimizer": {"lr": 4e-3, "warmup": 50},
        "validation": {"every": max(1, steps // 15), "batches": 0},
        "observe": {"split_every": 0, "trackers": []},
    })  # fmt: skip
    outcome = train_job(
        prepare(recipe), Mesh.single(), Path(tempfile.mkdtemp()) / "run"
    )
    curve = [(r["step"], r["loss"]) for r in outcome.metrics("validation")]
    if curve[-1][0] < steps:
        raise SystemExit("a run was stopped; nothing is written")
    lowest = min(curve, key=lambda point: point[1])
    return {"final": curve[-1][1], "lowest": lowest[1], "lowest_at": lowest[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--sizes", type=int, nargs="+", default=[*SIZES])
    asked = parser.parse_args()
    result: dict[str, Any] = {"steps": asked.steps, "sizes": {}}
    for size in asked.sizes:
        runs = {}
        for name, mix in RUNS.items():
            with tempfile.TemporaryDirectory() as folder:
                runs[name] = measure(Path(folder), size, mix, asked.steps)
            print(size, name, runs[name], flush=True)
        result["sizes"][size] = {"runs": runs} | compared(runs, asked.steps)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def compared(runs: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the final loss of the cool-down over that of the best static temperature, and what overfits."""
    static = min(runs[name]["final"] for name in RUNS if name.startswith("T="))
    cooled = runs["cool-down 5 to 1"]["final"]
    return {
        "best_static": static,
        "cool_down_over_best_static": cooled / static,
        "hot_is_lowest_before_its_end": runs["T=5"]["lowest_at"] < steps,
    }


if __name__ == "__main__":
    main()
