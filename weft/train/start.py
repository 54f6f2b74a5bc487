"""Training from Python: ``train(recipe)`` trains in this process, or starts the ranks that the layout asks for."""

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.checkpoint.s3 import open_storage
from weft.checkpoint.state import Progress
from weft.errors import WeftError
from weft.recipe import Recipe
from weft.train.loop import Outcome
from weft.train.setup import prepare


def start(recipe: Recipe, out: str | Path | None = None, resume: str | None = None) -> Outcome:
    """Train as ``weft train`` does and return how the run ended.

    A layout of several ranks starts them as processes of this machine; under torchrun or Slurm, where every rank calls
    this, they are joined. A recipe without a layout gets the planner's. ``out`` is the run folder (else ``runs/NAME``),
    ``resume`` is "auto", a run or a checkpoint. Raises :class:`WeftError` for what goes wrong. Ctrl-C and SIGTERM save
    and return, with the signal as ``interrupted``.
    """
    from weft.cli.launch import in_ranks
    from weft.cli.train import be_rank, planned

    out = None if out is None else Path(out)
    if "layout" not in recipe.model_fields_set:
        recipe, _ = planned(recipe, None)
    if in_ranks() or recipe.layout.world == 1:
        return be_rank(recipe, out, resume)
    prepare(recipe)
    return _in_ranks_of_its_own(recipe, out, resume)


def _in_ranks_of_its_own(recipe: Recipe, out: Path | None, resume: str | None) -> Outcome:
    """Start local ranks, each of which runs :func:`main`; the first one writes the outcome to a file."""
    from weft.cli.launch import launch

    with tempfile.TemporaryDirectory(prefix="weft-train-") as folder:
        task, done = Path(folder) / "task.json", Path(folder) / "outcome.json"
        given = {"recipe": recipe.model_dump(mode="json"), "out": out and str(out), "resume": resume}
        task.write_text(json.dumps(given))
        command = [sys.executable, "-m", "weft.train.start", str(task), str(done)]
        code = launch([], recipe.layout.world, command, recipe.train.threads)
        if done.exists():
            return _read(json.loads(done.read_text()))
    if code > 128:
        raise KeyboardInterrupt
    raise WeftError("training ended with an error, which is printed above")


def _read(found: dict[str, Any]) -> Outcome:
    """An outcome as :func:`main` has written it."""
    checkpoint = open_storage(found["checkpoint"]) if found["checkpoint"] else None
    progress = Progress(**found["progress"])
    return Outcome(Path(found["run"]), checkpoint, progress, found["validations"], found["interrupted"])


def main(task: str, done: str) -> int:
    """Be one of the ranks; returns the exit code."""
    from weft.cli.failure import leave, report_failure
    from weft.cli.train import be_rank

    given = json.loads(Path(task).read_text())
    try:
        outcome = be_rank(Recipe.model_validate(given["recipe"]), given["out"] and Path(given["out"]), given["resume"])
        if os.environ["RANK"] == "0":
            record: dict[str, Any] = {"run": str(outcome.run), "progress": asdict(outcome.progress)}
            record |= {"validations": outcome.validations, "interrupted": outcome.interrupted}
            record |= {"checkpoint": outcome.checkpoint and str(outcome.checkpoint)}
            Path(done).write_text(json.dumps(record))
    except Exception as error:
        return report_failure(error)
    leave(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
