"""``weft plan``: the best layouts of a model on a cluster."""

import gc
import json
import math
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from weft.cli.arguments import AsJson
from weft.cli.console import grid, plain_console
from weft.pages import check_writable

if TYPE_CHECKING:
    from weft.planner.engine import EngineConstants
    from weft.planner.finalists import Final
    from weft.planner.machine import Cluster
    from weft.planner.own import Own
    from weft.planner.planned_model import PlannedModel
    from weft.planner.search import Pin
    from weft.recipe import ModelShape
    from weft.rehearse.peak import Checked
    from weft.rehearse.trial import Measured
    from weft.shapes.shape import Shape


_model = "A built-in shape (llama3-8b), a Weft recipe, or what model.from can name: a folder, a GGUF file, a hub id."
_here = "What fits this machine by each way of training, how long it takes and why, from a block that is really run."
_method = "With --here: one of full, lora, qlora, galore and zo; may be repeated. All if left out."
_cluster = "A cluster file, or a preset with --gpus: a100, h100, h200, b200, gb200, mi300x, cpu."
_pin = "A demand such as tp=8, 'tp<=8', pp=4 or recompute=full; may be repeated."
#: Percent; the 90th percentile of the presets' error, sources counted alike (docs/planner.md).
_BAND = 12
#: Layouts that are looked at closely.
FINALISTS = 10
_COLOURS = {
    "compute": "blue", "recompute": "bright_blue", "tp": "red", "cp": "yellow", "ep": "bright_magenta",
    "pp": "bright_yellow", "dp": "cyan", "bubble": "bright_black", "optimizer": "magenta", "other": "white",
    "host": "green",
}  # fmt: skip
#: Devices with published runs among those.
_MEASURED = ("A100", "H100", "B200", "GB200")
_check = "Run a step of our own modules on tensors without memory for the first K: what they hold."
_own = "Rows that runs appended, or factors from bench/planner; runs/measured.csv if it is there."
_hottest = "How often the busiest expert of a layer is chosen, over the mean (weft report shows it)."
_sweep = "Fields of \\[model] to try all values of, such as experts=64,128; may be repeated. One line per model."
_generate = "One device writes, weights come from its host: PROMPTS of TOKENS, and NEW ones for each (1000x512+128)."
_probe = "Really run K of the best on this machine for some steps each; the others' times are moved accordingly."


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_model)],
    cluster: Annotated[
        str | None, typer.Option(metavar="FILE|PRESET", help=_cluster)
    ] = None,
    here: Annotated[bool, typer.Option("--here", help=_here)] = False,
    method: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=_method)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="With --here: tokens to learn from.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per step over all devices.")
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per sequence; of a recipe: its own."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Devices; else the cluster's count.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="bf16, fp8, fp4 or fp32 products; of a recipe: its own.",
            show_default="bf16",
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="The class of program whose constants count.")
    ] = "weft",
    pin: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE", help=_pin)
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 5,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the first as a recipe.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a page: times, memory, timeline, why."
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
    as_json: AsJson = False,
) -> int:
    """Rank every layout of MODEL on a cluster by predicted step time, and say why the first is first."""
    from weft.errors import UsageError, nearest
    from weft.planner import search as searching
    from weft.planner.engine import ENGINES
    from weft.planner.explain import (
        exchanges,
        layout_tree,
        recipe_tree,
        record,
        title,
        untrainable,
    )
    from weft.planner.finalists import finalists
    from weft.planner.island_price import islands_of
    from weft.planner.machine import load_cluster
    from weft.planner.planned_model import SHAPES, check_named, load_model
    from weft.recipe import build_recipe, load_recipe
    from weft.recipe.shipped import find_recipe

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
    bits = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "fp4": 4}
    if engine not in ENGINES:
        raise UsageError(
            f"--engine {engine!r} is not known; {nearest(engine, ENGINES)}"
        )
    for option, file in (("--recipe", recipe), ("--html", html)):
        if file is not None:
            check_writable(file, option)
    if model not in SHAPES:
        model = str(find_recipe(model) or model)
    if Path(model).suffix == ".toml":
        own = load_recipe(model)
        batch, seq = batch or own.train.batch, seq or own.data.seq_len
        precision = precision or {"bfloat16": "bf16"}.get(own.train.dtype, "fp32")
    precision = precision or "bf16"
    if precision not in bits:
        raise UsageError(
            f"--precision {precision!r} is not possible; {nearest(precision, bits)}"
        )
    if batch is None or seq is None:
        missing = (
            "--batch (sequences per step)"
            if batch is None
            else "--seq (tokens per sequence)"
        )
        raise UsageError(f"{missing} is missing; only a recipe has its own")
    subject = load_model(model, _shape_named)
    demanded = [
        *(pin or []),
        *["pp>=2"] * bool(subject.recipe.get("optimizer", {}).get("post_validation")),
    ]
    pins = [searching.Pin.parse(text) for text in demanded]
    machines = load_cluster(cluster, gpus)
    missing = untrainable(subject, bits[precision])
    shape = replace(subject.shape, hottest=hottest)
    if (
        not 1
        <= hottest
        <= (most := max(1.0, float(shape.experts / max(shape.top_k, 1))))
    ):
        raise UsageError(f"--hottest {hottest:g} is not possible: an expert of {float(shape.experts):g}, {shape.top_k} "
                         f"per token, is chosen at most {most:g} times as often as the mean")  # fmt: skip
    if sweep:
        if recipe or html or check or probe or hottest > 1:
            raise UsageError(
                "--sweep compares models; plan the one that you choose for --recipe, --html and the like"
            )
        return _swept(
            subject,
            sweep,
            machines,
            ENGINES[engine],
            (batch, seq, bits[precision]),
            pins,
            as_json,
        )
    probed, band = machines.probed, None
    if probed:
        from weft.rehearse.choose import search_here

        with Console(stderr=True).status("rehearsing") as status:
            found, finals, compared = search_here(
                lambda final: build_recipe(recipe_tree(final, subject)), shape, machines, gpus, batch, seq,
                bits[precision], pins, status.update,
            )  # fmt: skip
        error = (
            f"calibrated: the best {compared}, timed with what weft probe measured here"
        )
    else:
        runs = _own_runs(calibration, machines.device, engine)
        constants = runs.engine if runs else ENGINES[engine]
        found = searching.search(
            shape, machines, constants, batch, seq, bits[precision], pins
        )
        finals = finalists(found, max(top, FINALISTS), vocabulary=engine == "weft")
        band = _BAND if machines.device.upper().startswith(_MEASURED) else None
        if finals[0].plan.moves:
            error, band = (
                "what travels to and from host or files was compared with no run: take the order",
                None,
            )
        elif runs is not None:
            error, band = (
                runs.message,
                round(runs.error) if math.isfinite(runs.error) else band,
            )
        elif band is not None:
            error = f"presets, not calibrated: times within {band} % for nine published runs in ten"
        else:
            error = f"no published run on {machines.device} has been compared: take the order, not the times"
    tried: list[tuple[Final, Measured]] = []
    if probe:
        finals, tried = _tried(finals, subject, probe)
        error += f"; {len(tried)} were run here, and the others moved as these were off"
    if recipe is not None:
        _write_recipe(finals[0], model, subject, recipe)
    where = (
        f"{cluster}, up to {machines.count:,} ranks"
        if probed
        else f"{machines.count:,} x {machines.device}"
    )
    if html is not None:
        from weft.planner.page import PlanQuestion, write_page

        sentence = error[:1].upper() + error[1:] + "."
        question = PlanQuestion(
            model, where, batch, seq, precision, engine, sentence, band, probed, missing
        )
        write_page(html, question, found, finals, max(top, 8))
    checks = _checked(finals[:check], subject)
    islands = (
        None
        if probed
        else islands_of(shape, machines, constants, batch, seq, bits[precision], pins)
    )
    exchanged = exchanges(found, finals[0])
    if as_json:
        refused = [vars(rule) for rule in found.refused]
        probes = [
            {"layout": layout_tree(f), "predicted_s": f.seconds} | vars(ran)
            for f, ran in tried
        ]
        print(json.dumps({"candidates": found.count, "fitting": len(found.order), "finalists": len(finals),
                          "calibration": error, "layouts": [record(final) for final in finals[:top]],
                          "rejected": [str(line) for line in found.rejected(top)], "refused": refused,
                          "checks": [vars(done) for done in checks], "probes": probes,
                          "islands": islands.record() if islands else None,
                          "experts": exchanged or None, "not_trainable": missing or None}))  # fmt: skip
        return 0
    console = plain_console()
    console.print(
        f"[bold]{model}[/] ({_sizes(shape)}) on {where}, {batch:,} x {seq:,} "
        f"tokens per step, {precision}: {found.count:,} layouts, {len(found.order):,} fit\n"
    )
    _table(console, finals[:top])
    say = partial(console.print, markup=False)
    from weft.planner.explain import verdict

    for rank, final in enumerate(finals[1:top], 2):
        say(f"{rank:<7} {verdict(finals[0], final)}")
    for final in finals[:1]:
        if abs(final.seconds / final.closed - 1) > 0.02:
            say(
                f"        1 is simulated: {final.seconds / final.closed - 1:+.1%} against the closed form"
            )
    memory = {
        f: float(getattr(finals[0].memory, f)) / 2**30
        for f in finals[0].memory.__dataclass_fields__
    }
    say(
        "\nmemory  "
        + ", ".join(f"{k} {v:.2g}" for k, v in memory.items() if v > 0.005)
        + " GiB on the fullest rank of 1"
    )
    if exchanged:
        say(f"experts {_exchanges(exchanged)}")
    for words in islands.lines(finals[0].seconds) if islands else ():
        say(f"islands {words}")
    say(f"margin  {error}")
    if missing:
        say(f"train   not trainable yet: {missing}")
    for final, ran in tried:
        off = final.seconds / ran.seconds - 1 if ran.seconds else 0.0
        what = f"{ran.seconds:.3g} s measured, predicted {off:+.0%}; {ran.memory / 2**30:.3g} GiB ({final.gib:.3g})"
        say(f"probe   {title(final)}: {ran.reason or what}")
    for rank, done in enumerate(checks, 1):
        say(f"check   {rank}: {done}")
    for line in found.rejected(3):
        say(f"refused {line}")
    for path, name in ((recipe, "recipe"), (html, "page")):
        if path is not None:
            say(f"{name:<7} {path}")
    return 0


def _generating(model: str, cluster: "Cluster", asked: str, as_json: bool) -> int:
    """Print how fast a device of ``cluster`` writes what is asked for."""
    import numpy as np

    from weft.errors import UsageError
    from weft.planner.generation_price import Workload, generating
    from weft.planner.planned_model import load_model
    from weft.recipe.shipped import find_recipe

    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)\+([1-9]\d*)", asked)
    if found is None:
        raise UsageError(
            f"--generate {asked!r} is not of the form PROMPTSxTOKENS+NEW, such as 1000x512+128"
        )
    prompts, prompt, new = map(int, found.groups())
    shape = load_model(str(find_recipe(model) or model), _shape_named).shape
    answer = generating(
        shape, cluster.machine(), Workload(np.full(prompts, prompt), new)
    )
    if as_json:
        print(json.dumps(vars(answer)))
        return 0
    slowest = ", ".join(
        f"{name} {share:.0%}" for name, share in answer.limits.items() if share > 0.005
    )
    say = partial(plain_console().print, markup=False)
    say(
        f"{model} ({_sizes(shape)}) on a {cluster.device}, weights, keys and values in its host's memory"
    )
    say(f"{prompts:,} prompts of {prompt:,} tokens, {new:,} new ones each: {answer.rate:,.4g} new tokens/s, all in "
        f"{answer.seconds:,.4g} s")  # fmt: skip
    say(
        f"bound   {answer.bound:,.4g} tokens/s, {answer.together:,.4g} sequences under way; the slowest is {slowest}"
    )
    return 0


def _sizes(shape: "Shape") -> str:
    """Parameters in words, and what generation keeps of a token."""
    active = (
        f", {float(shape.active_parameters) / 1e9:.3g} B active"
        if shape.experts
        else ""
    )
    cached = f"{float(shape.cache_bytes) / 1024:,.3g} KiB per token cached"
    return f"{float(shape.parameters) / 1e9:.3g} B parameters{active}, {cached}"


def _exchanges(told: dict[str, Any]) -> str:
    """What experts of the first layout exchange, in words."""
    sent = ", ".join(
        f"{size / 2**20:,.3g} by {way}" for way, size in told["sent"].items()
    )
    text = f"1 sends {sent} MiB each way of a microbatch and layer; dispatch = {told['dispatch']}"
    text += f"; busiest rank {told['load']:.2f}x the mean"
    if (told["save"] or 0) > 0.005:
        how = (
            "overlap = 'passes'" if told["beside"] == "other pass" else "not run so yet"
        )
        text += f"; beside the {told['beside']} of another microbatch a step takes -{told['save']:.0%} ({how})"
    return text


def _swept(
    subject: "PlannedModel", asked: list[str], machines: "Cluster", engine: "EngineConstants",
    job: tuple[int, int, int], pins: "list[Pin]", as_json: bool,
) -> int:  # fmt: skip
    """Print the best layout of every model that ``--sweep`` asks for."""
    from weft.errors import UsageError
    from weft.planner.explain import record, title
    from weft.planner.finalists import finalists
    from weft.planner.planned_model import swept
    from weft.planner.search import search

    if subject.untrainable:
        raise UsageError(
            "--sweep needs a model that Weft can train: a recipe, a config.json or a trained built-in"
        )
    rows: list[dict[str, Any]] = []
    table = grid(
        ("model", "B", "active", "s/step", "tokens/s", "MFU", "GiB", "layout"),
        ("model", "layout"),
    )
    for fields, shape in swept(subject.section, asked, subject.vocab):
        words = " ".join(f"{name}={value}" for name, value in fields.items())
        sizes = [
            f"{float(n) / 1e9:.3g}" for n in (shape.parameters, shape.active_parameters)
        ]
        try:
            best = finalists(search(shape, machines, engine, *job, pins), 3)[0]
        except UsageError as error:
            rows.append({"model": fields, "refused": str(error)})
            table.add_row(
                words, *sizes, "-", "-", "-", "-", str(error).partition(":")[0]
            )
            continue
        rows.append({"model": fields, "parameters": float(shape.parameters), "active": float(shape.active_parameters),
                     **record(best)})  # fmt: skip
        table.add_row(words, *sizes, f"{best.seconds:.3g}", f"{best.tokens_per_s:,.0f}", f"{best.utilisation:.1%}",
                      f"{best.gib:.3g}", title(best))  # fmt: skip
    if as_json:
        print(json.dumps({"models": rows}))
        return 0
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
    """Print what each method takes on this machine."""
    import torch

    from weft.errors import UsageError, nearest
    from weft.observe.display import clock
    from weft.rehearse.here import (
        METHODS,
        command,
        estimates,
        reasons,
        recommend,
        subject,
    )

    if unknown := [name for name in methods if name not in METHODS]:
        raise UsageError(
            f"--method {unknown[0]!r} is not known; {nearest(unknown[0], METHODS)}"
        )
    recipe, shape = subject(model, batch, seq)
    step = recipe.train.batch * recipe.data.seq_len
    if not (tokens or recipe.train.steps):
        raise UsageError(f"{model} trains for data.epochs = {recipe.data.epochs}, and how many steps these are is not "
                         "planned; say --tokens")  # fmt: skip
    steps = -(-tokens // step) if tokens else recipe.train.steps
    recipe = recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"steps": steps})}
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with Console(stderr=True).status("") as status:
        found = estimates(
            recipe, shape, methods or list(METHODS), device, status.update
        )
    chosen = recommend(found)
    line = None if chosen is None else command(model, chosen, recipe)
    if as_json:
        print(json.dumps({"methods": [vars(e) | {"fits": e.fits} for e in found], "command": line,
                          "recommended": chosen and chosen.method, "why": reasons(found, chosen)}))  # fmt: skip
        return 0
    console = plain_console(140)
    where = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    console.print(
        f"[bold]{model}[/] on {where}, {found[0].available / 2**30:.1f} GiB free: {steps:,} steps of "
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
    for e in found:
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
    for reason in reasons(found, chosen):
        console.print(f"why   {reason}", markup=False)
    console.print(
        f"run   {line or 'nothing fits: a smaller model, --batch or --seq'}",
        markup=False,
    )
    return 0


def _own_runs(path: Path | None, device: str, engine: str) -> "Own | None":
    """What calibrates a plan for ``device``: the file that is given, or the runs of this folder."""
    from weft.observe.measured import FILE
    from weft.planner.engine import ENGINES
    from weft.planner.machine import find_device
    from weft.planner.own import calibrated, own_runs
    from weft.recipe import RUNS

    name = find_device(device).name
    if path is not None:
        return calibrated(path, name, ENGINES[engine])
    return own_runs(RUNS / FILE, name) if engine == "weft" else None


def _tried(
    finals: "list[Final]", model: "PlannedModel", count: int
) -> "tuple[list[Final], list[tuple[Final, Measured]]]":
    import torch

    from weft.rehearse.trial import run_trials

    with Console(stderr=True).status("") as status:
        return run_trials(
            finals,
            model,
            count,
            torch.cuda.device_count() or 4 * (os.cpu_count() or 1),
            status.update,
        )


def _checked(finals: "list[Final]", model: "PlannedModel") -> "list[Checked]":
    if not finals:
        return []
    from weft.rehearse.peak import check

    return [check(final, model) for final in finals]


def _table(console: Console, finals: "list[Final]") -> None:
    """Rank, layout, figures; with colour, a bar of where the time goes."""
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


def _write_recipe(final: "Final", name: str, model: "PlannedModel", path: Path) -> None:
    """The layout as a recipe that ``weft train`` takes."""
    from weft.errors import UsageError
    from weft.planner.explain import recipe_tree
    from weft.recipe import build_recipe
    from weft.recipe.toml import write_toml

    tree = recipe_tree(final, model)
    build_recipe(tree, str(path))
    try:
        path.write_text(
            f"# Planned by: weft plan {name}. Your own data goes into [data].\n\n{write_toml(tree)}"
        )
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _shape_named(name: str) -> "ModelShape":
    """The shape of a model that only PyTorch can read; other plans do without."""
    from weft.checkpoint.weights import shape_named

    return shape_named(name)
