"""Which modules a token should take at a budget: an oracle, a router, one path for all, random paths (Duo-LLM).

    python bench/duo.py [--steps 500] [--quick] [--json bench/results/duo.json]

Trains the model of ``recipes/duo.toml`` on one device, on this Python's standard library, and studies its paths
(``weft bench paths``) on source of PyTorch, which it has not learned. Losses are nats per token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from step import machine, write

from weft.checkpoint.model import open_model, tokenizer_of
from weft.generate.path_study import study_paths, write_study
from weft.observe.run_page import PLOTLY, write_plotly

SHARES = (0.25, 0.5, 0.75)


def unseen(most: int) -> str:
    folder = Path(torch.__file__).parent / "nn" / "modules"
    return "\n\n".join(p.read_text() for p in sorted(folder.glob("*.py")))[:most]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    steps, count = (20, 1024) if given.quick else (given.steps, given.tokens)
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"train.steps={steps}",
            f"optimizer.decay={steps // 3}",
            f"optimizer.warmup={steps // 10}",
        ]
        sets = [word for setting in words for word in ("--set", setting)]
        command = [
            sys.executable,
            "-m",
            "weft",
            "train",
            "duo",
            "--layout",
            "",
            "--out",
            f"{folder}/run",
        ]
        subprocess.run([*command, *sets], check=True)
        model, files, _ = open_model(f"{folder}/run", "cpu", print)
    torch.set_num_threads(1)
    ids = tokenizer_of(files, "run").prompt_ids(unseen(8 * count))[: count + 1]
    study = study_paths(model, ids, SHARES, 64 if given.quick else 128, say=print)
    record: dict[str, Any] = {"machine": machine(), "steps": steps, **study.record()}
    for row in study.budgets:
        print(row)
    print({"whole": study.whole, "without": study.without})
    if given.page:
        write_plotly(write_study(study, "duo", given.page, PLOTLY).parent)
    if given.json:
        record = json.loads(
            json.dumps(record), parse_float=lambda x: round(float(x), 4)
        )
        write(record, given.json)


if __name__ == "__main__":
    main()
