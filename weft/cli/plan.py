"""``weft plan``: the best layouts of a model on a cluster."""

import gc
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from weft.cli.arguments import AsJson
from weft.cli.console import grid, plain_console
from weft.writable import check_writable

if TYPE_CHECKING:
    from weft.planner.finalists import Final
    from weft.planner.job import PlanJob, RankedLayouts
    from weft.planner.machine import Cluster
    from weft.recipe import ModelShape
    from weft.rehearse.peak import Checked
    from weft.rehearse.trial import Measured

_model = (
    "A built-in shape (llama3-8b), a Weft recipe, or a model as in "
    "model.from: a folder, a GGUF file, a hub id."
)
_here = (
    "Show which methods of training fit this machine, how long they take and "
    "why, by running one block of the model."
)
_method = "With --here: a method: full, lora, qlora, galore or zo; may be repeated. If not set: all."
_cluster = "A cluster file, or a preset with --gpus: a100, h100, h200, b200, gb200, mi300x, cpu."
_pin = "A demand such as tp=8, 'tp<=8', pp=4 or recompute=full; may be repeated."
_COLOURS = {
    "compute": "blue", "recompute": "bright_blue", "tp": "red", "cp": "yellow", "ep": "bright_magenta",
    "pp": "bright_yellow", "dp": "cyan", "bubble": "bright_black", "optimizer": "magenta", "other": "white",
    "host": "green",
}  # fmt: skip
_check = (
    "Check the memory of the first K layouts by a step of Weft's own modules "
    "on tensors without memory."
)
_own = (
    "Calibrate by this file: rows that runs appended, or factors from "
    "bench/planner. Default: runs/measured.csv, if it exists."
)
_hottest = "How often the busiest expert of a layer is chosen, over the mean (weft report shows it)."
_sweep = (
    "Plan the model with each of these values of a field of the section model, such as"
    " experts=64,128; may be repeated. One line per model."
)
_generate = (
    "Predict generation on one device with weights in its host's memory: "
    "number of PROMPTS, TOKENS of each, and NEW tokens for each "
    "(1000x512+128)."
)
_probe = (
    "Run K of the best layouts on this machine for some steps each, and "
    "correct the other times accordingly."
)

_rl = (
    "Show how many ranks should write answers and how many should train, by the times of the run with rewards "
    "whose folder stands in place of MODEL; --gpus: number of ranks."
)
_serve = (
    "Show how many engines serve a load within limits, which of them read prompts, write, or do both, and with which "
    "layout; by --cluster, or by timing a checkpoint here."
)
_shared = (
    "With --serve: tokens with which prompts begin as others do, before the "
    "--prompt-tokens of their own."
)
_cache_memory = (
    "With --serve: GB of a cache engine (weft engine --role cache), with which placements "
    "are tried too."
)
_think = (
    "Show which of several models, with commas between, should reason about a question in so many seconds: in how "
    "many tokens, in how many texts, and with which cache policy; by timing them here, or by --cluster."
)
_guidance = "With --sample: scale of classifier-free guidance; 1: none. Tables are listed with it split over ranks too."
_sample = (
    "Show by which table --gpus devices should sample with the diffusion transformer of the run MODEL in so many "
    "steps: simulated time and bytes, by --cluster or over 1 Gbit/s, and the error, measured here."
)
_task = (
    "With --think: a task with checkable answers, such as addition:digits=3, of which "
    "each model tries some questions."
)


def plan_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_model)],
    cluster: Annotated[
        str | None, typer.Option(metavar="FILE|PRESET", help=_cluster)
    ] = None,
    here: Annotated[bool, typer.Option("--here", help=_here)] = False,
    method: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=_method)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="With --here: number of training tokens.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per step over all devices.")
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per sequence; a recipe has its own."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Number of devices; by default all of the cluster."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precision of products: bf16, fp8, fp4 or fp32; a recipe has its own.",
            show_default="bf16",
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="The class of training program whose constants apply.")
    ] = "weft",
    pin: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE", help=_pin)
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of layouts to show.")] = 5,
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the first layout as a recipe."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a page with times, memory, timeline and reasons.",
        ),
    ] = None,
    check: Annotated[int, typer.Option(min=0, metavar="K", help=_check)] = 0,
    calibration: Annotated[Path | None, typer.Option(metavar="FILE", help=_own)] = None,
    probe: Annotated[int, typer.Option(min=0, metavar="K", help=_probe)] = 0,
    hottest: Annotated[
        float, typer.Option(min=1, metavar="FACTOR", help=_hottest)
    ] = 1.0,
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE,...", help=_sweep)
    ] = None,
    generate: Annotated[
        str | None, typer.Option(metavar="PROMPTSxTOKENS+NEW", help=_generate)
    ] = None,
    rl: Annotated[bool, typer.Option("--rl", help=_rl)] = False,
    serve: Annotated[bool, typer.Option("--serve", help=_serve)] = False,
    ttft: Annotated[
        float,
        typer.Option(min=1e-4, help="With --serve: most seconds to a first token."),
    ] = 0.5,
    tpot: Annotated[
        float,
        typer.Option(min=1e-5, help="With --serve: most seconds per further token."),
    ] = 0.05,
    rate: Annotated[
        float, typer.Option(min=1e-6, help="With --serve: requests per second.")
    ] = 1.0,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --serve: mean tokens of a prompt; with --think: tokens of a question.",
        ),
    ] = 512,
    answer_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --serve: mean tokens of an answer; with --think: most tokens of one.",
        ),
    ] = 128,
    shared_tokens: Annotated[int, typer.Option(min=0, help=_shared)] = 0,
    beginnings: Annotated[
        int,
        typer.Option(
            min=1, help="With --serve: number of different beginnings of prompts."
        ),
    ] = 1,
    cache_memory: Annotated[
        float, typer.Option(min=0, metavar="GB", help=_cache_memory)
    ] = 0.0,
    think: Annotated[str, typer.Option(metavar="SECONDS", help=_think)] = "",
    task: Annotated[str, typer.Option(metavar="NAME[:KEY=VALUE]", help=_task)] = "",
    sample: Annotated[int, typer.Option(min=0, metavar="STEPS", help=_sample)] = 0,
    guidance: Annotated[float, typer.Option(min=0, help=_guidance)] = 1.0,
    as_json: AsJson = False,
) -> int:
    """Rank every layout of MODEL on a cluster by predicted step time, and explain why the first is fastest."""
    from weft.errors import UsageError
    from weft.planner.job import read_job
    from weft.planner.machine import load_cluster
    from weft.planner.planned_model import check_named
    from weft.planner.planned_recipe import layout_tree
    from weft.recipe.shipped import find_recipe

    modes = {
        "--rl": rl, "--serve": serve, "--sample": sample, "--think": think, "--here": here, "--generate": generate,
    }  # fmt: skip
    files = {"--recipe": recipe, "--html": html}
    for option in (name for name, file in files.items() if file is not None):
        if mode := next((name for name, given in modes.items() if given), None):
            raise UsageError(
                f"{option} is of the layouts for training, and {mode} plans something else; leave out one of them"
            )
    if rl:
        from weft.cli.roles_plan import plan_roles

        return plan_roles(model, gpus, top, as_json)
    if serve:
        from weft.cli.serving_plan import ServingQuestion, plan_serving

        asked = ServingQuestion(
            ttft, tpot, rate, prompt_tokens, answer_tokens, shared_tokens, beginnings, cache_memory
        )  # fmt: skip
        return plan_serving(model, cluster, gpus, asked, as_json)
    if sample:
        from weft.cli.sampling_view import plan_sampling

        return plan_sampling(model, sample, cluster, gpus or 2, as_json, guidance)
    if guidance != 1:
        raise UsageError("--guidance is for --sample STEPS; give both, or leave it out")
    if task and not think:
        raise UsageError("--task is for --think SECONDS; give both, or leave it out")
    if think:
        from weft.cli.think_plan import ThinkQuestion, plan_thinking
        from weft.planner.thinking_price import check_budget

        reasoning = ThinkQuestion(
            check_budget(think), task, prompt_tokens, answer_tokens
        )
        return plan_thinking(model, cluster, reasoning, as_json)
    if find_recipe(model) is None:
        check_named(model)
    if here:
        return _plan_here(model, method or [], batch, seq, tokens, as_json)
    if cluster is None:
        raise UsageError(
            "--cluster is missing; or give --here, for what this machine can do"
        )
    if generate is not None:
        return _generating(model, load_cluster(cluster, gpus or 1), generate, as_json)
    # a simulation makes many small objects; looking for circles among them takes a quarter
    gc.set_threshold(200_000)
    for option, file in files.items():
        if file is not None:
            check_writable(file, option)
    job = read_job(
        model, cluster, gpus, batch, seq, precision, engine, pin or [], hottest, _shape_named
    )  # fmt: skip
    if sweep:
        if recipe or html or check or probe or hottest > 1:
            raise UsageError(
                "--sweep compares models; plan the one that you choose for --recipe, --html and the like"
            )
        return _swept(job, sweep, as_json)
    ranked = _ranked(job, gpus, calibration, top)
    tried: list[tuple[Final, Measured]] = []
    if probe:
        ranked, tried = _tried(ranked, job, probe)
    changed = []
    if recipe is not None:
        changed = _write_recipe(ranked.finals[0], job, recipe)
    machines = job.machines
    where = f"{machines.count:,} x {machines.device}"
    if machines.probed:
        where = f"{cluster}, up to {machines.count:,} ranks"
    if html is not None:
        from weft.planner.page import PlanQuestion, write_page

        sentence = f"{ranked.margin[:1].upper()}{ranked.margin[1:]}."
        question = PlanQuestion(
            job.name, where, job.batch, job.seq, job.precision, engine, sentence, ranked.band, machines.probed,
            job.untrainable,
        )  # fmt: skip
        write_page(html, question, ranked.searched, ranked.finals, max(top, 8))
    checks = _checked(ranked.finals[:check], job)
    if as_json:
        print(json.dumps(ranked.record(job, top) | {
            "checks": [vars(done) for done in checks],
            "changed": changed,
            "probes": [{"layout": layout_tree(f), "predicted_s": f.seconds} | vars(ran) for f, ran in tried],
        }))  # fmt: skip
        return 0
    _show(job, where, ranked, top, tried, checks)
    for line in changed:
        plain_console().print(f"changed {line}", markup=False)
    for path, name in ((recipe, "recipe"), (html, "page")):
        if path is not None:
            plain_console().print(f"{name:<7} {path}", markup=False)
    return 0


def _show(
    job: "PlanJob", where: str, ranked: "RankedLayouts", top: int, tried: "list[tuple[Final, Measured]]",
    checks: "list[Checked]",
) -> None:  # fmt: skip
    """Print a table of the first layouts, then the remarks, a line each."""
    from weft.planner.explain import sizes, title

    console = plain_console()
    console.print(
        f"[bold]{job.name}[/] ({sizes(job.shape)}) on {where}, {job.batch:,} x {job.seq:,} tokens per step, "
        f"{job.precision}: {ranked.searched.count:,} layouts, {len(ranked.searched.order):,} fit\n"
    )
    _table(console, ranked.finals[:top])
    lines = ranked.lines(job, top)
    for final, ran in tried:
        off = final.seconds / ran.seconds - 1 if ran.seconds else 0.0
        what = f"{ran.seconds:.3g} s measured, predicted {off:+.0%}; {ran.memory / 2**30:.3g} GiB ({final.gib:.3g})"
        lines.append(f"probe   {title(final)}: {ran.reason or what}")
    lines += [f"check   {rank}: {done}" for rank, done in enumerate(checks, 1)]
    lines += [f"refused {line}" for line in ranked.searched.rejected(3)]
    if unasked := ranked.searched.unasked_line():
        lines.append(f"asked   {unasked}")
    for line in lines:
        console.print(line, markup=False)


def _generating(model: str, cluster: "Cluster", asked: str, as_json: bool) -> int:
    """Print how fast a device of ``cluster`` generates for the workload ``asked``."""
    from weft.planner.explain import sizes
    from weft.planner.generation_price import generating, read_workload
    from weft.planner.planned_model import load_model
    from weft.recipe.shipped import find_recipe

    work = read_workload(asked)
    shape = load_model(str(find_recipe(model) or model), _shape_named).shape
    answer = generating(shape, cluster.machine(), work)
    if as_json:
        print(json.dumps(vars(answer)))
        return 0
    slowest = ", ".join(
        f"{name} {share:.0%}" for name, share in answer.limits.items() if share > 0.005
    )
    say = partial(plain_console().print, markup=False)
    say(
        f"{model} ({sizes(shape)}) on a {cluster.device}, weights, keys and values in its host's memory"
    )
    say(f"{len(work.prompts):,} prompts of {work.prompt:,.0f} tokens, {work.new:,} new ones each: "
        f"{answer.rate:,.4g} new tokens/s, all in {answer.seconds:,.4g} s")  # fmt: skip
    say(
        f"bound   {answer.bound:,.4g} tokens/s, {answer.together:,.4g} sequences under way; the slowest is {slowest}"
    )
    return 0


def _ranked(
    job: "PlanJob", gpus: int | None, calibration: Path | None, top: int
) -> "RankedLayouts":
    """Return the layouts of a job: rehearsed on a probed machine, else compared by the closed forms alone."""
    from weft.observe.measured import FILE
    from weft.planner.job import RankedLayouts, rank_layouts
    from weft.planner.planned_recipe import recipe_tree
    from weft.recipe import RUNS, build_recipe

    if not job.machines.probed:
        return rank_layouts(job, calibration, RUNS / FILE, top)
    from weft.rehearse.interference import shared_words
    from weft.rehearse.local_choice import search_here

    with Console(stderr=True).status("rehearsing") as status:
        searched, finals, compared = search_here(
            lambda final: build_recipe(recipe_tree(final, job.model)), job.shape, job.machines, gpus, job.batch,
            job.seq, job.bits, job.pins, status.update, job.under_rules,
        )  # fmt: skip
    margin = (
        f"calibrated: the best {compared}, timed with what weft probe measured here"
    )
    if words := shared_words(job.machines.calibration.get("windows", ())):
        margin += f"; {words}"
    return RankedLayouts(searched, finals, margin, None)


def _swept(job: "PlanJob", asked: list[str], as_json: bool) -> int:
    """Print the best layout of every model that ``--sweep`` asks for."""
    from weft.planner.job import sweep

    models = list(sweep(job, asked))
    if as_json:
        print(json.dumps({"models": [model.record() for model in models]}))
        return 0
    table = grid(
        ("model", "B", "active", "s/step", "tokens/s", "MFU", "GiB", "layout"),
        ("model", "layout"),
    )
    for model in models:
        table.add_row(*model.cells())
    plain_console(200).print(table)
    return 0


def _plan_here(
    model: str,
    methods: list[str],
    batch: int | None,
    seq: int | None,
    tokens: int | None,
    as_json: bool,
) -> int:
    """Print the time and memory of each method on this machine."""
    import torch

    from weft.errors import UsageError, nearest
    from weft.observe.display import clock
    from weft.rehearse.here import (
        METHODS,
        command,
        estimates,
        local_reasons,
        recommend,
        subject,
    )

    if unknown := [name for name in methods if name not in METHODS]:
        raise UsageError(
            f"--method {unknown[0]!r} is not known; {nearest(unknown[0], METHODS)}"
        )
    recipe, shape = subject(model, batch, seq, tokens)
    steps = recipe.train.steps
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with Console(stderr=True).status("") as status:
        results = estimates(
            recipe, shape, methods or list(METHODS), device, status.update
        )
    chosen = recommend(results)
    line = None if chosen is None else command(model, chosen, recipe)
    if as_json:
        print(json.dumps({"methods": [vars(e) | {"fits": e.fits} for e in results], "command": line,
                          "recommended": chosen and chosen.method, "why": local_reasons(results, chosen)}))  # fmt: skip
        return 0
    console = plain_console(140)
    where = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    console.print(
        f"[bold]{model}[/] on {where}, {results[0].available / 2**30:.1f} GiB free: {steps:,} steps of "
        f"{recipe.train.batch} x {recipe.data.seq_len} tokens\n"
    )
    parts = ("weights", "gradients", "optimizer", "copies", "activations", "runtime")
    heads = (
        "",
        "method",
        "micro batch",
        "recompute",
        *parts,
        "GiB",
        "fits",
        "s/step",
        "all steps",
    )
    table = grid(heads, ("", "method", "recompute"))
    for e in results:
        name = f"{e.method}, files" if e.places else e.method
        sizes = [
            f"{e.memory[part] / 2**30:.2f}" if e.memory.get(part) else "-"
            for part in parts
        ]
        table.add_row(
            "*" if e is chosen else "", name, str(e.micro_batch), e.recompute, *sizes, f"{e.total / 2**30:.2f}",
            "yes" if e.fits else "no", f"{e.seconds:.3g}", clock(e.seconds * steps),
        )  # fmt: skip
    console.print(table)
    console.print()
    for reason in local_reasons(results, chosen):
        console.print(f"why   {reason}", markup=False)
    console.print(
        f"run   {line or 'nothing fits: a smaller model, --batch or --seq'}",
        markup=False,
    )
    return 0


def _tried(
    ranked: "RankedLayouts", job: "PlanJob", count: int
) -> "tuple[RankedLayouts, list[tuple[Final, Measured]]]":
    """Run ``count`` layouts here; return the layouts in their new order, and the measured trials."""
    import torch

    from weft.rehearse.trial import run_trials

    ranks = torch.cuda.device_count() or 4 * (os.cpu_count() or 1)
    with Console(stderr=True).status("") as status:
        finals, tried = run_trials(
            ranked.finals, job.model, count, ranks, status.update
        )
    margin = f"{ranked.margin}; {len(tried)} were run here, and the others moved as these were off"
    return replace(ranked, finals=finals, margin=margin), tried


def _checked(finals: "list[Final]", job: "PlanJob") -> "list[Checked]":
    if not finals:
        return []
    from weft.rehearse.peak import check

    return [check(final, job.model) for final in finals]


def _table(console: Console, finals: "list[Final]") -> None:
    """Print rank, layout and figures; with colour, also a bar of where the time goes."""
    from weft.planner.explain import PARTS, title

    bars = console.color_system is not None and console.width >= 140
    table = grid(
        ("", "layout", "s/step", "tokens/s", "MFU", "GiB", "free", *["time"] * bars),
        ("layout", "time"),
    )
    longest = max(final.seconds for final in finals)
    for rank, final in enumerate(finals, 1):
        limit = float(final.machine.memory) / 2**30
        cells: list[str | Text] = [f"{final.seconds:.3g}", f"{final.tokens_per_s:,.0f}"]
        cells += [
            f"{final.utilisation:.1%}",
            f"{final.gib:.3g}",
            f"{limit - final.gib:.3g}",
        ]
        if bars:
            cells.append(
                _bar(
                    {name: float(getattr(final.cost, name)) for name in PARTS},
                    40 / longest,
                )
            )
        table.add_row(str(rank), title(final), *cells)
    console.width = max(console.width, 60 + max(len(title(final)) for final in finals))
    console.print(table)
    first = finals[0]
    parts = {name: float(getattr(first.cost, name)) / first.seconds for name in PARTS}
    split = Text("\ntime    ")
    for name, share in parts.items():
        if share >= 0.005:
            split.append("██ " if bars else "", style=_COLOURS[name]).append(
                f"{PARTS[name]} {share:.0%}   "
            )
    console.print(split)


def _bar(parts: dict[str, float], scale: float) -> Text:
    bar, done, shown = Text(), 0.0, 0
    for name, seconds in parts.items():
        done += seconds * scale
        bar.append("█" * (round(done) - shown), style=_COLOURS[name])
        shown = max(shown, round(done))
    return bar


def _write_recipe(final: "Final", job: "PlanJob", path: Path) -> list[str]:
    """Write the layout as a recipe for ``weft train``; return a line for each setting that is not the user's own."""
    from weft.pages import write
    from weft.planner.planned_recipe import changed_lines, recipe_tree
    from weft.recipe import build_recipe
    from weft.recipe.toml import write_toml

    tree = recipe_tree(final, job.model)
    build_recipe(tree, str(path))
    comment = f"# Planned by: weft plan {job.name}. Your own data goes into [data].\n\n"
    write(path, comment + write_toml(tree), "--recipe")
    return changed_lines(job.model, tree)


def _shape_named(name: str) -> "ModelShape":
    """Return the shape of a model that only PyTorch can read; plans of other models need no PyTorch."""
    from weft.checkpoint.weights import shape_named

    return shape_named(name)
