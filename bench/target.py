"""Time to a target loss: ten optimizers on two workloads, three studies each, by ``weft bench target``.

    OMP_NUM_THREADS=1 python bench/target.py [--seeds 3] [--work FOLDER] [--json bench/results/target.json]

Entrants and their candidates are declared in bench/optimizers.toml, workloads in bench/workloads/. The targets are
what AdamW reaches after about two thirds of its steps. It goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from step import machine, write

HERE = Path(__file__).parent
#: Target loss of each workload.
TARGETS = {"dense": 2.52, "experts": 2.52}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("/tmp/weft-target"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    command = [
        sys.executable, "-m", "weft", "bench", "target",
        *(str(HERE / "workloads" / f"{name}.toml") for name in TARGETS),
        *(f"--until=loss={loss}" for loss in TARGETS.values()),
        "--entrants", str(HERE / "optimizers.toml"), "--seeds", str(args.seeds), "--out", str(args.work),
        "--set", "train.threads=1",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    record = json.loads((args.work / "target.json").read_text())
    if args.json is not None:
        write({"machine": machine(), **record}, args.json)


if __name__ == "__main__":
    main()
