"""Little data and much compute: strong weight decay, an ensemble, and a student, on some text read 16 times.

    nice -n 5 python bench/infinite_compute.py --part ensemble --size 60000 --batch 4
    nice -n 5 python bench/infinite_compute.py --part decays --size 1000000 --batch 8 --set model.embed=160
        --set model.layers=4 --set "data.tokenizer='train:2048'" --set optimizer.lr=2e-3 --set validation.every=307
        [--work FOLDER] [--quick] [--json FILE]

All runs are those of recipes/ensemble.toml by Weft's API. Part ``decays``: the usual decay, and 30 times of it. Part
``ensemble``: four members with strong decay, other initial weights and another order of the data, and students of all
four that are as large as one of them; the student that is best on the held-out text is judged beside the members on
another text. ``--set`` changes settings of all models. All losses are on files of the standard library that no run
learns from, and on the whole of them. Runs that are done are kept in ``--work``, and a run that was ended goes on where
it was saved. A part's figures replace those of the same part in the file of results.
"""

from __future__ import annotations

import argparse
import json
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
#: Settings of the students, of which the best one is taken.
STUDENTS = {
    "student": [],
    "student-gentle": ["loss.teacher_share=1", "optimizer.weight_decay=1"],
    "student-long": [
        "loss.teacher_share=1",
        "optimizer.weight_decay=1",
        "data.epochs=48",
    ],
}


def write_texts(folder: Path, size: int) -> None:
    """Write the text to learn from, the held-out and the judged text. No file of the library is in two of them."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    files = [f for f in files if not {"site-packages", "test", "tests"} & {*f.parts}]
    random.Random(0).shuffle(files)
    apart = max(60_000, size // 10)
    room = {"held-out": apart, "learn": size, "judged": apart}
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
        "validation.batches=0", "checkpoint.every=200", *more,
    ]  # fmt: skip
    recipe = load_recipe(ROOT / "recipes" / "ensemble.toml", words)
    folder = run(work / name, recipe)
    records = read_metrics(folder)
    losses = {r["step"]: r["loss"] for r in records["validation"]}
    trained = {r["step"]: r["loss"] for r in records["train"]}
    steps, decay = max(losses), recipe.optimizer.weight_decay
    lowest = min(losses, key=losses.__getitem__)
    row = {
        "decay": decay, "lr": recipe.optimizer.lr, "steps": steps,
        "lr_decay_steps": recipe.optimizer.lr * decay * steps, "final": losses[steps],
        "lowest": losses[lowest], "lowest_at": lowest, "trained_to": trained[max(trained)],
        "curve": losses, "settings": more,
        "parameters": records["run"][-1]["parameters"], "epoch_tokens": records["run"][-1]["epoch_tokens"],
    }  # fmt: skip
    print(name, row, flush=True)
    return row


def compare_decays(work: Path, more: list[str]) -> dict[str, Any]:
    """Train with the usual decay and with the strong one; return what the strong one gains at the end."""
    usual, strong = (
        train(work, name, 1, [*more, f"optimizer.weight_decay={decay}"])
        for name, decay in (("usual", USUAL), ("strong", STRONG))
    )
    return {
        "usual": usual,
        "strong": strong,
        "gain_at_end": usual["final"] - strong["final"],
        "gain_over_lowest": usual["lowest"] - strong["lowest"],
        "usual_rises_by": usual["final"] - usual["lowest"],
        "usual_lowest_at_share": usual["lowest_at"] / usual["steps"],
    }


def compare_ensemble(work: Path, more: list[str]) -> dict[str, Any]:
    """Train the members and their students; return what the ensemble gains, and what the student keeps of that."""
    judged = str(work / "texts" / "judged")
    places = [str(work / f"member-{i}") for i in range(1, MEMBERS + 1)]
    members = [train(work, f"member-{i}", i, more) for i in range(1, MEMBERS + 1)]
    joint = {}
    for average in ("probabilities", "logits"):
        opened = open_members([*places], "cpu", print, average=average)  # type: ignore[arg-type]
        joint[average] = opened.held_out_loss(judged)
    losses = joint["probabilities"].members
    average_loss = sum(losses) / len(losses)
    gain = min(losses) - joint["probabilities"].joint
    mean_gain = average_loss - joint["probabilities"].joint
    teachers = ", ".join(f"'{place}'" for place in places)
    students = {}
    for name, words in STUDENTS.items():
        row = train(work, name, 9, [*more, f"loss.teachers=[{teachers}]", *words])
        alone = open_members([work / name], "cpu", print)
        row["judged"] = alone.held_out_loss(judged).joint
        row["keeps_of_gain_over_mean"] = (average_loss - row["judged"]) / mean_gain
        row["keeps_of_gain_over_best"] = (min(losses) - row["judged"]) / gain
        print(name, row["final"], row["judged"], row["keeps_of_gain_over_mean"])
        students[name] = row
    best = min(students, key=lambda name: students[name]["final"])
    return {
        "members": members, "students": students,
        "losses": {
            "members": losses, "probabilities": joint["probabilities"].joint, "logits": joint["logits"].joint,
        },
        "gain_over_best": gain, "gain_over_mean": mean_gain, "best_student": best,
        "student_keeps_of_gain_over_mean": students[best]["keeps_of_gain_over_mean"],
        "student_keeps_of_gain_over_best": students[best]["keeps_of_gain_over_best"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("decays", "ensemble"), default="decays")
    parser.add_argument(
        "--size", type=int, default=1_000_000, help="characters of text"
    )
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--set", action="append", default=[], help="setting of all")
    parser.add_argument("--work", type=Path, default=Path("/tmp/infinite_compute"))
    parser.add_argument("--quick", action="store_true", help="tiny: whether it runs")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    size = 20_000 if given.quick else given.size
    more = [f"train.batch={given.batch}", *given.set]
    if given.quick:
        more += ["data.epochs=2", "model.embed=16", "model.layers=1"]
    before, work = machine(), given.work
    if not (work / "texts").exists():
        write_texts(work / "texts", size)
    rows = (
        compare_decays(work, more)
        if given.part == "decays"
        else compare_ensemble(work, more)
    )
    print(rows)
    if given.quick:
        return
    parts = json.loads(given.json.read_text()) if given.json.exists() else {}
    parts[given.part] = {
        "machine": before, "size": size, "batch": given.batch, **rows
    }  # fmt: skip
    write(parts, given.json)


if __name__ == "__main__":
    main()
