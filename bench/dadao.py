"""Islands without rounds (DADAO) beside islands that sum their gradients in every step, at equally many gradients.

    python bench/dadao.py [--steps 400] [--quick] [--json bench/results/dadao.json]

Four islands train a small transformer as a user types it, each side at several learning rates. The loss at the end is
on what is held out, of the first island; ``MiB`` is what an island has sent to others. Synchronous islands compute what
one device would. An island without rounds divides by the size of its own gradients (AdamW), which those of a quarter of
the batch make larger; with SGD both sides follow sums of gradients.
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

from step import machine

from weft.observe.run_metrics import read_metrics

RESULTS = Path(__file__).parent / "results" / "dadao.json"
#: Rates of each side; those of islands without rounds are larger, as DADAO's steps add up to less (its `stride`).
RATES = {"average": (3e-3, 6e-3), "dadao": (4e-3, 8e-3, 1.2e-2)}


def run(update: str, rate: float, steps: int) -> dict[str, float]:
    """A run of four islands, as ``weft train`` does it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings = [
            f"sync.update={update}", "sync.every=1", "sync.compress=none", f"train.steps={steps}", "train.batch=16",
            f"optimizer.lr={rate}", "model.embed=32", "model.heads=2", "data.seq_len=64", "checkpoint.every=0",
            f"validation.every={steps}", "train.threads=1",
        ]  # fmt: skip
        if update == "dadao":
            settings += ["sync.condition=1.0", "optimizer.betas=[0.7, 0.95]"]
        words = [sys.executable, "-m", "weft", "train", "islands", "--layout", "island=4"]  # fmt: skip
        ended = subprocess.run(
            [*words, "--out", str(out), *(x for s in settings for x in ("--set", s))],
            capture_output=True,
            text=True,
        )
        if ended.returncode:
            raise SystemExit(ended.stderr)
        sent = re.search(r"sent ([\d.]+) MiB", ended.stdout + ended.stderr)
        loss = read_metrics(out)["validation"][-1]["loss"]
        return {"loss": loss, "MiB": float(sent[1]) if sent else 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--quick", action="store_true", help="a few steps at one rate: whether it runs"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    steps = 6 if given.quick else given.steps
    results: dict[str, Any] = {"machine": machine(), "steps": steps, "sides": {}}
    best: dict[str, float] = {}
    for update, rates in RATES.items():
        side = results["sides"][update] = {}
        for rate in rates[:1] if given.quick else rates:
            side[str(rate)] = run(update, rate, steps)
            print(f"{update:8} rate {rate:g}: {side[str(rate)]}", flush=True)
        best[update] = min(row["loss"] for row in side.values())
    results["loss over synchronous"] = best["dadao"] / best["average"]
    print(f"without rounds {results['loss over synchronous']:.4f} of synchronous loss")
    given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
