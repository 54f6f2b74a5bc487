"""``weft train``: prepare, start the ranks (or be one), and print the results at the end."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from weft.cli.arguments import (
    DataPath,
    FromModel,
    KeptRecipeFile,
    LayoutText,
    Overrides,
)
from weft.cli.console import plain_console, print_table
from weft.errors import UsageError
from weft.run.rank_processes import in_ranks

if TYPE_CHECKING:  # `weft --help` does not wait for what reads a recipe
    from collections.abc import Callable

    from weft.recipe import Recipe
    from weft.train.training import Outcome


_ranks = (
    "Number of ranks for a recipe without a layout; the planner chooses the "
    "layout. Default: one per GPU, or one."
)
_probe_file = (
    "A cluster file from weft probe, by which the planner chooses the layout "
    "and the number of ranks."
)
_resume = typer.Option(
    metavar="auto|DIR|s3://...|peer://...",
    help="Continue a run or checkpoint, under any layout.",
)
_sweep_help = (
    "Run once for each of these values, one after the other; several --sweep "
    "options multiply (docs/how-to/sweeps.md)."
)
_sweep = typer.Option("--sweep", metavar="SECTION.KEY=A,B", help=_sweep_help)


def train_command(
    recipe: KeptRecipeFile = None,
    layout: LayoutText = None,
    overrides: Overrides = None,
    origin: FromModel = None,
    data: DataPath = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; runs/NAME by default.")
    ] = None,
    resume: Annotated[str | None, _resume] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help=_ranks)] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="FILE", help=_probe_file)
    ] = None,
    sweep: Annotated[list[str] | None, _sweep] = None,
) -> int:
    """Train a model. Starts one process per rank, or joins those of torchrun or Slurm."""
    from weft.data.source_check import check_sources

    def load(more: list[str]) -> "Recipe":
        plans = ranks is not None or cluster is not None
        return named_recipe(
            recipe, resume, [*(overrides or []), *more], layout, origin, data, plans
        )

    if sweep:
        return sweep_command(sweep, load, out, resume, ranks, cluster)
    given = load([])
    if not in_ranks():
        # before anything that takes time
        check_sources(given.data)
        if given.memory.folder and "file" in given.memory.away.values():
            from weft.memory.nameless_file import check_file_folder

            folder = given.memory.folder
            check_file_folder(Path(folder), f"memory.folder = {folder!r}")
    argv = sys.argv[1:]
    if "layout" not in given.model_fields_set:
        from weft.api import with_planned_layout

        given, more = (
            with_planned_layout(given, ranks)
            if cluster is None
            else probed_choice(given, ranks, cluster)
        )
        argv += more
    elif cluster is not None and not in_ranks():
        raise UsageError(
            "--cluster is for a recipe without a layout, which the planner then chooses; leave out one"
        )
    elif ranks is not None and ranks != given.layout.world:
        raise UsageError(
            f"--ranks {ranks}, but layout {given.layout} has {given.layout.world}; leave out one of them, or write "
            "--layout with so many"
        )
    if not in_ranks():
        from weft.train.runs import prepare_run

        with Console(stderr=True).status("preparing the data"):
            prepare_run(given, out, resume)
        if given.layout.world > 1:
            from weft.run.forked import TRAINING
            from weft.run.launch import launch

            survive = given.survives or given.islands_come_and_go
            return launch(
                argv,
                given.layout.world,
                threads=given.train.threads,
                survive=survive,
                shared=TRAINING,
            )
    from weft.api import be_rank

    outcome = be_rank(given, out, resume, conclude)
    # Of several ranks the launcher knows best what a signal means; each of them ended as it should.
    return (
        128 + outcome.interrupted
        if given.layout.world == 1 and outcome and outcome.interrupted
        else 0
    )


def named_recipe(
    recipe: Path | None, resume: str | None, overrides: list[str], layout: str | None, origin: str | None,
    data: str | None, plans: bool,
) -> "Recipe":  # fmt: skip
    """Return the recipe ``recipe`` or, if it is None, the one that the run ``resume`` keeps, with the other options of
    ``weft train``. ``plans``: whether the planner is to choose again what it has chosen for the run.
    """
    if resume == "":
        raise UsageError(
            "--resume is empty; give a run folder or a checkpoint, as in --resume runs/NAME, or auto for the newest "
            "run of the recipe"
        )
    if recipe is not None:
        from weft.recipe import load_recipe

        return load_recipe(recipe, overrides, layout, origin, data)
    if resume is None:
        raise UsageError(
            "name a recipe, such as quickstart (weft recipes lists them), or continue a run: --resume runs/NAME"
        )
    from weft.checkpoint.kept_recipe import kept_recipe

    return kept_recipe(resume, overrides, layout, origin, data, plans)


def sweep_command(
    asked: list[str], load: "Callable[[list[str]], Recipe]", out: Path | None, resume: str | None, ranks: int | None,
    cluster: str | None,
) -> int:  # fmt: skip
    """Run the sweep that ``--sweep`` asks for, and print one table about its runs. Returns the exit code.

    ``asked``: values of ``--sweep``. ``load``: the function that returns the recipe with further overrides. The other
    arguments are options of ``weft train``.
    """
    from weft.api import with_planned_layout
    from weft.data.source_check import check_sources
    from weft.observe.display import compact
    from weft.recipe import RUNS
    from weft.run.sweep import check_folder, run_sweep, sweep_report, trials_of

    if in_ranks():
        raise UsageError(
            "--sweep starts the ranks of each run by itself; call it without torchrun or Slurm"
        )
    if resume is not None:
        raise UsageError(
            "a sweep goes on where it was when the same command is given again; leave out --resume"
        )
    if cluster is not None:
        raise UsageError(
            "--cluster plans for one run; write --layout, or leave it to the planner (--ranks)"
        )
    folder = out or RUNS / f"{load([]).name}-sweep"
    check_folder(folder)
    # all are checked before any runs
    trials = [(trial, load(trial.overrides)) for trial in trials_of(asked, folder)]
    for _, recipe in trials:
        check_sources(recipe.data)
    trials = [
        (
            trial,
            recipe
            if "layout" in recipe.model_fields_set
            else with_planned_layout(recipe, ranks)[0],
        )
        for trial, recipe in trials
    ]
    results, interrupted = run_sweep(
        trials, folder, lambda text: print(text, flush=True)
    )

    def shown(number: float | None, how: str = ".4f") -> str:
        return "-" if number is None else format(number, how)

    print_table(
        (*trials[0][0].settings, "steps", "loss", "validation", "at step", "tokens/s", "run"),
        [
            (*r.trial.shown, str(r.steps), shown(r.loss), shown(r.validation), shown(r.step, "d"),
             compact(r.tokens_per_s) if r.tokens_per_s else "-", r.problem or str(r.trial.folder))
            for r in sorted(results, key=lambda r: r.rank)
        ],
    )  # fmt: skip
    if (report := sweep_report(results, folder)) is not None:
        print(f"report      {report}")
    if interrupted:
        name = signal.Signals(interrupted).name
        print(f"stopped by {name}; the same command goes on with what is not done")
        return 128 + interrupted
    return int(any(r.problem for r in results))


def probed_choice(
    recipe: "Recipe", ranks: int | None, file: str
) -> "tuple[Recipe, list[str]]":
    """Choose the best layout of ``ranks`` ranks for the machine that the cluster file ``file`` describes.

    Returns the recipe with this layout, and the overrides that set the layout on the command lines of the ranks. With
    ``ranks = None`` any probed number of ranks is possible.
    """
    from weft.planner.machine import load_cluster
    from weft.rehearse.local_choice import choose_here

    cluster = load_cluster(file, ranks)
    if not cluster.probed:
        raise UsageError(
            f"--cluster {file} is not from weft probe; leave it out, or run: weft probe --out probe.toml"
        )
    if in_ranks():
        raise UsageError(
            "--cluster plans before ranks are started; write the layout first: weft plan ... --recipe FILE"
        )
    with Console(stderr=True).status("rehearsing layouts") as status:
        choice = choose_here(recipe, cluster, ranks, status.update)
    print(choice.line, flush=True)
    return choice.recipe, list(choice.overrides)


def conclude(recipe: "Recipe", outcome: "Outcome") -> None:
    from weft.api import finish_run, is_exported
    from weft.checkpoint.best import best_checkpoint
    from weft.observe.run_metrics import Metrics, resume_hint

    say = plain_console().print
    if outcome.interrupted:
        name = signal.Signals(outcome.interrupted).name
        client = recipe.federated is not None and recipe.federated.join
        same = "continue with: the same command"
        again = same if client else resume_hint(outcome.run)
        say(f"stopped by {name} after step {outcome.progress.step}; {again}")
    elif outcome.validations:
        # of the whole run, which may have been resumed
        losses = [record["loss"] for record in outcome.metrics("validation")]
        first, last = (losses or outcome.validations)[0], outcome.validations[-1]
        say(
            f"validation loss {first:.3f} -> {last:.3f} ({last / first:.0%} of its first value)"
        )
    if recipe.generate and outcome.checkpoint and not outcome.interrupted:
        from weft.cli.generate import say_samples

        say("the model answers generate.prompts ...")
        if shown := say_samples(outcome.checkpoint, recipe):
            metrics = Metrics(outcome.run)
            metrics.log("sample", outcome.progress.step, samples=shown)
            metrics.close()
    if is_exported(recipe, outcome):
        say(f"exporting   {outcome.run / 'export'} ...")
    finished = finish_run(recipe, outcome)
    if finished.export:
        say(f"exported    {finished.export}")
    if best := best_checkpoint(outcome.run):
        say(
            f"best        {best}: validation loss {outcome.best.loss:.4f} after step {outcome.best.step}"
        )
    say(f"checkpoint  {outcome.checkpoint}\nreport      {finished.report}")
    if traces := sorted(outcome.run.glob("trace/*.json")):
        say(
            f"trace       {traces[0].parent}: a file per rank, to open in ui.perfetto.dev"
        )
    if finished.measured:
        say(
            f"measured    {finished.measured}: runs of this machine, which weft plan learns from"
        )
