"""``weft train``: prepare, start the ranks (or be one), and say at the end what there is to see."""

import signal
import sys
from pathlib import Path

from rich.console import Console

from weft.errors import UsageError
from weft.recipe import Recipe, load_recipe
from weft.train.launch import in_ranks, launch


def run(
    path: Path, layout: str | None, overrides: list[str], out: Path | None, resume: str | None,
    ranks: int | None = None, cluster: str | None = None,
) -> int:  # fmt: skip
    recipe = load_recipe(path, overrides, layout)
    argv = sys.argv[1:]
    if "layout" not in recipe.model_fields_set:
        from weft.train.start import planned

        recipe, more = planned(recipe, ranks) if cluster is None else probed_choice(recipe, ranks, cluster)
        argv += more
    elif cluster is not None and not in_ranks():
        raise UsageError("--cluster is for a recipe without a layout, which the planner then chooses; leave out one")
    elif ranks is not None and ranks != recipe.layout.world:
        raise UsageError(
            f"--ranks {ranks}, but layout {recipe.layout} has {recipe.layout.world}; leave out one of them, or write "
            "--layout with so many"
        )
    if not in_ranks():
        from weft.train.runs import check_resume, check_run
        from weft.train.setup import prepare

        chosen = check_run(recipe, out, resume)
        with Console(stderr=True).status("preparing the data"):
            check_resume(chosen, prepare(recipe))
        if recipe.layout.world > 1:
            return launch(argv, recipe.layout.world, threads=recipe.train.threads)
    from weft.train.start import be_rank

    outcome = be_rank(recipe, out, resume, _conclude)
    # Of several ranks the launcher knows best what a signal means; each of them ended as it should.
    return 128 + outcome.interrupted if recipe.layout.world == 1 and outcome.interrupted else 0


def probed_choice(recipe: Recipe, ranks: int | None, file: str) -> tuple[Recipe, list[str]]:
    """A recipe with the best layout for the machine of ``file``; and the same for the command lines of its ranks."""
    from weft.planner.machine import load_cluster
    from weft.rehearse.choose import choose_here

    cluster = load_cluster(file, ranks)
    if not cluster.probed:
        raise UsageError(f"--cluster {file} is not from weft probe; leave it out, or run: weft probe --out probe.toml")
    if in_ranks():
        raise UsageError(
            "--cluster plans before ranks are started; write the layout first: weft plan ... --recipe FILE"
        )
    with Console(stderr=True).status("rehearsing layouts") as status:
        choice = choose_here(recipe, cluster, ranks, status.update)
    print(choice.line, flush=True)
    return choice.recipe, list(choice.overrides)


def _conclude(recipe: Recipe, outcome) -> None:  # type: ignore[no-untyped-def]
    from weft.observe.metrics import Metrics
    from weft.observe.report import write_report
    from weft.planner.own import append

    say = Console(highlight=False, soft_wrap=True).print
    if outcome.interrupted:
        name = signal.Signals(outcome.interrupted).name
        say(f"stopped by {name} after step {outcome.progress.step}; continue with: --resume {outcome.run}")
    elif outcome.validations:
        first, last = outcome.validations[0], outcome.validations[-1]
        say(f"validation loss {first:.3f} -> {last:.3f} ({last / first:.0%} of its first value)")
    if recipe.generate and outcome.checkpoint and not outcome.interrupted:
        from weft.cli.generate import say_sample

        sample = say_sample(outcome.checkpoint, recipe.generate)
        metrics = Metrics(outcome.run, tensorboard=False)
        metrics.log("sample", outcome.progress.step, prompt=recipe.generate.prompt, text=sample)
        metrics.close()
    say(f"checkpoint  {outcome.checkpoint}\nreport      {write_report(outcome.run)}")
    if traces := sorted(outcome.run.glob("trace/*.json")):
        say(f"trace       {traces[0].parent}: a file per rank, to open in ui.perfetto.dev")
    if measured := append(outcome.run):
        say(f"measured    {measured}: what the planner learns from")
