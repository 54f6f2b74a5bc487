"""Training from Python: ``train(recipe)`` trains in this process, or starts the ranks that the layout asks for."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.recipe import RUNS, Recipe, build_recipe
from weft.run.rank_processes import in_ranks, own_device, rank_process
from weft.run.signals import requests, take_ctrl_c
from weft.train.runs import as_recorded, prepare_run
from weft.train.setup import device_type, model_shape, prepare
from weft.train.training import Ending, Outcome, train_job


def start(
    recipe: Recipe, out: str | Path | None = None, resume: str | None = None
) -> Outcome:
    """Train the recipe as ``weft train`` does, and return how the run ended.

    If the layout has several ranks, they are started as processes of this machine. Under torchrun or Slurm, where every
    rank calls this function, the existing ranks are joined instead. A recipe without a layout gets the planner's.
    ``out``: the run folder (default ``runs/NAME``); ``resume``: the run or checkpoint to continue. With "auto" it is
    the run in ``out`` or, without ``out``, the newest run of the recipe's name. If that has no checkpoint, a new run
    begins. Raises :class:`WeftError` if the run fails. After Ctrl-C or SIGTERM the run is saved, and the result has the
    signal as ``interrupted``.
    """
    with requests.watching():
        return _start(recipe, None if out is None else Path(out), resume)


def _start(recipe: Recipe, out: Path | None, resume: str | None) -> Outcome:
    if "layout" not in recipe.model_fields_set:
        recipe, _ = with_planned_layout(recipe, None)
    if in_ranks() or recipe.layout.world == 1:
        outcome = be_rank(recipe, out, resume, finish_run)
        if outcome is None:
            raise WeftError(
                "the other ranks have brought the run to its end without this one"
            )
        return outcome
    prepare_run(recipe, out, resume)
    return _in_ranks_of_its_own(recipe, out, resume)


def with_planned_layout(recipe: Recipe, ranks: int | None) -> tuple[Recipe, list[str]]:
    """Return ``recipe`` with a layout that the planner chooses, and the layout as overrides for a command line.

    If torchrun or Slurm has started ranks, the layout is for all of them. Otherwise it is for ``ranks`` ranks or, with
    None, for one rank per GPU (one rank on a CPU). With one rank the recipe is returned as it is, without overrides.
    Raises :class:`UsageError` if ``ranks`` is not the number of started ranks.
    """
    from weft.observe.measured import FILE
    from weft.planner.choose import choose_layout, with_planned
    from weft.planner.engine_constants import ENGINES
    from weft.planner.machine import local_cluster
    from weft.planner.own import own_runs

    started = in_ranks()
    gpus = torch.cuda.device_count() if device_type(recipe) == "cuda" else 0
    world = int(os.environ["WORLD_SIZE"]) if started else ranks or gpus or 1
    if ranks is not None and ranks != world:
        raise UsageError(
            f"--ranks {ranks}, but {world} ranks were started; leave it out"
        )
    if world == 1:
        return recipe, []
    if recipe.trains_no_language_model:  # there is nothing to choose
        layout = recipe.layout.model_copy(update={"dp": world})
        recipe, noted = with_planned(recipe, "layout")
        words = ["--layout", f"dp={world}", *noted]
        return recipe.model_copy(update={"layout": layout}), words
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if gpus:
        device, memory = (
            torch.cuda.get_device_name(0),
            float(torch.cuda.get_device_properties(0).total_memory),
        )
    else:
        device, memory = "CPU", psutil.virtual_memory().total / local
    cluster_here = local_cluster(device, memory, world, local)
    # Ranks that were started elsewhere must all come to the same layout, whatever files each of them sees.
    own = None if started else own_runs(RUNS / FILE, cluster_here.device)
    choice = choose_layout(
        recipe,
        model_shape(recipe),
        cluster_here,
        own.engine if own else ENGINES["weft"],
    )
    if own:
        print(f"planner {own.message}")
    if not started or os.environ["RANK"] == "0":
        print(choice.line, flush=True)
    return choice.recipe, list(choice.overrides)


def be_rank(
    recipe: Recipe,
    out: Path | None,
    resume: str | None,
    conclude: Callable[[Recipe, Outcome], object],
) -> Outcome | None:
    """Train as one rank of the run in the folder ``out``, and return how the run ended.

    ``resume``: the run or checkpoint to continue; "auto": the run in ``out`` or, without ``out``, the newest run of the
    recipe's name; None: a new run. At the end, after the other ranks have left, the first rank calls ``conclude`` with
    the recipe and the outcome. Returns None if other ranks have finished the run without this one.
    """
    recipe = as_recorded(recipe, out, resume)
    places, started = recipe.layout.world, int(os.environ.get("WORLD_SIZE", "1"))
    # those that are there would wait for the others until the timeout
    if started < places:
        raise UsageError(
            f"layout {recipe.layout} has {places} places but {started} ranks were started; start {places} ranks or "
            "change --layout"
        )
    if os.environ.get("MASTER_ADDR", "").startswith("peer://"):
        _meet_over_peers(recipe)
    try:
        _, outcome, concludes = _live(recipe, out, resume)
    except torch.OutOfMemoryError as error:
        raise WeftError(
            f"out of memory on the GPU: {str(error).splitlines()[0]}; lower train.micro_batch, "
            "set train.recompute = 'selective' or 'full', or raise layout.shard"
        ) from None
    if concludes and outcome is not None:
        conclude(recipe, outcome)
        requests.open_run(None)
    return outcome


def _meet_over_peers(recipe: Recipe) -> None:
    from weft.layout.placement_groups import island_ranks
    from weft.peers.rendezvous import meet_over_peers
    from weft.sync.streams import own_port

    if recipe.layout.island == 1:
        raise UsageError(
            "MASTER_ADDR=peer://... joins islands; ranks of one island need a network of their own"
        )
    _, members = island_ranks(recipe.layout, rank := int(os.environ["RANK"]))
    meet_over_peers(recipe.resilience.encrypt, own_port(members.index(rank)))


def _live(recipe: Recipe, out: Path | None, resume: str | None) -> Ending:
    """Train as a rank of ``recipe``: from view to view if ranks or islands may be lost, else from beginning to end."""
    if recipe.islands_come_and_go or recipe.survives:
        from weft.resilience.run import survive

        return survive(recipe, out, resume)
    device = device_type(recipe)
    with rank_process(device, recipe.train.timeout, recipe.train.threads):
        mesh = Mesh.create(recipe.layout, own_device(device))
        if recipe.control is not None:
            from weft.rl.control.control_run import control_job

            return Ending(recipe, control_job(recipe, mesh, out, resume), mesh.speaks)
        if recipe.saddle is not None:
            from weft.saddle.saddle_run import saddle_job

            return Ending(recipe, saddle_job(recipe, mesh, out, resume), mesh.speaks)
        if recipe.federated is not None and recipe.federated.simulates:
            from weft.federated.virtual_run import virtual_job

            return Ending(recipe, virtual_job(recipe, mesh, out, resume), mesh.speaks)
        if recipe.layout.world == 1:  # there are no others to be slower than
            return Ending(
                recipe, train_job(prepare(recipe), mesh, out, resume), mesh.speaks
            )
        from weft.observe import trace
        from weft.resilience.watching import Watching

        outcome = train_job(prepare(recipe), mesh, guard=Watching(out, resume))
        trace.stop(everyone=mesh.is_main)
        return Ending(recipe, outcome, mesh.speaks)


@dataclass(frozen=True)
class Finished:
    """Files that :func:`finish_run` has written at the end of a run.

    ``report``: the HTML report. ``export``: the folder of the exported model, None if nothing was exported.
    ``measured``: the file of measured runs, None if the run gave no measurement.
    """

    report: Path
    export: Path | None
    measured: Path | None


def is_exported(recipe: Recipe, outcome: Outcome) -> bool:
    """Return whether :func:`finish_run` exports a model: the recipe asks for it, and the run was not interrupted."""
    whole = outcome.checkpoint is not None and not outcome.interrupted
    return whole and bool(recipe.checkpoint.export)


def finish_run(recipe: Recipe, outcome: Outcome) -> Finished:
    """Write a run's report, add the run to the measured runs and, if the recipe asks for it, export a checkpoint.

    ``outcome``: how the run ended. The measured runs are a file from which the planner learns. The best checkpoint is
    exported if the run has marked one, else the last. An interrupted run exports none. Returns the paths of the files
    that were written.
    """
    from weft.observe.measured import append
    from weft.observe.run_page import write_report

    exported = None
    if is_exported(recipe, outcome):
        exported = outcome.run / "export"
        _export(recipe, outcome, exported)
    return Finished(write_report(outcome.run), exported, append(outcome.run))


def _export(recipe: Recipe, outcome: Outcome, folder: Path) -> None:
    """Write the best checkpoint of a run, or else its last, as ``checkpoint.export`` asks."""
    from weft.checkpoint.best import best_checkpoint
    from weft.checkpoint.model import export_model
    from weft.checkpoint.store import model_of, open_checkpoint

    if folder.exists():  # of an earlier end of the same run
        shutil.rmtree(folder)
    checkpoint = best_checkpoint(outcome.run) or str(outcome.checkpoint)
    adapted = model_of(open_checkpoint(checkpoint)).adapter is not None
    merge = recipe.checkpoint.export == "model" and adapted
    export_model(checkpoint, folder, print, merge, recipe.optimizer.use_ema)


def _in_ranks_of_its_own(
    recipe: Recipe, out: Path | None, resume: str | None
) -> Outcome:
    """Start local ranks that run :func:`run_as_rank`; the first rank writes the outcome to a file."""
    from weft.run.launch import run_ranks

    with tempfile.TemporaryDirectory(prefix="weft-train-") as folder:
        task, done = Path(folder) / "task", Path(folder) / "outcome"
        words = [
            recipe.model_dump(mode="json"),
            out and str(out),
            resume and str(resume),
        ]
        task.write_text(json.dumps(words))
        command = [sys.executable, "-m", "weft.api", str(task), str(done)]
        ended = run_ranks(
            command,
            recipe.layout.world,
            recipe.train.threads,
            recipe.survives or recipe.islands_come_and_go,
        )
        if done.exists():
            return _outcome_of(json.loads(done.read_text()))
    if ended.code > 128:
        raise KeyboardInterrupt(ended.unsaid)
    raise WeftError(
        ended.cause.message
        if ended.cause
        else f"the ranks ended with exit code {ended.code}"
    )


def _words_of(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON."""
    place = outcome.checkpoint
    return {
        "run": str(outcome.run),
        "checkpoint": place and str(place),
        "progress": asdict(outcome.progress),
        "validations": outcome.validations,
        "interrupted": outcome.interrupted,
    }


def _outcome_of(words: dict[str, Any]) -> Outcome:
    from weft.checkpoint.address import open_storage
    from weft.checkpoint.run_state import Progress

    place = words["checkpoint"]
    return Outcome(
        Path(words["run"]),
        place and open_storage(place),
        Progress(**words["progress"]),
        words["validations"],
        words["interrupted"],
    )


def run_as_rank(task: str, done: str) -> int:
    """Train as one rank of a run whose ranks were started as processes of their own; return the exit code.

    ``task``: path of a JSON file with the recipe, the run folder and the checkpoint to resume. ``done``: path of the
    JSON file into which the first rank writes the outcome.
    """
    from weft.run.failure import leave, report_failure

    recipe, out, resume = json.loads(Path(task).read_text())

    def conclude(recipe: Recipe, outcome: Outcome) -> None:
        finish_run(recipe, outcome)
        Path(done).write_text(json.dumps(_words_of(outcome)))

    try:
        requests.watch()
        take_ctrl_c()
        be_rank(build_recipe(recipe), out and Path(out), resume, conclude)
    except Exception as error:
        return report_failure(error)
    except KeyboardInterrupt:
        leave(requests.code)
        return requests.code
    leave(0)
    return 0


if __name__ == "__main__":
    sys.exit(run_as_rank(*sys.argv[1:]))
