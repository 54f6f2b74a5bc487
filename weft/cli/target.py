"""``weft bench target``: which optimizer, or other settings, reach a loss first."""

import json
import math
import signal
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.arguments import AsJson, Overrides
from weft.cli.console import print_table
from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.run.sweep import Trial
    from weft.run.time_to_target import Standing, TargetRun

_recipes = "Recipes of the workloads; without --entrants they are what competes, on one workload."
_until = "Validation loss to reach, as loss=NUMBER; once for all workloads, or once for each in their order."
_entrants = (
    "TOML file that declares what competes: a table for each entrant, with set (its settings) and tune (settings with "
    "the values that each study tries)."
)
_seeds = "Number of studies: each trains all candidates with a seed of its own, and counts the best."
_out = "Folder of the runs and of the page; runs/target by default."
#: Settings that the comparison gives to every run, and what decides them.
GIVEN = {
    "train.seed": "--seeds gives each study a seed",
    "validation.until": "--until gives the loss",
    "observe.every": "every step is timed",
}


def target_command(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE...", help=_recipes)],
    until: Annotated[list[str], typer.Option(metavar="loss=NUMBER", help=_until)],
    entrants: Annotated[
        Path | None, typer.Option(metavar="FILE", help=_entrants)
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help=_seeds)] = 3,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help=_out)] = None,
    as_json: AsJson = False,
) -> int:
    """Train with several optimizers or other settings until a loss is reached, and rank them by steps and time.

    Every workload, entrant, candidate and seed is a run, as in a sweep: the same command goes on where it was stopped.
    """
    from weft.data.source_check import check_sources
    from weft.recipe import RUNS, load_recipe
    from weft.run.sweep import check_folder, run_sweep
    from weft.run.target_page import write_target_page
    from weft.run.time_to_target import (
        Entrant,
        read_entrants,
        record_of,
        standings,
        target_runs,
    )

    folder = out or RUNS / "target"
    check_folder(folder)
    _refuse_given(overrides or [])
    if entrants is None:
        workloads = {"workload": ""}
        competing = [Entrant(Path(recipe).stem) for recipe in recipes]
        sources = dict(zip((e.name for e in competing), recipes, strict=True))
    else:
        workloads = {Path(recipe).stem: recipe for recipe in recipes}
        competing, sources = read_entrants(entrants), {}
        for entrant in competing:
            for candidate in entrant.candidates:
                who = f"{entrants}: entrant [{entrant.name}]: "
                _refuse_given([*entrant.settings, *candidate], who)
    if len(sources or workloads) < len(recipes):
        raise UsageError("two of the recipes have one name; give files of different names")  # fmt: skip
    targets = _targets(until, list(workloads))

    def recipe_of(attempt: "TargetRun") -> "Recipe":
        words = [
            *(overrides or []), *attempt.overrides, f"validation.until={targets[attempt.workload]}",
            "observe.every=1",
        ]  # fmt: skip
        source = sources.get(attempt.entrant.name) or workloads[attempt.workload]
        return load_recipe(source, words)

    # all are checked before any runs
    attempts = target_runs(list(workloads), competing, range(seeds), folder)
    asked = [(attempt, recipe_of(attempt)) for attempt in attempts]
    for _, recipe in asked:
        check_sources(recipe.data)
    names = [entrant.name for entrant in competing] if entrants else recipes
    for workload in workloads:
        every = [recipe for a, recipe in asked if a.workload == workload]
        _refuse_other_work(every, names, entrants)
    trials = [(_trial(attempt), recipe) for attempt, recipe in asked]
    # what the runs print is no part of the JSON
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        results, interrupted = run_sweep(
            trials, folder, lambda text: typer.echo(text, err=True)
        )
    table = standings(attempts, targets)
    record = {"targets": targets, "seeds": seeds, "standings": [record_of(row) for row in table]}  # fmt: skip
    (folder / "target.json").write_text(json.dumps(record, indent=1) + "\n")
    page = write_target_page(table, targets, folder / "target.html")
    if as_json:
        typer.echo(json.dumps(record))
    else:
        _show(table)
        typer.echo(f"page        {page}")
    if interrupted:
        name = signal.Signals(interrupted).name
        typer.echo(f"stopped by {name}; the same command goes on with what is not done", err=True)  # fmt: skip
        return 128 + interrupted
    for problem in dict.fromkeys(r.problem for r in results if r.problem):
        typer.echo(problem, err=True)
    return int(any(r.problem for r in results))


def _trial(attempt: "TargetRun") -> "Trial":
    """Return the run ``attempt`` as one of a sweep."""
    from weft.run.sweep import Trial

    settings = dict(text.split("=", 1) for text in attempt.overrides)
    return Trial(settings, attempt.folder)


def _targets(until: list[str], workloads: list[str]) -> dict[str, float]:
    """Return the target loss of each workload, as ``--until`` gives them."""
    losses = []
    for text in until:
        name, _, number = text.partition("=")
        try:
            losses.append(float(number))
        except ValueError:
            losses.append(math.nan)
        if name != "loss" or not losses[-1] > 0 or math.isinf(losses[-1]):
            raise UsageError(f"--until {text!r} is not of the form loss=2.5")
    losses = losses * len(workloads) if len(losses) == 1 else losses
    if len(losses) != len(workloads):
        raise UsageError(
            f"{len(losses)} values of --until for {len(workloads)} workloads; give one for all, or one for each"
        )
    return dict(zip(workloads, losses, strict=True))


def _refuse_given(settings: list[str], who: str = "") -> None:
    """Raise :class:`UsageError` if ``settings`` have one that the comparison itself gives to every run, or the whole
    table of such a one. ``who``: beginning of the line, which names whose settings they are.
    """
    for text in settings:
        name = text.partition("=")[0].strip()
        for key, why in GIVEN.items():
            if name == key:
                raise UsageError(f"{who}{name} cannot be set here, as {why}; leave it out")  # fmt: skip
            if name == key.partition(".")[0]:
                raise UsageError(
                    f"{who}the table {name} cannot be set here as a whole, as {why} ({key}); set the others one "
                    "by one"
                )


def _refuse_other_work(
    given: "list[Recipe]", names: list[str], entrants: Path | None
) -> None:
    """Raise :class:`UsageError` if recipes that compete on one workload differ in what the loss is about.

    ``names``: what competes; ``entrants``: the file that declares it, None where the recipes themselves compete.
    """
    for section in ("data", "validation", "loss"):
        first = getattr(given[0], section)
        if any(getattr(recipe, section) != first for recipe in given[1:]):
            who = f"entrants of {entrants}:" if entrants else "recipes"
            way = (
                "make them recipes, which are workloads of their own"
                if entrants
                else "give --entrants, with which every recipe is a workload of its own"
            )
            raise UsageError(
                f"{who} {', '.join(names)} differ in [{section}], so that their losses cannot be compared; make these "
                f"equal, or {way}"
            )


def _show(table: "list[Standing]") -> None:
    def shown(value: float, digits: int) -> str:
        return f"{value:,.{digits}f}" if math.isfinite(value) else "-"

    rows = []
    for row in table:
        tuned = [" ".join(study.candidate) for study in row.studies]
        usual = max(dict.fromkeys(tuned), key=tuned.count)
        reached = f"{row.reached} of {len(row.studies)}"
        rows.append(
            [row.workload, str(row.rank), row.entrant, reached, shown(row.steps, 0), shown(row.seconds, 2), usual]
        )  # fmt: skip
    heads = ("workload", "rank", "entrant", "reached", "steps", "seconds", "tuned to")
    print_table(heads, rows)
