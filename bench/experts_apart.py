"""Experts of two domains, trained apart: of different size (HDEE), beside experts of one size at the same flops.

    python bench/experts_apart.py [--steps 60] [--quick] [--json bench/results/experts_apart.json]

Code and prose of this Python: its modules, and what ``help()`` knows of its words. Both sets are trained by ``weft
experts`` and asked by ``weft eval``, on documents of each domain that are held out. ``different``: the larger model is
that of code; ``turned``: that of prose; ``alike``: both of one size between, for as many flops in all.
No figure depends on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from step import machine

from weft.recipe import load_recipe
from weft.shapes.parameters import parameters
from weft.train.setup import prepare

RESULTS = Path(__file__).parent / "results" / "experts_apart.json"
LARGE = ("model.layers=4", "model.embed=96", "model.ffn=256")
SMALL = ("model.layers=2", "model.embed=48", "model.ffn=128")
MIDDLE = ("model.layers=3", "model.embed=72", "model.ffn=192")
SHARED = (
    "layout.island=1", "layout.shard=1", "sync.update=average", "sync.every=1", "sync.compress=none",
    "data.kind=jsonl", "data.seq_len=128", "data.validation=0.0", "validation.every=0", "train.batch=8",
    "optimizer.lr=3e-3", "model.heads=4", "train.threads=1",
)  # fmt: skip


def write_domains(folder: Path, count: int = 120, length: int = 1200) -> None:
    """Write documents of each domain: NAME.jsonl to learn from, NAME-held.jsonl of the last 20 of them."""
    modules = sorted(Path(json.__file__).parents[1].glob("*.py"))
    code = "\n".join(path.read_text(errors="ignore") for path in modules[:60])
    prose = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    for name, text in {"code": code, "prose": prose}.items():
        step = max(length, len(text) // count)
        lines = [
            json.dumps({"text": text[i : i + length]}) + "\n"
            for i in range(0, len(text), step)
        ][:count]
        (folder / f"{name}.jsonl").write_text("".join(lines[:-20]))
        (folder / f"{name}-held.jsonl").write_text("".join(lines[-20:]))


def weft(*words: str) -> Any:
    """What a command of Weft's prints as JSON."""
    ended = subprocess.run(
        [sys.executable, "-m", "weft", *words, "--json"], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    if ended.returncode:
        raise SystemExit(ended.returncode)
    return json.loads(ended.stdout)


def parameters_of(size: tuple[str, ...], data: str) -> int:
    """How many parameters an expert of this size has."""
    shape = prepare(load_recipe("islands", [*SHARED, *size, f"data.path={data}"])).shape
    return sum(parameter.numel for parameter in parameters(shape))


def measured(
    folder: Path, name: str, sizes: dict[str, tuple[str, ...]], steps: int
) -> dict[str, Any]:
    """Train a set of experts, and ask it on both domains."""
    words = [x for s in (*SHARED, f"train.steps={steps}") for x in ("--set", s)]
    for domain, size in sizes.items():
        path = folder / f"{domain}.jsonl"
        words += ["--expert", f"{domain} data.path={path} {' '.join(size)}"]
    rows = weft("experts", "islands", *words, "--out", str(folder / name))
    asked = ("eval", "--checkpoint", str(folder / name), "--held-out")
    losses = {
        domain: weft(*asked, str(folder / f"{domain}-held.jsonl"))["held-out"]
        for domain in sizes
    }
    labels = sum(each["labels"] for each in losses.values())
    both = sum(each["loss"] * each["labels"] for each in losses.values()) / labels
    flops = sum(row["flops"] for row in rows)
    print(f"{name:10} {flops:.3g} flops, loss on both {both:.4f}", flush=True)
    return {"flops": flops, "loss": both, "domains": losses, "experts": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="a few steps: whether it runs")  # fmt: skip
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    steps = 4 if given.quick else given.steps
    results: dict[str, Any] = {"machine": machine(), "steps": steps}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_domains(folder)
        data = str(folder / "code.jsonl")
        both = sum(parameters_of(size, data) for size in (LARGE, SMALL))
        more = round(steps * both / (2 * parameters_of(MIDDLE, data)))
        for kind, code, prose, count in (
            ("different", LARGE, SMALL, steps),
            ("turned", SMALL, LARGE, steps),
            ("alike", MIDDLE, MIDDLE, more),
        ):
            sizes = {"code": code, "prose": prose}
            results[kind] = measured(folder, kind, sizes, count)
    for kind in ("different", "turned"):
        ratio = results[kind]["loss"] / results["alike"]["loss"]
        results[f"{kind} over alike"] = ratio
    given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
