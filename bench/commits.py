"""Two checkouts of Weft beside each other: the speeds that a script of ``bench/`` gives Weft's side, in turns.

    python bench/commits.py OLD_CHECKOUT [--bench step pipeline serve] [--turns 3] [--json bench/results/commits.json]

Each turn runs the script in both checkouts, in alternating order, each with its own sources. Ratios are of the new
checkout's median over the old one's, for every rate of Weft's in the results (tokens or steps per second).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "commits.json"
#: What is run of each script, so that a turn takes a minute or two.
WORDS = {
    "step": ["--rounds", "2"],
    "pipeline": ["--only", "steps", "--rounds", "2"],
    "serve": ["--only", "throughput", "--turns", "1"],
}


def rates(results: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every rate of Weft's side in a script's results, with its place there."""
    if not isinstance(results, dict):
        return
    for key, value in results.items():
        of_weft = key in ("tokens_per_s", "steps_per_s") and path.endswith("weft")
        if of_weft or (key == "weft" and path.endswith("tokens/s")):
            yield path, float(value)
        else:
            yield from rates(value, f"{path} / {key}" if path else key)


def run(tree: Path, script: str) -> dict[str, float]:
    """Run a script of ``bench/`` in a checkout, and return Weft's rates."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, f"bench/{script}.py", *WORDS[script], "--json", out]
        env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(
            command,
            cwd=tree,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        _, said = child.communicate()
        if child.returncode:
            sys.exit(f"{tree}: bench/{script}.py failed:\n{said.decode()[-2000:]}")
        return dict(rates(json.loads(out.read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "old", type=Path, help="a checkout of the commit to compare with"
    )
    parser.add_argument("--bench", nargs="+", choices=WORDS, default=list(WORDS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    trees = {"old": given.old.resolve(), "new": ROOT}
    found: dict[str, Any] = {}
    for script in given.bench:
        seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for turn in range(given.turns):
            for side in list(trees)[:: 1 if turn % 2 else -1]:
                for name, rate in run(trees[side], script).items():
                    seen[name][side].append(rate)
        rows = {}
        for name, sides in seen.items():
            old, new = (statistics.median(sides[side]) for side in trees)
            rows[name] = {"old": old, "new": new, "ratio": round(new / old, 3)}
            print(
                f"{script:<9} {name:<40} {old:9.1f} -> {new:9.1f}  {new / old:.3f}x",
                flush=True,
            )
        ratio = statistics.median(row["ratio"] for row in rows.values())
        print(f"{script:<9} median of {len(rows)} ratios: {ratio:.3f}x", flush=True)
        found[script] = {"median ratio": ratio, "rows": rows}
    given.json.write_text(json.dumps({"turns": given.turns, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
