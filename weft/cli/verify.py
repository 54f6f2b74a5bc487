"""``weft verify``: the layout against one device, by numbers or by types; real clients against a virtual clock."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.arguments import AsJson, FromModel, LayoutText, Overrides, RecipeFile
from weft.errors import UsageError, WeftError, nearest
from weft.run.rank_processes import in_ranks

if TYPE_CHECKING:
    from weft.recipe import Recipe

#: Cases between two lines of progress where there is no terminal to show a bar.
LINE_EVERY = 50

_types_help = "Type-check the step instead: no devices, any world size."


def verify_command(
    recipe: RecipeFile,
    layout: LayoutText = None,
    overrides: Overrides = None,
    origin: FromModel = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Optimizer steps to compare: 3, with --random 2."),
    ] = None,
    types: Annotated[bool, typer.Option("--types", help=_types_help)] = False,
    dtype: Annotated[
        str, typer.Option(help="float64 (to 1e-10) or float32 (to 5e-5).")
    ] = "float64",
    cases: Annotated[
        int | None,
        typer.Option(
            "--random",
            min=1,
            help="Try this many random layouts instead; of a recipe with a section federated, settings.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="With --random: seed of the cases.")] = 0,
    first: Annotated[
        int,
        typer.Option(min=0, help="With --random: start at the case with this number."),
    ] = 0,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="With --random: stop after this many minutes."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Prove that a layout computes what one device computes. Exit code 0: equal, 1: not."""
    from weft.prove.equality import TOLERANCE
    from weft.recipe import load_recipe

    if dtype not in TOLERANCE:
        raise UsageError(
            f"--dtype {dtype!r} is not possible; {nearest(dtype, TOLERANCE)}"
        )
    if cases is not None:
        _refuse_beside_random(layout, overrides or [], origin, types)
        return _random(
            recipe, cases, first, seed, minutes, dtype, as_json, steps or 2,
            overrides or [],
        )  # fmt: skip
    steps = steps or 3
    given = load_recipe(recipe, overrides or [], layout, origin)
    if given.federated is not None and not types:
        return _federated(given, as_json)
    if given.saddle is not None and not types:
        return _saddle(given, steps, dtype, as_json)
    given.need_model()
    # What is proved is the arithmetic of the layout, in a precision in which rounding cannot hide a mistake.
    given = given.model_copy(
        update={"train": given.train.model_copy(update={"dtype": dtype})}
    )
    if types:
        return _types(given, as_json)
    if not in_ranks():
        from weft.train.setup import prepare

        prepare(given)
        if given.layout.world > 1:
            from weft.run.forked import TRAINING
            from weft.run.launch import launch

            return launch(
                sys.argv[1:],
                given.layout.world,
                threads=given.train.threads,
                shared=TRAINING,
            )
    return _numbers(given, steps, as_json)


def _federated(recipe: "Recipe", as_json: bool) -> int:
    """Compare a real run of the recipe's policy with the virtual clock."""
    from weft.federated.real_run_check import compare_real_run

    assert recipe.federated is not None
    policy = recipe.federated.policy
    result = compare_real_run(recipe, lambda line: typer.echo(line, err=True))
    if as_json:
        print(json.dumps(result._asdict() | {"ok": result.ok, "policy": policy}))
    else:
        verdict = "equal" if result.ok else "DIFFERENT"
        typer.echo(
            f"{policy}, real clients against the virtual clock, {result.updates} updates and {result.changes} changes "
            f"in float64 (limit {result.limit:.0e}):"
        )
        typer.echo(
            f"  parameters     {result.difference:9.2e}  {verdict}  (worst: {result.worst})"
        )
    if not result.ok:
        raise WeftError(
            f"policy {policy} with real clients does not compute the same as on the virtual clock"
        )
    return 0


def _saddle(recipe: "Recipe", steps: int, dtype: str, as_json: bool) -> int:
    """Compare the recipe's search for a saddle point over ranks with one device."""
    from weft.prove.equality import TOLERANCE
    from weft.saddle.saddle_check import compare_saddle

    train = recipe.train.model_copy(update={"dtype": dtype})
    recipe = recipe.model_copy(update={"train": train})
    if recipe.layout.world > 1 and not in_ranks():
        from weft.run.launch import launch

        return launch(sys.argv[1:], recipe.layout.world, threads=train.threads)
    result = compare_saddle(recipe, steps)
    if result is None:  # another rank says it
        return 0
    ok = result.parameters <= TOLERANCE[dtype]
    if as_json:
        about = {"ok": ok, "layout": str(recipe.layout), "steps": steps, "dtype": dtype}
        print(json.dumps(result._asdict() | about))
    else:
        typer.echo(
            f"{recipe.layout} against one device, {steps} rounds in {dtype} (limit {TOLERANCE[dtype]:.0e}), "
            f"{result.sent:,} bytes sent:"
        )
        verdict = "equal" if ok else "DIFFERENT"
        typer.echo(
            f"  parameters     {result.parameters:9.2e}  {verdict}  (worst: {result.worst})"
        )
    if not ok:
        raise WeftError(f"{recipe.layout} does not compute the same as one device")
    return 0


def _types(recipe: "Recipe", as_json: bool) -> int:
    from weft.prove.types import check_types
    from weft.train.setup import model_shape

    shape = model_shape(recipe)
    shape = shape.model_copy(update={"vocab": shape.vocab or 257})
    fault = check_types(
        shape, recipe.layout, recipe.train, recipe.optimizer, recipe.loss, recipe.memory
    )
    if fault is None and recipe.rl and recipe.roles and recipe.roles.critic.is_apart:
        from weft.train.own_critic import critic_shape

        role = recipe.roles.critic
        layout = role.process_layout if role.elsewhere else recipe.layout
        fault = check_types(
            critic_shape(shape, recipe), layout, recipe.train, policy=recipe.rl.policy_loss
        )  # fmt: skip
    if as_json:
        print(json.dumps({"ok": fault is None, "layout": str(recipe.layout), "world": recipe.layout.world,
                          "fault": asdict(fault) if fault else None}))  # fmt: skip
    elif fault:
        typer.echo(f"the types of {recipe.layout} do not fit:\n{fault}")
    else:
        ranks = f"{recipe.layout.world} rank{'s' * (recipe.layout.world > 1)}"
        typer.echo(
            f"the types of one step under {recipe.layout} fit ({ranks}, none started)"
        )
    return 0 if fault is None else 1


def _numbers(recipe: "Recipe", steps: int, as_json: bool) -> int:
    from weft.prove.equality import TOLERANCE, prove

    difference, dtype = prove(recipe, steps), recipe.train.dtype
    if difference is None:  # another rank says it
        return 0
    simulated = recipe.layout.island > 1 and not recipe.sync.of_gradients
    peer = "islands simulated in one process" if simulated else "one device"
    if as_json:
        print(
            json.dumps(
                asdict(difference)
                | {"layout": str(recipe.layout), "steps": steps, "dtype": dtype}
            )
        )
    else:
        limit = TOLERANCE[dtype]
        critic = recipe.roles and recipe.roles.critic
        if critic and critic.elsewhere:
            typer.echo(
                "not compared: the critic, whose processes are not started; --set roles.critic.ranks=0 --layout "
                f"{critic.process_layout} compares it under their layout"
            )
        typer.echo(
            f"{recipe.layout} against {peer}, {steps} steps in {dtype} (limit {limit:.0e}):"
        )
        for what, value, where in (
            ("loss", difference.loss, ""),
            ("gradients", difference.grad, difference.worst_grad),
            ("gradient norm", difference.grad_norm, ""),
            ("parameters", difference.param, difference.worst_param),
            ("optimizer", difference.slot, difference.worst_slot),
        ):
            verdict = "equal" if value <= limit else "DIFFERENT"
            typer.echo(
                f"  {what:<14} {value:9.2e}  {verdict}"
                + (f"  (worst: {where})" if where else "")
            )
    if not difference.ok:
        raise WeftError(f"{recipe.layout} does not compute the same as {peer}")
    return 0


def _refuse_beside_random(
    layout: str | None, overrides: list[str], origin: str | None, types: bool
) -> None:
    """Refuse the options that have no effect beside ``--random``, which draws layouts and sizes of models."""
    from weft.layout.axes import LIVE_AXES

    names = [text.partition("=")[0].strip() for text in overrides]
    sizes = {f"layout.{axis}" for axis in (*LIVE_AXES, "island", "ep", "order")}
    options = {"--layout": layout, "--from": origin, "--types": types}
    idle = [name for name, value in options.items() if value]
    idle += [f"--set {name}" for name in names if name in sizes]
    if idle:
        raise UsageError(
            f"{idle[0]} has no use with --random, which draws layouts and small models; leave one of them out"
        )


def _random(
    path: Path,
    count: int,
    first: int,
    seed: int,
    minutes: float | None,
    dtype: str,
    as_json: bool,
    steps: int,
    fixed: list[str],
) -> int:
    """Run random cases against one device. Ctrl-C or SIGTERM ends with the summary so far."""
    from rich.console import Console
    from rich.progress import Progress

    from weft.prove.fuzz import Fuzzer, Summary, command_of
    from weft.prove.pool import MAX_WORLD, ProcessPool
    from weft.recipe import load_recipe

    recipe = load_recipe(path, fixed)
    recipe.need_model()
    pool, summary, console = ProcessPool(), Summary(), Console(stderr=True)
    fuzzer: Any = Fuzzer(path, pool, dtype, steps, fixed=fixed)
    if recipe.federated is not None:
        from weft.federated.random_federation import FederatedCases

        fuzzer = FederatedCases(path, fixed)
    try:
        with Progress(console=console) as progress:
            task = progress.add_task("against one device", total=count)
            for case, verdict in fuzzer.campaign(
                count, seed, MAX_WORLD, minutes, first
            ):
                summary.counts[verdict.kind] += 1
                counted = ", ".join(
                    f"{number} {kind}" for kind, number in summary.counts.items()
                )
                progress.update(task, advance=1, description=counted)
                # a log has no bar
                if not console.is_terminal and summary.counts.total() % LINE_EVERY == 0:
                    console.print(f"{summary.counts.total()} of {count}: {counted}")
                if verdict.kind in ("equal", "refused"):
                    continue
                if isinstance(fuzzer, Fuzzer):
                    repeat = command_of(path, case, dtype, steps, fixed)
                else:
                    repeat = fuzzer.command_of(case)
                summary.cases.append(
                    {"kind": verdict.kind, "why": verdict.why, "command": repeat}
                )
                if not as_json:
                    typer.echo(
                        f"{verdict.kind}: {verdict.why.splitlines()[0]}\n  {repeat}"
                    )
    except KeyboardInterrupt:
        typer.echo("stopped before the end", err=True)
    finally:
        pool.close()
    if as_json:
        print(json.dumps(summary.as_json()))
    else:
        typer.echo(
            ", ".join(
                f"{value} {key}"
                for key, value in summary.as_json().items()
                if key != "cases"
            )
        )
    return 1 if summary.cases else 0
