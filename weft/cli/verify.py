"""``weft verify``: the layout against one device, by numbers or by types."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import typer

from weft.errors import UsageError, WeftError, nearest
from weft.recipe import Recipe, load_recipe
from weft.train.failure import is_secondary
from weft.train.launch import in_ranks, join, launch, part_ranks, set_threads


def run(
    path: Path, layout: str | None, overrides: list[str], steps: int, types: bool, dtype: str, as_json: bool
) -> int:
    from weft.train.verify import TOLERANCE

    if dtype not in TOLERANCE:
        raise UsageError(f"--dtype {dtype!r} is not possible; {nearest(dtype, TOLERANCE)}")
    recipe = load_recipe(path, overrides, layout)
    # What is proved is the arithmetic of the layout, in a precision in which rounding cannot hide a mistake.
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"dtype": dtype})})
    if types:
        return _types(recipe, as_json)
    if not in_ranks():
        from weft.train.setup import prepare

        prepare(recipe)
        if recipe.layout.world > 1:
            return launch(sys.argv[1:], recipe.layout.world, threads=recipe.train.threads)
    return _numbers(recipe, steps, as_json)


def _types(recipe: Recipe, as_json: bool) -> int:
    from weft.train.setup import model_shape
    from weft.train.verify import check_types

    shape = model_shape(recipe)
    shape = shape.model_copy(update={"vocab": shape.vocab or 257})
    fault = check_types(shape, recipe.layout, recipe.train)
    if as_json:
        print(json.dumps({"ok": fault is None, "layout": str(recipe.layout), "world": recipe.layout.world,
                          "fault": asdict(fault) if fault else None}))  # fmt: skip
    elif fault:
        typer.echo(f"the types of {recipe.layout} do not fit:\n{fault}")
    else:
        typer.echo(f"the types of one step under {recipe.layout} fit ({recipe.layout.world} ranks, none started)")
    return 0 if fault is None else 1


def _numbers(recipe: Recipe, steps: int, as_json: bool) -> int:
    from weft.layout.mesh import Mesh
    from weft.train.setup import device_type, prepare
    from weft.train.verify import TOLERANCE, compare, run_layout

    set_threads(recipe.train.threads, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    device, dtype = device_type(recipe), recipe.train.dtype
    join(device, recipe.train.timeout)
    mesh = Mesh.create(recipe.layout, device)
    job = prepare(recipe)
    difference = compare(run_layout(job, mesh, steps), job, mesh)
    part_ranks()
    if difference is None:
        return 0
    if as_json:
        print(json.dumps(asdict(difference) | {"layout": str(recipe.layout), "steps": steps, "dtype": dtype}))
    else:
        limit = TOLERANCE[dtype]
        typer.echo(f"{recipe.layout} against one device, {steps} steps in {dtype} (limit {limit:.0e}):")
        for what, value, where in (
            ("loss", difference.loss, ""),
            ("gradients", difference.grad, difference.worst_grad),
            ("gradient norm", difference.grad_norm, ""),
            ("parameters", difference.param, difference.worst_param),
        ):
            verdict = "equal" if value <= limit else "DIFFERENT"
            typer.echo(f"  {what:<14} {value:9.2e}  {verdict}" + (f"  (worst: {where})" if where else ""))
    if not difference.ok:
        raise WeftError(f"{recipe.layout} does not compute what one device computes")
    return 0


def run_random(path: Path, count: int, seed: int, minutes: float | None, dtype: str, as_json: bool) -> int:
    """Random cases against one device; Ctrl-C ends with the summary so far."""
    from rich.console import Console
    from rich.progress import Progress

    from weft.train.fuzz import Fuzzer, Summary, command
    from weft.train.pool import MAX_WORLD, Pool
    from weft.train.verify import TOLERANCE

    if dtype not in TOLERANCE:
        raise UsageError(f"--dtype {dtype!r} is not possible; {nearest(dtype, TOLERANCE)}")
    pool, summary = Pool(is_secondary), Summary()
    fuzzer = Fuzzer(path, pool, dtype)
    try:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("against one device", total=count)
            for case, verdict in fuzzer.campaign(count, seed, MAX_WORLD, minutes):
                summary.counts[verdict.kind] += 1
                told = ", ".join(f"{number} {kind}" for kind, number in summary.counts.items())
                progress.update(task, advance=1, description=told)
                if verdict.kind in ("equal", "refused"):
                    continue
                repeat = command(path, case, dtype, fuzzer.steps)
                summary.cases.append({"kind": verdict.kind, "why": verdict.why, "command": repeat})
                if not as_json:
                    typer.echo(f"{verdict.kind}: {verdict.why.splitlines()[0]}\n  {repeat}")
    except KeyboardInterrupt:
        typer.echo("stopped by Ctrl-C", err=True)
    finally:
        pool.close()
    if as_json:
        print(json.dumps(summary.as_json()))
    else:
        typer.echo(", ".join(f"{value} {key}" for key, value in summary.as_json().items() if key != "cases"))
    return 1 if summary.cases else 0
