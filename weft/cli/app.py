"""The typer application: what each command takes. What it does stands in the file named after it."""

import glob
import os
from pathlib import Path
from typing import Annotated

import typer

import weft
from weft.cli.plan import app as plan
from weft.shipped import shipped_recipes

app = typer.Typer(
    name="weft",
    help="Train large models on whatever devices there are, under any layout, proved equal to one device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _recipes(incomplete: str) -> list[str]:
    """What the shell offers for RECIPE: names of Weft's own, and files; of anything else what it offers by itself."""
    files = glob.glob(f"{glob.escape(incomplete)}*.toml")
    return [name for name in (*shipped_recipes(), *files) if name.startswith(incomplete)]


_recipe = "A TOML recipe: a file, or one of Weft's by name (weft recipes), e.g. quickstart."
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help=_recipe, autocompletion=_recipes)]
_layout = (
    'Ranks per axis, e.g. "shard=2,tp=2". Axes: pp, dp, shard, cp, tp; also zero, context, ulysses, and of pp: '
    "schedule, virtual, vocab_barriers, skip."
)
LayoutText = Annotated[str | None, typer.Option("--layout", help=_layout)]
_set = typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a recipe value; may be repeated.")
Overrides = Annotated[list[str] | None, _set]
RunFolder = Annotated[Path | None, typer.Option(help="Run folder; runs/NAME by default.")]
Resume = Annotated[
    str | None, typer.Option(metavar="auto|DIR|s3://...", help="Continue a run or checkpoint, under any layout.")
]
_ranks = "Ranks for a recipe without a layout, which the planner then chooses; else one per GPU, or one."
_probe_file = "From weft probe: the planner chooses by it, and also how many ranks."
_ms = "{} of a microbatch on a rank, all its stages."
_types = typer.Option("--types", help="Type-check the step instead: no devices, any world size.")


_verbose = "Show tracebacks, as WEFT_DEBUG=1 does; without a command: print the version."


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help=_verbose)] = False,
) -> None:
    if version or (verbose and context.invoked_subcommand is None):
        typer.echo(f"weft {weft.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
    if verbose:
        os.environ["WEFT_DEBUG"] = "1"


@app.command()
def train(
    recipe: RecipeFile,
    layout: LayoutText = None,
    overrides: Overrides = None,
    out: RunFolder = None,
    resume: Resume = None,
    ranks: Annotated[int | None, typer.Option(min=1, help=_ranks)] = None,
    cluster: Annotated[str | None, typer.Option(metavar="FILE", help=_probe_file)] = None,
) -> int:
    """Train a model. Starts one process per rank, or joins those of torchrun or Slurm."""
    from weft.cli.train import run

    return run(recipe, layout, overrides or [], out, resume, ranks, cluster)


@app.command()
def verify(
    recipe: RecipeFile,
    layout: LayoutText = None,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    types: Annotated[bool, _types] = False,
    dtype: Annotated[str, typer.Option(help="float64 (to 1e-10) or float32 (to 1e-5).")] = "float64",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Prove that a layout computes what one device computes. Exit code 0: equal, 1: not."""
    from weft.cli.verify import run

    return run(recipe, layout, overrides or [], steps, types, dtype, as_json)


@app.command()
def generate(
    checkpoint: Annotated[
        str, typer.Option(help="A run, a checkpoint (folder or s3://...), or a Hugging Face folder.")
    ],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="FILE", help="A file with it; not printed.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 120,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many; 0 means all.")] = 40,
    seed: int = 0,
    layout: Annotated[str | None, typer.Option(help='Ranks for long prompts, e.g. "cp=4"; each has the model.')] = None,
) -> int:
    """Continue a text with a trained model; a long one on several ranks, which cut it and its keys and values."""
    from weft.cli.generate import run

    return run(checkpoint, prompt, prompt_file, tokens, temperature, top_k, seed, layout)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="A run folder, or several to compare.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; report.html or compare.html in RUN.")] = None,
) -> int:
    """Write the report of a run, or of several side by side: one HTML page that works offline."""
    from weft.observe.report import write_report

    typer.echo(write_report(*runs, out=out))
    return 0


@app.command()
def export(
    checkpoint: Annotated[str, typer.Option(help="A run folder or a checkpoint; or s3://...")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
) -> int:
    """Write a checkpoint as a Hugging Face model: safetensors, config and tokenizer."""
    from weft.cli.generate import export_model

    typer.echo(export_model(checkpoint, out))
    return 0


@app.command()
def schedule(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="e.g. 1f1b; without it, all are listed.")] = None,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline ranks, P.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches per step, M.")] = 8,
    virtual: Annotated[int | None, typer.Option(min=1, help="Stages per rank (looped schedules: 2).")] = None,
    forward: Annotated[float, typer.Option(min=0, metavar="MS", help=_ms.format("Forward"))] = 1.0,
    backward_input: Annotated[float, typer.Option(min=0, metavar="MS", help=_ms.format("Input gradient"))] = 1.0,
    backward_weight: Annotated[float, typer.Option(min=0, metavar="MS", help=_ms.format("Weight gradient"))] = 1.0,
    comm: Annotated[float, typer.Option(min=0, metavar="MS", help="A move between two ranks.")] = 0.0,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it as a page to explore.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Simulate and draw a pipeline schedule: makespan, bubble, peak activations. Needs no devices.

    Makespan: the longest time from a rank's first action to its last, what a step takes in a run of many.
    Activations are counted in microbatches: 1 is what all stages of a rank save of one microbatch.
    """
    from weft.cli.schedule import run
    from weft.schedule.build import Times

    times = Times(forward, backward_input, backward_weight, comm)
    return run(name, stages, microbatches, virtual, times, {"svg": svg, "html": html, "trace": trace}, as_json)


@app.command()
def probe(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The cluster file to write.")] = Path("probe.toml"),
    ranks: Annotated[int, typer.Option(min=1, help="Measure with 1, 2, 4 ... up to so many ranks at once.")] = 4,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and turns.")] = False,
) -> int:
    """Measure this machine for weft plan: products, memory, operators, collectives. Under torchrun: its ranks."""
    from weft.cli.probe import run

    return run(out, ranks, quick)


@app.command()
def recipes() -> int:
    """List the recipes that come with Weft: name, layout and what each shows. Commands take them by name."""
    from weft.cli.recipes import ls

    return ls()


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="NAME.toml is written.")],
    source: Annotated[str, typer.Option("--from", metavar="RECIPE", help="What to start from.")] = "quickstart",
) -> int:
    """Write a recipe to edit: one that runs, with every other setting and its meaning as comments."""
    from weft.cli.recipes import new as write

    return write(name, source)


@app.command()
def techniques() -> int:
    """List the published techniques in Weft, with recipe, proof and measured figure."""
    from weft.cli.techniques import run

    return run()


checkpoints = typer.Typer(
    help="List, look into, verify, compare, merge, convert and prune checkpoints.", no_args_is_help=True
)
app.add_typer(checkpoints, name="checkpoint")
_newest = "A checkpoint, or a run: its newest one. A folder or s3://bucket/prefix."
OneCheckpoint = Annotated[str, typer.Argument(metavar="PATH", help=_newest)]
_all = "A run or a checkpoint: a folder or s3://bucket/prefix."
AllCheckpoints = Annotated[str, typer.Argument(metavar="PATH", help=_all)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@checkpoints.command("ls")
def checkpoint_ls(path: AllCheckpoints, as_json: AsJson = False) -> int:
    """List the checkpoints of a run: step, layout, size, and whether they seem whole."""
    from weft.cli.checkpoint import ls

    return ls(path, as_json)


@checkpoints.command("inspect")
def checkpoint_inspect(
    path: OneCheckpoint,
    pattern: Annotated[str | None, typer.Argument(help="Part of a name, or a pattern such as '*.norm'.")] = None,
    as_json: AsJson = False,
) -> int:
    """Show what a checkpoint holds: run, progress and tensors."""
    from weft.cli.checkpoint import inspect

    return inspect(path, pattern, as_json)


@checkpoints.command("verify")
def checkpoint_verify(path: AllCheckpoints) -> int:
    """Read checkpoints from end to end and check every digest. Exit code 0: whole, 1: damaged."""
    from weft.cli.checkpoint import verify

    return verify(path)


@checkpoints.command("diff")
def checkpoint_diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_newest)],
    b: Annotated[str, typer.Argument(metavar="B", help=_newest)],
    as_json: AsJson = False,
) -> int:
    """Compare the tensors of two checkpoints, of whatever layout. Exit code 0: equal bit by bit, 1: not."""
    from weft.cli.checkpoint import diff

    return diff(a, b, as_json)


@checkpoints.command("merge")
def checkpoint_merge(
    path: OneCheckpoint, out: Annotated[str, typer.Option(help="The folder to make, or s3://...")]
) -> int:
    """Rewrite a checkpoint of many ranks as one of a single rank, verified and bit by bit the same."""
    from weft.cli.checkpoint import merge

    return merge(path, out)


@checkpoints.command("prune")
def checkpoint_prune(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or s3://bucket/prefix.")],
    last: Annotated[int, typer.Option("--keep-last", min=1, metavar="N", help="Keep the newest N.")],
    every: Annotated[int, typer.Option("--keep-every", min=0, metavar="K", help="Keep every K steps.")] = 0,
    best: Annotated[str | None, typer.Option(metavar="METRIC", help="Keep the lowest, e.g. validation.loss.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
) -> int:
    """Delete old checkpoints of a run, but never the last that verifies."""
    from weft.cli.checkpoint import thin

    return thin(run, last, every, best, dry_run)


_from = typer.Option("--from", help="weft, hf, dcp, deepspeed, megatron or gguf; guessed if left out.")
_config = typer.Option(help="The model's config.json, if none lies beside SOURCE.")
_out = typer.Option(help="The folder to make; with --to weft also s3://...")


@checkpoints.command("convert")
def checkpoint_convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint of Weft's or of another program.")],
    out: Annotated[str, _out],
    kind: Annotated[str | None, _from] = None,
    to: Annotated[str, typer.Option(help="weft, hf or dcp.")] = "weft",
    config: Annotated[Path | None, _config] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 weights; else as stored.")] = None,
    optimizer: Annotated[bool, typer.Option(help="Take optimizer state along.")] = True,
) -> int:
    """Convert checkpoints of other programs, with one tensor in memory at a time."""
    from weft.cli.convert import run

    return run(source, out, kind, to, config, dtype, optimizer)


app.add_typer(plan, name="plan")
