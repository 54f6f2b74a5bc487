"""L-GreCo: bytes with a setting for each tensor beside one setting for all, at no more error; and runs with both.

    python bench/greco.py [--steps 200] [--gradients] [--quick] [--json bench/results/greco.json]

First on tensors: a small transformer's gradients, and what 20 steps of AdamW have changed. One setting for every tensor
is the baseline of the paper (Markov et al. 2024). Top-k has a second one, which Weft uses where L-GreCo is off: the
largest elements of all tensors together, which already takes more of some tensors than of others; it is given as many
bytes as L-GreCo needs, and the ratio is of the errors. Then runs of two islands as a user types them: bytes that an
island sends, and the loss at the end on what is held out. In the first runs differences of ten steps of AdamW travel;
in ``runs of gradients``, as in the paper, those of one step of plain gradient descent. ``--gradients`` makes only
these runs, and writes them beside the other figures.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from step import machine

from weft.layout.mesh import Mesh
from weft.observe.run_metrics import read_metrics
from weft.recipe import load_recipe
from weft.sync.compress import build_compressor
from weft.sync.greco import allocate_compressors, squared_error
from weft.train.setup import build_for_training, prepare
from weft.train.step import accumulate, clear_gradients, train_step

T = torch.Tensor

RESULTS = Path(__file__).parent / "results" / "greco.json"
WORDS = ("topk:0.01", "topk:0.1", "randk:0.1", "powersgd:4", "int6", "int4")
RUNS = ("topk:0.01", "powersgd:4", "int4")


def tensors(steps: int = 20) -> dict[str, dict[str, T]]:
    """Gradients of a transformer that has taken so many steps, and what the next so many steps change."""
    recipe = load_recipe("islands", ["train.batch=8"], "")
    job, mesh = prepare(recipe), Mesh.single()
    model, state = build_for_training(job.shape, mesh, recipe)
    loader, batch = job.loader(job.corpus.train, mesh), recipe.train.batch
    for step in range(steps):
        train_step(
            model, state, loader.step(step * batch) or [], mesh, lr=3e-3, clip=1.0
        )
    accumulate(model, state, loader.step(steps * batch) or [], mesh)
    gradients = {
        name: grad.detach().clone() for name, grad in state.gradients().items()
    }
    clear_gradients(model, state)
    before = {h.name: h.local.detach().clone() for h in state.held}
    for step in range(steps, 2 * steps):
        train_step(
            model, state, loader.step(step * batch) or [], mesh, lr=3e-3, clip=1.0
        )
    return {
        "gradients": gradients,
        "differences": {h.name: h.local.detach() - before[h.name] for h in state.held},
    }


def compared(kind: dict[str, T], word: str) -> dict[str, float]:
    """Bytes and errors of one setting for all tensors, and of L-GreCo's choice; of top-k also over all at once."""
    usual = build_compressor(word).for_feedback
    flat = word.startswith("topk")
    given = (
        {name: x.flatten() for name, x in kind.items()}
        if not word.startswith("powersgd")
        else kind
    )
    chosen = allocate_compressors(given, usual)
    sizes = {side: sum(each[name].nbytes(x.shape) for name, x in given.items())
             for side, each in (("one setting", dict.fromkeys(given, usual)), ("chosen", chosen))}  # fmt: skip
    errors = {side: sum(squared_error(each[name], x) for name, x in given.items())
              for side, each in (("one setting", dict.fromkeys(given, usual)), ("chosen", chosen))}  # fmt: skip
    found: dict[str, float] = {
        "bytes of one setting": sizes["one setting"],
        "bytes chosen": sizes["chosen"],
        "times smaller": sizes["one setting"] / sizes["chosen"],
        "error over that of one setting": errors["chosen"] / errors["one setting"]
        if errors["one setting"]
        else 1.0,
    }
    if flat:
        whole = torch.cat([*given.values()])
        share = (
            sum(chosen[name].share * x.numel() for name, x in given.items())
            / whole.numel()
        )  # type: ignore[attr-defined]
        together = build_compressor(f"topk:{share}")
        found["bytes of the largest of all"] = together.nbytes(whole.shape)
        found["error of the largest of all over that chosen"] = (
            squared_error(together, whole) / errors["chosen"]
        )
    return found


#: What travels in a run, and what it sets for it.
TRAVELS = {
    "differences": ("sync.every=10", "optimizer.lr=3e-3"),
    "gradients": ("sync.every=1", "sync.update=average", "optimizer.kind=sgd", "optimizer.lr=0.3"),
}  # fmt: skip


def run(
    word: str, allocate: int, steps: int, travels: str = "differences"
) -> dict[str, Any]:
    """A run of two islands, as ``weft train`` does it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings = [
            f"sync.compress={word}",
            f"sync.allocate={allocate}",
            f"train.steps={steps}",
            *TRAVELS[travels],
        ]
        settings += [
            "checkpoint.every=0",
            f"validation.every={steps}",
            "train.threads=1",
        ]
        words = [
            sys.executable,
            "-m",
            "weft",
            "train",
            "islands",
            "--layout",
            "island=2",
            "--out",
            str(out),
        ]
        ended = subprocess.run(
            [*words, *(x for s in settings for x in ("--set", s))],
            capture_output=True,
            text=True,
        )
        if ended.returncode:
            raise SystemExit(ended.stderr)
        sent = re.search(r"has sent ([\d.]+) MiB", ended.stdout + ended.stderr)
        assert sent, ended.stdout
        records = read_metrics(out)
        return {"MiB sent": float(sent[1]), "loss": records["validation"][-1]["loss"]}


def runs(steps: int, travels: str, quick: bool) -> dict[str, Any]:
    """Runs with one setting for all tensors, and with L-GreCo, of each compressor."""
    rows: dict[str, Any] = {"steps": steps}
    for word in RUNS[:1] if quick else RUNS:
        sides = {
            name: run(word, allocate, steps, travels)
            for name, allocate in (("one setting", 0), ("chosen", 5))
        }
        ratio = sides["one setting"]["MiB sent"] / sides["chosen"]["MiB sent"]
        rows[word] = sides | {"times less": ratio}
        print(f"run of two islands, {travels}, {word}: {sides['one setting']['MiB sent']:.3g} MiB and loss "
              f"{sides['one setting']['loss']:.4f}; with L-GreCo {sides['chosen']['MiB sent']:.3g} MiB ({ratio:.2f}x "
              f"less) and {sides['chosen']['loss']:.4f}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few steps of one compressor: whether it runs",
    )
    parser.add_argument(
        "--gradients", action="store_true", help="only the runs of gradients"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.gradients:
        results = json.loads(given.json.read_text())
        results["runs of gradients"] = runs(given.steps, "gradients", given.quick)
        given.json.write_text(json.dumps(results, indent=1) + "\n")
        return
    results: dict[str, Any] = {
        "machine": machine(),
        "steps": 20 if given.quick else given.steps,
        "tensors": {},
    }
    for name, kind in tensors(4 if given.quick else 20).items():
        results["tensors"][name] = {word: compared(kind, word) for word in WORDS}
        for word, row in results["tensors"][name].items():
            print(f"{name:12} {word:11} {row['times smaller']:5.2f}x smaller than one setting at "
                  f"{row['error over that of one setting']:.3f} of its error", flush=True)  # fmt: skip
            if "bytes of the largest of all" in row:
                error = row["error of the largest of all over that chosen"]
                size = row["bytes of the largest of all"] / row["bytes chosen"]
                print(
                    f"{'':24} the largest of all: {error:.3f} of the error in {size:.2f} of the bytes"
                )
    results["runs"] = runs(results["steps"], "differences", given.quick)
    if not given.quick:
        results["runs of gradients"] = runs(results["steps"], "gradients", False)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
