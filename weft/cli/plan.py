"""``weft plan``: the best layouts of a model on a cluster, and the planner against measured rows."""

import gc
import json
import math
import os
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text
from typer.core import TyperGroup

if TYPE_CHECKING:
    from weft.cli.trial import Measured
    from weft.planner.finalists import Final
    from weft.planner.own import Own
    from weft.planner.shape import Model


class _Group(TyperGroup):
    """``weft plan MODEL`` beside ``weft plan evaluate``: a word that is no command is a model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["search", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Group,
    help="weft plan MODEL ranks every layout for a model and a cluster; the commands check the predictions.",
    no_args_is_help=True,
)
Rows = Annotated[Path, typer.Argument(metavar="ROWS.csv", help="Measured rows with the header of measured.csv.")]
_model = "A built-in shape (llama3-8b), a Weft recipe, or a Hugging Face config.json."
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
_own = "Rows that runs appended, or factors from weft plan calibrate; runs/measured.csv if it is there."
_probe = "Really run K of the best on this machine for some steps each; the others' times are moved accordingly."
_calibration = typer.Option(metavar="FILE", help="Factors from weft plan calibrate; presets without it.")


@app.command()
def search(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_model)],
    cluster: Annotated[str, typer.Option(metavar="FILE|PRESET", help=_cluster)],
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences per step over all devices.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence; of a recipe: its own.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Devices; else the cluster's count.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp8, fp4 or fp32 products; of a recipe: its own.", show_default="bf16")
    ] = None,
    engine: Annotated[str, typer.Option(help="The class of program whose constants count.")] = "weft",
    pin: Annotated[list[str] | None, typer.Option(metavar="FIELD=VALUE", help=_pin)] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 5,
    recipe: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the first as a recipe.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page: times, memory, timeline, why.")
    ] = None,
    check: Annotated[int, typer.Option(min=0, metavar="K", help=_check)] = 0,
    calibration: Annotated[Path | None, typer.Option(metavar="FILE", help=_own)] = None,
    probe: Annotated[int, typer.Option(min=0, metavar="K", help=_probe)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Rank every layout of MODEL on a cluster by predicted step time (this is what ``weft plan MODEL`` does)."""
    from weft.errors import UsageError, nearest
    from weft.planner import search as searching
    from weft.planner.engine import ENGINES
    from weft.planner.explain import layout_tree, recipe_tree, record, title, untrainable
    from weft.planner.finalists import finalists
    from weft.planner.machine import load_cluster
    from weft.planner.shape import SHAPES, load_model
    from weft.recipe import build_recipe, load_recipe
    from weft.shipped import find_recipe

    gc.set_threshold(200_000)  # a simulation makes many small objects; looking for circles among them takes a quarter
    bits = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "fp4": 4}
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine!r} is not known; {nearest(engine, ENGINES)}")
    if model not in SHAPES:
        model = str(find_recipe(model) or model)
    if Path(model).suffix == ".toml":
        own = load_recipe(model)
        batch, seq = batch or own.train.batch, seq or own.data.seq_len
        precision = precision or {"bfloat16": "bf16"}.get(own.train.dtype, "fp32")
    precision = precision or "bf16"
    if precision not in bits:
        raise UsageError(f"--precision {precision!r} is not possible; {nearest(precision, bits)}")
    if batch is None or seq is None:
        raise UsageError(f"--{'batch' if batch is None else 'seq'} is missing; only a recipe says it by itself")
    subject = load_model(model)
    demanded = [*(pin or []), *["pp>=2"] * bool(subject.recipe.get("optimizer", {}).get("post_validation"))]
    pins = [searching.Pin.parse(text) for text in demanded]
    machines = load_cluster(cluster, gpus)
    missing = untrainable(subject, bits[precision])
    shape = subject.shape
    here, band = machines.probed, None
    if here:
        from weft.cli.at_hand import search_here

        with Console(stderr=True).status("rehearsing") as status:
            found, finals, compared = search_here(
                lambda final: build_recipe(recipe_tree(final, subject)), shape, machines, gpus, batch, seq,
                bits[precision], pins, status.update,
            )  # fmt: skip
        error = f"calibrated: the best {compared}, timed with what weft probe measured here"
    else:
        runs = _own_runs(calibration, machines.device, bits[precision], engine)
        constants = runs.engine if runs else ENGINES[engine]
        found = searching.search(shape, machines, constants, batch, seq, bits[precision], pins)
        finals = finalists(found, max(top, FINALISTS), vocabulary=engine == "weft")
        band = _BAND if machines.device.upper().startswith(_MEASURED) else None
        if runs is not None:
            error, band = runs.told, round(runs.error) if math.isfinite(runs.error) else band
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
    where = f"{cluster}, up to {machines.count:,} ranks" if here else f"{machines.count:,} x {machines.device}"
    if html is not None:
        from weft.planner.page import Question, write_page

        told = Question(model, where, batch, seq, precision, engine, error[:1].upper() + error[1:] + ".", band, here,
                        missing)  # fmt: skip
        write_page(html, told, found, finals, max(top, 8))
    checks = [_rehearsed(final, subject) for final in finals[:check]]
    if as_json:
        refused = [vars(rule) for rule in found.refused]
        probes = [{"layout": layout_tree(f), "predicted_s": f.seconds} | vars(ran) for f, ran in tried]
        print(json.dumps({"candidates": found.count, "fitting": len(found.order), "finalists": len(finals),
                          "calibration": error, "layouts": [record(final) for final in finals[:top]],
                          "rejected": [str(line) for line in found.rejected(top)], "refused": refused,
                          "checks": [vars(done) for done in checks], "probes": probes,
                          "not_trainable": missing or None}))  # fmt: skip
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{model}[/] ({float(found.shape.parameters) / 1e9:.3g} B parameters) on {where}, {batch:,} x {seq:,} "
        f"tokens per step, {precision}: {found.count:,} layouts, {len(found.order):,} fit\n"
    )
    _table(console, finals[:top])
    say = partial(console.print, markup=False)
    from weft.planner.explain import verdict

    for rank, final in enumerate(finals[1:top], 2):
        say(f"{rank:<7} {verdict(finals[0], final)}")
    for final in finals[:1]:
        if abs(final.seconds / final.closed - 1) > 0.02:
            say(f"        1 is simulated: {final.seconds / final.closed - 1:+.1%} against the closed form")
    memory = {f: float(getattr(finals[0].memory, f)) / 2**30 for f in finals[0].memory.__dataclass_fields__}
    say(
        "\nmemory  "
        + ", ".join(f"{k} {v:.2g}" for k, v in memory.items() if v > 0.005)
        + " GiB on the fullest rank of 1"
    )
    say(f"error   {error}")
    if missing:
        say(f"train   not trainable yet: {missing}")
    for final, ran in tried:
        off = final.seconds / ran.seconds - 1 if ran.seconds else 0.0
        what = f"{ran.seconds:.3g} s measured, predicted {off:+.0%}; {ran.memory / 2**30:.3g} GiB ({final.gib:.3g})"
        say(f"probe   {title(final)}: {ran.reason or what}")
    for rank, done in enumerate(checks, 1):
        say(f"check   {rank}: {done}")
    for line in found.rejected(3):
        say(f"out     {line}")
    for path, name in ((recipe, "recipe"), (html, "page")):
        if path is not None:
            say(f"{name:<7} {path}")
    return 0


def _own_runs(path: Path | None, device: str, bits: int, engine: str) -> "Own | None":
    """What calibrates a plan for ``device``: the file that is given, or the runs of this folder."""
    from weft.planner.engine import ENGINES
    from weft.planner.machine import find_device
    from weft.planner.own import FILE, calibrated, own_runs
    from weft.recipe import RUNS

    name = find_device(device).name
    if path is not None:
        return calibrated(path, name, bits, ENGINES[engine])
    return own_runs(RUNS / FILE, name, bits) if engine == "weft" else None


def _tried(finals: "list[Final]", model: "Model", count: int) -> "tuple[list[Final], list[tuple[Final, Measured]]]":
    """Some of ``finals`` run for real: all by time, with what that told; and every trial, with what was predicted.

    The best of every number of ranks are tried first; if another comes first by what they told, it is tried as well.
    """
    import tempfile

    import torch

    from weft.cli.trial import Measured, trial
    from weft.errors import UsageError, WeftError
    from weft.planner.at_hand import anchored, to_try
    from weft.planner.explain import recipe_tree, title, toml

    gpus = torch.cuda.device_count()
    here = gpus or 4 * (os.cpu_count() or 1)
    if large := next((f for f in to_try(finals, count) if f.plan.world > here), None):
        raise UsageError(
            f"--probe runs layouts on this machine, which has {gpus or os.cpu_count()} {'GPUs' if gpus else 'cores'}; "
            f"{title(large)} has {large.plan.world:.0f} ranks: leave it out, or give --gpus {gpus or os.cpu_count()}"
        )
    found: list[tuple[Final, Measured]] = []
    waiting, ranked = to_try(finals, count), list(finals)
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("") as status:
        while waiting:
            final = waiting.pop(0)
            status.update(f"running {title(final)} ({len(found) + 1} of {len(found) + 1 + len(waiting)})")
            path = Path(folder) / f"{len(found)}.toml"
            path.write_text(toml(recipe_tree(final, model)))
            found.append((final, trial(path, int(final.plan.world))))
            failed = [f for f, done in found if not done.seconds]
            kept = [f for f in finals if all(f is not x for x in failed)]
            ranked = anchored(kept, [(f, done.seconds) for f, done in found if done.seconds])
            if not waiting and ranked and len(found) < 2 * count:  # what comes first now is to have run, too
                first = next((f for f in kept if f.plan == ranked[0].plan and f.order == ranked[0].order), None)
                waiting = [first] if first is not None and all(first is not f for f, _ in found) else []
    if not ranked:
        raise WeftError(f"none of the {len(found)} layouts that were tried ran: {found[0][1].reason}")
    return ranked, found


#: Ranks in a fake process group: beyond, making the groups takes longer than anybody waits.
REHEARSED = 512


@dataclass(frozen=True)
class Checked:
    """GiB that our modules hold at most, on pipeline position ``rank``, and what was predicted of it; or why not."""

    rank: int = 0
    gib: float = 0.0
    predicted_gib: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"cannot be rehearsed: {self.reason}"
        off = self.predicted_gib / self.gib - 1
        return (
            f"a step of our own modules holds {self.gib:.3g} GiB at most (pipeline rank {self.rank}); predicted "
            f"{self.predicted_gib:.3g} without context and fragmentation, {off:+.0%}"
        )


def _rehearsed(final: "Final", model: "Model") -> Checked:
    """The peak of the first, second and last pipeline rank."""
    from weft.errors import WeftError
    from weft.planner.explain import recipe_tree
    from weft.recipe import build_recipe

    try:
        recipe = build_recipe(recipe_tree(final, model))
        world = recipe.layout.world // recipe.layout.dp * min(2, recipe.layout.dp)
        if world > REHEARSED:
            return Checked(reason=f"{world:,} ranks; {REHEARSED} at most")
        if final.barriers:
            return Checked(reason="vocabulary passes send sizes along, which tensors without memory do not have")
        from weft.train.fit import peak_of, pipeline_ranks
        from weft.train.setup import model_shape

        shape = model_shape(recipe).model_copy(update={"vocab": int(final.shape.vocab)})
        ranks = pipeline_ranks(recipe.layout)
        done = []
        for place in sorted({0, min(1, len(ranks) - 1), len(ranks) - 1}):
            memory = final.ranks[place]
            predicted = float(memory.total - memory.constant) / 2**30
            done.append(Checked(place, peak_of(recipe, shape, ranks[place]).peak / 2**30, predicted))
        return max(done, key=lambda checked: checked.gib)
    except WeftError as error:
        return Checked(reason=str(error))


def _table(console: Console, finals: "list[Final]") -> None:
    """Rank, layout, figures; with colour, a bar of where the time goes."""
    from weft.planner.explain import PARTS, title

    grid = Grid(header_style="bold", box=None, padding=(0, 2, 0, 0))
    bars = console.color_system is not None and console.width >= 140
    heads = ("", "layout", "s/step", "tokens/s", "MFU", "GiB", "free", *["time"] * bars)
    for head in heads:
        grid.add_column(head, justify="left" if head in ("layout", "time") else "right", no_wrap=True)
    longest = max(final.seconds for final in finals)
    for rank, final in enumerate(finals, 1):
        limit = float(final.machine.memory) / 2**30
        cells: list[str | Text] = [f"{final.seconds:.3g}", f"{final.tokens_per_s:,.0f}"]
        cells += [f"{final.utilisation:.1%}", f"{final.gib:.3g}", f"{limit - final.gib:.3g}"]
        if bars:
            cells.append(_bar({name: float(getattr(final.cost, name)) for name in PARTS}, 40 / longest))
        grid.add_row(str(rank), title(final), *cells)
    console.width = max(console.width, 60 + max(len(title(final)) for final in finals))
    console.print(grid)
    first = finals[0]
    parts = {name: float(getattr(first.cost, name)) / first.seconds for name in PARTS}
    split = Text("\ntime    ")
    for name, share in parts.items():
        if share >= 0.005:
            split.append("██ " if bars else "", style=_COLOURS[name]).append(f"{PARTS[name]} {share:.0%}   ")
    console.print(split)


def _bar(parts: dict[str, float], scale: float) -> Text:
    bar, done, shown = Text(), 0.0, 0
    for name, seconds in parts.items():
        done += seconds * scale
        bar.append("█" * (round(done) - shown), style=_COLOURS[name])
        shown = max(shown, round(done))
    return bar


@app.command()
def evaluate(
    rows: Rows,
    calibration: Annotated[Path | None, _calibration] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Predict every row of a file and show the error per source, beside a constant utilisation."""
    from weft.planner import calibrate as fitting
    from weft.planner.evaluate import fits, memory_scores, scores
    from weft.planner.rows import read_rows

    known, refused = read_rows(rows)
    factors = fitting.load(calibration) if calibration else None
    seconds, gib = fitting.apply(factors, known)
    fit = fits(known, gib)
    table = scores(known, factors)
    if as_json:
        record = {
            "calibration": str(calibration) if calibration else "presets",
            "rows": [
                {
                    "id": row.id,
                    "source": row.source,
                    "measured_s": row.seconds,
                    "predicted_s": float(seconds[i]),
                    "measured_gib": row.gib,
                    "predicted_gib": float(gib[i]),
                    "fits": fit[i],
                    "assumed": list(row.assumed),
                }
                for i, row in enumerate(known)
            ],
            "refused": [{"id": name, "reason": reason} for name, reason in refused],
            "sources": [{k: None if v != v else v for k, v in vars(score).items()} for score in table],
        }
        print(json.dumps(record))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 110)  # a source's name and eight figures
    grid = Grid(header_style="bold", box=None, padding=(0, 2, 0, 0))
    heads = ("source", "rows", "shapes", "constant MFU", "presets", "held out", "regret", "of 3")
    for name in (*heads, *(["given"] if factors else [])):
        grid.add_column(name, justify="left" if name == "source" else "right", no_wrap=True)
    for s in table:
        cells = [s.source[:40], f"{s.rows}", f"{s.shapes}"]
        cells += [_number(x) for x in (s.constant, s.preset, s.held_out, s.regret, s.regret_of_three)]
        grid.add_row(*cells, *([_number(s.given)] if factors else []))
    wide = [s for s in table if s.rows >= 5]
    cells = [f"median of {len(wide)} sources of 5 rows up", f"{len(known)}", ""]
    cells += [_median([getattr(s, k) for s in wide]) for k in ("constant", "preset", "held_out")]
    jobs = sum(s.groups for s in table)
    cells += [_number(sum(getattr(s, k) * s.groups for s in table if s.groups) / max(jobs, 1))
              for k in ("regret", "regret_of_three")]  # fmt: skip
    grid.add_row(*cells, *([_median([s.given for s in wide])] if factors else []), style="bold")
    console.print("Mean absolute error of the step time in percent; held out: fitted without the row's shape.")
    console.print(
        "Regret: how much slower the first choice (best of three) is than the best layout measured, mean over jobs."
    )
    console.print(grid)
    console.print()
    for program, count, wrong in memory_scores(known, gib):
        console.print(f"memory  {program:<20} {count:>4} rows  error {wrong:.1f} %")
    failed = [i for i, row in enumerate(known) if not row.ran]
    ran = [i for i, row in enumerate(known) if row.ran and row.gib]
    console.print(
        f"memory  of {len(failed)} rows that ran out, {sum(not fit[i] for i in failed)} are rejected; "
        f"of {len(ran)} that ran with memory stated, {sum(not fit[i] for i in ran)}"
    )
    if refused:
        console.print(f"\n{len(refused)} rows cannot be read:")
        for reason in dict.fromkeys(reason for _, reason in refused):
            names = [name for name, why in refused if why == reason]
            more = f" and {len(names) - 12} more" if len(names) > 12 else ""
            console.print(f"  {reason}: {', '.join(names[:12])}{more}", soft_wrap=True, markup=False)
    return 0


@app.command()
def calibrate(rows: Rows, out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write (JSON).")]) -> int:
    """Fit the model's constants to measured rows, within bounds, for --calibration."""
    from weft.planner import calibrate as fitting
    from weft.planner.rows import read_rows

    known, refused = read_rows(rows)
    found = fitting.calibrate(known)
    fitting.save(found, out)
    print(f"{out}: {len(found['sources'])} sources from {len(known)} rows; {len(refused)} rows could not be read")
    return 0


def _write_recipe(final: "Final", name: str, model: "Model", path: Path) -> None:
    """The layout as a recipe that ``weft train`` takes."""
    from weft.errors import UsageError
    from weft.planner.explain import recipe_tree, toml
    from weft.recipe import build_recipe

    tree = recipe_tree(final, model)
    build_recipe(tree, str(path))
    try:
        path.write_text(f"# Planned by: weft plan {name}. Your own data goes into [data].\n\n{toml(tree)}")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def _median(values: list[float]) -> str:
    known = [v for v in values if not math.isnan(v)]
    return _number(statistics.median(known)) if known else "-"
