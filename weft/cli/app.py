"""The typer application: what each command takes. What it does stands in the file named after it."""

import os
from pathlib import Path
from typing import Annotated

import typer

import weft
from weft.cli.arguments import AsJson, LayoutText, Overrides, RecipeFile
from weft.cli.checkpoint import app as checkpoint
from weft.cli.new import new
from weft.cli.plan import plan
from weft.cli.probe import probe
from weft.cli.recipes import recipes
from weft.cli.report import report
from weft.cli.schedule import schedule
from weft.cli.techniques import techniques

app = typer.Typer(
    name="weft",
    help="Train large models on whatever devices there are, under any layout, proved equal to one device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


RunFolder = Annotated[Path | None, typer.Option(help="Run folder; runs/NAME by default.")]
Resume = Annotated[
    str | None, typer.Option(metavar="auto|DIR|s3://...", help="Continue a run or checkpoint, under any layout.")
]
_ranks = "Ranks for a recipe without a layout, which the planner then chooses; else one per GPU, or one."
_probe_file = "From weft probe: the planner chooses by it, and also how many ranks."
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
    dtype: Annotated[str, typer.Option(help="float64 (to 1e-10) or float32 (to 5e-5).")] = "float64",
    cases: Annotated[int | None, typer.Option("--random", min=1, help="Try so many random layouts instead.")] = None,
    seed: Annotated[int, typer.Option(help="Of --random: other cases.")] = 0,
    minutes: Annotated[float | None, typer.Option(min=0, help="Of --random: stop after so long.")] = None,
    as_json: AsJson = False,
) -> int:
    """Prove that a layout computes what one device computes. Exit code 0: equal, 1: not."""
    from weft.cli.verify import run, run_random

    if cases is not None:
        return run_random(recipe, cases, seed, minutes, dtype, as_json)
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
def export(
    checkpoint: Annotated[str, typer.Option(help="A run folder or a checkpoint; or s3://...")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
) -> int:
    """Write a checkpoint as a Hugging Face model: safetensors, config and tokenizer."""
    from weft.cli.generate import export_model

    typer.echo(export_model(checkpoint, out))
    return 0


app.command()(report)
app.command()(schedule)
app.command()(probe)
app.command()(recipes)
app.command()(new)
app.command()(techniques)
app.add_typer(checkpoint, name="checkpoint")
app.command(no_args_is_help=True)(plan)
