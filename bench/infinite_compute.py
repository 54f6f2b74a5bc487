"""Little data and much compute: strong weight decay, an ensemble, and a student, on some text read 16 times.

    nice -n 10 python bench/infinite_compute.py [--size 1000000] [--work FOLDER] [--quick] [--json FILE]

All runs are those of recipes/ensemble.toml by Weft's API: the usual decay and 30 times of it, three more members with
other initial weights and another order of the data, and a student of all four that is as large as one of them. Losses
are on files of the standard library that no run learns from, at the end of the runs and, for the decays, also at the
lowest point. Runs that are done are kept in ``--work``, so that the script goes on where it was ended.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from pathlib import Path
from typing import Any

from data_laws import run
from step import machine, write

from weft.observe.run_metrics import read_metrics
from weft.recipe import load_recipe
from weft.train.ensemble_members import open_members

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "infinite_compute.json"
MEMBERS, USUAL, STRONG = 4, 0.1, 3.0


def write_texts(folder: Path, size: int) -> None:
    """Write the text to learn from and the held-out text. No file of the library is in both."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    files = [f for f in files if not {"site-packages", "test", "tests"} & {*f.parts}]
    random.Random(0).shuffle(files)
    room = {"held-out": max(60_000, size // 10), "learn": size}
    for name, count in room.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        while count > 0:
            file = files.pop()
            text = file.read_text(encoding="utf-8", errors="ignore")[
                : min(count, 40_000)
            ]
            (folder / name / f"{file.parent.name}-{file.name}.txt").write_text(text)
            count -= len(text)


def train(work: Path, name: str, seed: int, more: list[str]) -> dict[str, Any]:
    """Train one model, unless that is done; return its losses on held-out data and how strong its decay was."""
    texts = work / "texts"
    words = [
        f"data.sources=[{{ kind = 'text', path = '{texts}/learn' }}]", f"data.validation='{texts}/held-out'",
        f"train.seed={seed}", f"data.seed={seed}", "train.threads=1", f"data.cache='{work}/cache'",
        *more,
    ]  # fmt: skip
    recipe = load_recipe(ROOT / "recipes" / "ensemble.toml", words)
    folder = run(work / name, recipe)
    records = read_metrics(folder)
    losses = {r["step"]: r["loss"] for r in records["validation"]}
    steps, decay = max(losses), recipe.optimizer.weight_decay
    lowest = min(losses, key=losses.__getitem__)
    row = {
        "decay": decay, "lr": recipe.optimizer.lr, "steps": steps,
        "lr_decay_steps": recipe.optimizer.lr * decay * steps, "final": losses[steps],
        "lowest": losses[lowest], "lowest_at": lowest,
        "parameters": records["run"][-1]["parameters"], "epoch_tokens": records["run"][-1]["epoch_tokens"],
    }  # fmt: skip
    print(name, row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", type=int, default=1_000_000, help="characters of text"
    )
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--work", type=Path, default=Path("/tmp/infinite_compute"))
    parser.add_argument("--quick", action="store_true", help="tiny: whether it runs")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    size = 20_000 if given.quick else given.size
    more = (
        ["data.epochs=2", "model.embed=16"]
        if given.quick
        else [f"train.batch={given.batch}"]
    )
    before, work = machine(), given.work
    if not (work / "texts").exists():
        write_texts(work / "texts", size)
    usual = train(work, "usual", 1, [*more, f"optimizer.weight_decay={USUAL}"])
    members = {}
    for i in range(1, MEMBERS + 1):
        members[str(work / f"member-{i}")] = train(work, f"member-{i}", i, more)
    joint = {}
    for average in ("probabilities", "logits"):
        opened = open_members([*members], "cpu", print, average=average)  # type: ignore[arg-type]
        joint[average] = opened.held_out_loss(str(work / "texts" / "held-out"))
    losses = joint["probabilities"].members
    usual_loss = (
        open_members([work / "usual"], "cpu", print)
        .held_out_loss(str(work / "texts" / "held-out"))
        .joint
    )
    teachers = ", ".join(f"'{name}'" for name in members)
    student = train(work, "student", 9, [*more, f"loss.teachers=[{teachers}]"])
    alone = open_members([work / "student"], "cpu", print)
    learned = alone.held_out_loss(str(work / "texts" / "held-out")).joint
    gain = min(losses) - joint["probabilities"].joint
    mean_gain = sum(losses) / len(losses) - joint["probabilities"].joint
    kept = (sum(losses) / len(losses) - learned) / mean_gain
    rows = {
        "size": size, "batch": given.batch, "usual_decay": usual, "members": list(members.values()), "student": student,
        "ensemble": {
            "members": losses, "probabilities": joint["probabilities"].joint, "logits": joint["logits"].joint,
            "gain_over_best": gain, "gain_over_mean": mean_gain,
        },
        "student_loss": learned, "student_keeps_of_gain_over_mean": kept,
        "student_keeps_of_gain_over_best": (min(losses) - learned) / gain,
        "usual_decay_loss": usual_loss, "decay_gain_at_end": usual_loss - losses[0],
        "usual_decay_rises_by": usual["final"] - usual["lowest"],
    }  # fmt: skip
    print(rows)
    if not given.quick:
        write({"machine": before, **rows}, given.json)


if __name__ == "__main__":
    main()
