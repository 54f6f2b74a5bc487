"""``weft train``: prepare, start the ranks (or be one), and say at the end what there is to see."""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from weft.cli.launch import in_ranks, init_ranks, launch, part_ranks, set_threads
from weft.errors import UsageError, WeftError
from weft.recipe import RUNS, Recipe, load_recipe

if TYPE_CHECKING:
    from weft.train.loop import Outcome


def run(
    path: Path, layout: str | None, overrides: list[str], out: Path | None, resume: str | None,
    ranks: int | None = None, cluster: str | None = None,
) -> int:  # fmt: skip
    recipe = load_recipe(path, overrides, layout)
    argv = sys.argv[1:]
    if "layout" not in recipe.model_fields_set:
        recipe, more = planned(recipe, ranks, cluster)
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
    outcome = be_rank(recipe, out, resume)
    # Of several ranks the launcher knows best what a signal means; each of them ended as it should.
    return 128 + outcome.interrupted if recipe.layout.world == 1 and outcome.interrupted else 0


def planned(recipe: Recipe, ranks: int | None, cluster: str | None = None) -> tuple[Recipe, list[str]]:
    """A recipe that names no layout, with the planner's; and the same for the command lines of its ranks.

    Its ranks are those that were started, else ``ranks``, else one per GPU; on a CPU alone it stays one, unless
    ``cluster`` is a file from ``weft probe``, which knows what several would take.
    """
    if cluster is not None:
        return probed_choice(recipe, ranks, cluster)
    import psutil
    import torch

    from weft.planner.choose import choose, local_cluster
    from weft.planner.cost import BITS
    from weft.planner.engine import ENGINES
    from weft.planner.own import FILE, own_runs
    from weft.train.setup import device_type, model_shape

    started = in_ranks()
    gpus = torch.cuda.device_count() if device_type(recipe) == "cuda" else 0
    world = int(os.environ["WORLD_SIZE"]) if started else ranks or gpus or 1
    if ranks is not None and ranks != world:
        raise UsageError(f"--ranks {ranks}, but {world} ranks were started; leave it out")
    if world == 1:
        return recipe, []
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if gpus:
        device, memory = torch.cuda.get_device_name(0), float(torch.cuda.get_device_properties(0).total_memory)
    else:
        device, memory = "CPU", psutil.virtual_memory().total / local
    cluster_here = local_cluster(device, memory, world, local)
    # Ranks that were started elsewhere must all come to the same layout, whatever files each of them sees.
    own = None if started else own_runs(RUNS / FILE, cluster_here.device, BITS[recipe.train.dtype])
    choice = choose(recipe, model_shape(recipe), cluster_here, own.engine if own else ENGINES["weft"])
    if own:
        print(f"planner {own.message}")
    if not started or os.environ["RANK"] == "0":
        print(choice.line, flush=True)
    return choice.recipe, list(choice.overrides)


def probed_choice(recipe: Recipe, ranks: int | None, file: str) -> tuple[Recipe, list[str]]:
    """As :func:`planned`, from rehearsals on the machine that ``file`` describes."""
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


def be_rank(recipe: Recipe, out: Path | None, resume: str | None) -> "Outcome":
    """One rank's whole life."""
    import torch

    from weft.layout.mesh import Mesh
    from weft.train.loop import train
    from weft.train.setup import device_type, prepare

    set_threads(recipe.train.threads, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    device = device_type(recipe)
    join(device, recipe.train.timeout)
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    mesh = Mesh.create(recipe.layout, torch.device(device, torch.cuda.current_device()) if device == "cuda" else device)
    try:
        outcome = train(prepare(recipe), mesh, out, resume)
    except torch.OutOfMemoryError as error:
        raise WeftError(
            f"out of memory on {mesh.device}: {str(error).splitlines()[0]}; lower train.micro_batch, "
            "set train.recompute = 'selective' or 'full', or raise layout.shard"
        ) from None
    main = mesh.is_main
    part_ranks()
    if main:
        _conclude(recipe, outcome)
    return outcome


def join(device: str, timeout: int) -> None:
    """Join the ranks that were started; a lone process is a world of one."""
    if "RANK" not in os.environ:
        import torch.distributed as dist

        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    init_ranks(device, timeout)


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
