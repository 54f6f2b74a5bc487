"""One run grows and shrinks, 4 -> 2 -> 8 -> 3 ranks: its losses, and its speed beside fresh runs of those sizes.

The ranks' work is to sleep for every row, so that they do not share cores: a step of ``n`` ranks sleeps for the rows of
the rank that has most of them. Ranks are asked to leave by ``weft ranks remove``'s file, others join as by ``add``.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from weft.observe.run_metrics import Record, read_metrics
from weft.recipe import Recipe, build_recipe
from weft.resilience.roster import ask_to_leave, read_roster

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.resilience.survivors import Ranks, ranks  # noqa: E402

SIZES, STEPS, ROW_S = (4, 2, 8, 3), 20, 0.03


def recipe(folder: Path, size: int, steps: int) -> Recipe:
    corpus = folder / "corpus.txt"
    corpus.write_text(
        "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))[:4])
    )
    return build_recipe({
        "model": {"layers": 1, "embed": 16, "heads": 2, "ffn": 24},
        "data": {"sources": [{"kind": "text", "path": str(corpus)}], "seq_len": 32, "cache": str(folder / "cache")},
        "layout": {"dp": size}, "train": {"steps": steps, "batch": 24, "dtype": "float64"},
        "validation": {"every": 0}, "checkpoint": {"every": 0}, "observe": {"split_every": 0, "trackers": []},
    })  # fmt: skip


def seconds(records: list[Record]) -> float:
    """Of a step, once the first ones are over."""
    return median(
        record["step_s"] for record in records[STEPS // 4 :] if "step_s" in record
    )


def resized(run: Ranks, out: Path) -> list[float]:
    """A step's seconds in every view that has the size that was asked for, one size after the other."""
    found = []
    for size in SIZES:
        there = len(read_roster(out).members) if found else size
        if size > there:
            run.start(size - there)
        elif size < there:
            ask_to_leave(
                out, [member.number for member in read_roster(out).members[size:]]
            )
        run.wait_for(
            lambda size=size: (
                run.records("view")[-1:] and run.records("view")[-1]["ranks"] == size
            )
        )  # type: ignore[misc]
        begun = run.records("view")[-1]["step"]
        run.step(begun + STEPS)
        found.append(
            seconds([r for r in run.records() if begun < r["step"] <= begun + STEPS])
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=ROOT / "bench/results/resize.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ranks(recipe(folder, SIZES[0], 10_000), folder / "run", [ROW_S]) as run:
            ours = resized(run, folder / "run")
        losses = {r["step"]: r["loss"] for r in read_metrics(folder / "run")["train"]}
        fresh, off = [], 0.0
        for size in SIZES:
            steps = max(losses) if size == SIZES[0] else STEPS + 1
            with ranks(
                recipe(folder, size, steps), folder / f"fresh-{size}", [ROW_S]
            ) as run:
                run.end()
            records = read_metrics(folder / f"fresh-{size}")["train"]
            fresh.append(seconds(records[: STEPS + 1]))
            off = max(
                off, *(abs(r["loss"] - losses[r["step"]]) / losses[1] for r in records)
            )
    for size, one, other in zip(SIZES, ours, fresh, strict=True):
        print(
            f"{size} ranks: {one * 1e3:6.0f} ms a step, {other * 1e3:6.0f} in a fresh run: {other / one:.2f}x"
        )
    print(f"losses of {max(losses)} steps differ by {off:.1e} of the first one's")
    rows = [
        {"ranks": n, "step_s": a, "fresh_s": b}
        for n, a, b in zip(SIZES, ours, fresh, strict=True)
    ]
    given.json.write_text(
        json.dumps({"sizes": rows, "losses_differ": off}, indent=1) + "\n"
    )
    return off > 1e-10


if __name__ == "__main__":
    sys.exit(main())
