"""Ranks are killed and frozen at random instants of small runs: who goes on, at what loss, and after how long.

Every trial is a run of 4 or 8 ranks under a drawn layout. Its losses are compared with those of one device at each
step, and the stall is taken apart: until the loss is known, until the others have left what they were in, agreed, built
groups and model anew, have the state, and have taken the step.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.cases import write_corpus  # noqa: E402
from tests.resilience.trials import KINDS, LAYOUTS, OF_REPLICAS, WHOLE, trial  # noqa: E402

COLUMNS = (
    "detect_s",
    "part_s",
    "agree_s",
    "rebuild_s",
    "recover_s",
    "recompute_s",
    "stall_s",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for kind in KINDS + OF_REPLICAS:
        parser.add_argument(f"--{kind}", type=int, default=0, metavar="TRIALS")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first trial of each kind"
    )
    parser.add_argument(
        "--whole", action="store_true", help="only replicas that are edited in place"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "bench/results/faults.json")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder))
        for kind in KINDS + OF_REPLICAS:
            whole = given.whole or kind in OF_REPLICAS
            for seed in range(given.seed, given.seed + getattr(given, kind)):
                row = trial(
                    kind, seed, corpus, Path(folder), WHOLE if whole else LAYOUTS
                )
                rows.append(row)
                times = "  ".join(
                    f"{name} {row[name]:.2f}" for name in COLUMNS if name in row
                )
                print(
                    f"{kind:10} {seed:3}  {row['layout']:18} {row['victims']}  {times}  {row['wrong']}",
                    flush=True,
                )
    middle = {
        name: round(median(found), 3)
        for name in COLUMNS
        if (found := [r[name] for r in rows if name in r])
    }
    found = {
        "trials": Counter(r["kind"] for r in rows),
        "medians": middle,
        "rows": rows,
    }
    given.json.write_text(json.dumps(found, indent=1) + "\n")
    wrong = [row for row in rows if row["wrong"]]
    print(
        f"{len(rows)} trials, {len(wrong)} wrong; medians:",
        "  ".join(f"{n} {v:.2f}" for n, v in middle.items()),
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
